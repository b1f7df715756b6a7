"""The look of `measure=True`: the largest gradient, zeros and fp16 subnormals, before anything is written.

What a check has measured is one row (fp64, see `kernels.abi`), kept with its flag. Ranks add theirs up in the check's
own reduction: counts as they are, the largest gradient as a histogram, since a sum has no maximum.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import kernels
from scaler_triton.core.flag import Flag
from scaler_triton.core.look import Look
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.passes import table_of
from scaler_triton.core.plan import Batch, GradPlan
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.torch_ops import exponent_of, times_power_of_2, wide_on
from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import LARGEST, MEASURED_AT, SEEN, SMALLEST_NORMAL, SUBNORMAL, ZEROS

if TYPE_CHECKING:
    from scaler_triton.core.check import Checks

# The binades in which ranks place their largest scaled gradient; the first and the last take all beyond, too.
BINADES, LOWEST_BINADE = 64, -31
PACKED = 3 + BINADES

_copies: weakref.WeakKeyDictionary[Flag, HostCopy] = weakref.WeakKeyDictionary()


def measure_in(checks: Checks) -> None:
    """Have a scaler's checks measure, before its first one."""
    look = Measure()
    checks.dividing = [look, *checks.dividing]
    checks.reading = [look, *checks.reading]
    checks.task, checks.n_sums, checks.n_extra = "measuring", PACKED, abi.MEASURED_ROW


def is_measuring(checks: Checks) -> bool:
    """Return whether a scaler's checks measure."""
    return checks.n_extra == abi.MEASURED_ROW


def copy_of(flag: Flag) -> HostCopy:
    """Return the copy to the host of what a flag's last check has measured."""
    return _copies.setdefault(flag, HostCopy())


class Measure(Look):
    """row = [largest finite abs(g), zeros, fp16 subnormals, elements, scale], of gradients as they are: scaled."""

    n_sums = PACKED

    def begin(
        self, plan: GradPlan, parameters: Sequence[Tensor], peers: Ranks | None, flag: Flag, scale: Tensor
    ) -> None:
        """Clear the flag's row."""
        row: Any = flag.extra
        row.zero_()[MEASURED_AT].fill_(scale.reshape(()))

    def run(self, batch: Batch, scale: Tensor, flag: Flag) -> None:
        """Add what a batch holds to the flag's row."""
        row: Any = flag.extra
        if not batch.is_partial:
            measure_batch(batch, row)

    def numbers(self, flags: Sequence[Flag]) -> Tensor:
        """Return the first flag's row as numbers that ranks may sum; of flags that share a check, it gets them all."""
        row: Any = flags[0].extra
        for other in flags[1:]:
            _combine(row, other.extra)
            other.extra.zero_()  # type: ignore[union-attr]
        exponents = torch.arange(LOWEST_BINADE, LOWEST_BINADE + BINADES, device=row.device)
        binade = (exponent_of(row[LARGEST] / row[MEASURED_AT]) + exponent_of(row[MEASURED_AT])).clamp(
            LOWEST_BINADE, LOWEST_BINADE + BINADES - 1
        )
        one = (exponents == binade) & (row[LARGEST] > 0)
        return torch.cat([row[ZEROS : SEEN + 1], one.to(row.dtype)])

    def agreed(self, flags: Sequence[Flag], numbers: Tensor) -> None:
        """Replace the first flag's row by what all ranks have measured."""
        row: Any = flags[0].extra
        counts, histogram = numbers[:3], numbers[3:]
        exponents = torch.arange(LOWEST_BINADE, LOWEST_BINADE + BINADES, device=row.device)
        binade = torch.where(histogram > 0, exponents, LOWEST_BINADE).amax() - exponent_of(row[MEASURED_AT])
        largest = times_power_of_2(row[MEASURED_AT], binade)
        row[LARGEST] = torch.where(histogram.sum() > 0, largest, 0.0)
        row[ZEROS : SEEN + 1] = counts


def measure_batch(batch: Batch, measured: Tensor) -> None:
    """Add the largest finite gradient, zeros, fp16 subnormals and elements of a batch to `measured`.

    Args:
        batch: read only; its backend is chosen.
        measured: as `measure` takes it, but on any device; mutated.
    """
    layout = batch.layout
    at_home = layout.device == measured.device
    here = measured if at_home else wide_on(layout.device, torch.zeros_like(measured))
    if layout.backend == "torch":
        measure(batch.present, here)
    else:
        kernels().measure.launch_measure(table_of(batch, "measure"), here)
    if not at_home:
        _combine(measured, wide_on(measured.device, here))


def measure(tensors: Sequence[Tensor], measured: Tensor) -> None:
    """Add to `measured` (`wide_dtype`, [MEASURED_ROW]) the largest finite value, zeros, fp16 subnormals, all elements.

    largest = max(largest, abs(g) for all g that are finite)
    zeros, subnormal, seen += (g == 0).sum(), (0 < abs(g) < 2**-14).sum(), g.numel()
    """
    for tensor in tensors:
        if tensor.numel():
            size = tensor.abs()
            largest = torch.where(size.isfinite(), size, 0.0).amax().to(measured.dtype)
            measured[LARGEST] = torch.maximum(measured[LARGEST], largest)
            zeros = (size == 0).sum()
            small = (size < SMALLEST_NORMAL).sum() - zeros
            measured[ZEROS] += zeros
            measured[SUBNORMAL] += small
            measured[SEEN] += tensor.numel()


def _combine(into: Any, other: Any) -> None:
    """Add what another pass has measured, on the same device, to `into`."""
    into[LARGEST] = torch.maximum(into[LARGEST], other[LARGEST])
    into[ZEROS : SEEN + 1] += other[ZEROS : SEEN + 1]

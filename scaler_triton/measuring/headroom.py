"""How far gradients are from overflow, and how many are lost below: what `measure.py` has found in the last checks.

With `scale_policy="headroom"` the rule of `update.py` moves a cap, and what was measured the scale below it:

    cap = the rule's result for (scale if found_inf else cap)
    e = floor(log2(the largest unscaled gradient)), which enters a window unless found_inf or all gradients are 0
    scale = cap if found_inf else min(2 ** (15 - headroom_bits - max(window)), cap), as it was while there is no e

by torch's ops, or `kernels/update_scale.py` with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.memory import OnDevice
from scaler_triton.core.torch_ops import exponent_of, times_power_of_2, wide_dtype, wide_on
from scaler_triton.core.update import Rule
from scaler_triton.kernels import abi
from scaler_triton.measuring.measure import copy_of
from scaler_triton.text import count_of

FP16_MAX = 65504.0
# From here on `Headroom` advises another scale.
_SPARE_BITS, _LOST = 3.0, 1e-3


@dataclass(frozen=True)
class Headroom:
    """What the last checks have measured, over all optimizers and ranks; `str` of it is a sentence to act on.

    Args:
        largest: the largest finite abs(gradient), unscaled; over several ranks rounded down to a power of 2 times the
            scale. 0 if there is none.
        bits: log2(65504 / the same as scaled): by how many powers of 2 the scale could grow; inf if `largest` is 0.
        zeros: the share of elements that are 0.
        subnormal: the share that fp16 holds with fewer bits, 0 < abs(gradient) < 2^-14 as scaled.
        seen: how many elements were checked.
    """

    largest: float
    bits: float
    zeros: float
    subnormal: float
    seen: int

    def __str__(self) -> str:
        if not self.seen:
            return "no gradients were measured yet"
        many = f"{self.seen / 1e6:.3g} M gradients" if self.seen >= 1e6 else count_of(self.seen, "gradient")
        if self.zeros == 1.0:
            return f"all of {many} are zero"
        if self.bits == math.inf:
            return f"{self.zeros:.1%} of {many} are zero, no other is finite".replace("%", " %")
        shares = f"{self.zeros:.1%} of {many} are zero, {self.subnormal:.1%} subnormal"
        if self.bits >= _SPARE_BITS and self.subnormal >= _LOST:
            advice = "a larger scale would help"
        else:
            advice = "the scale fits" if self.bits >= 1.0 else "an overflow is near"
        return f"{count_of(round(self.bits), 'bit')} of headroom, {shares}: {advice}".replace("%", " %")


def read_headroom(flags: Sequence[Any], wait: bool) -> Headroom:
    """Return what the checks of these flags have measured, after one wait for the device.

    Without `wait` it is the newest that has arrived on the host, and the next copy is started.
    """
    measured = [flag for flag in flags if flag.extra is not None]
    if wait:
        home = measured[-1].device if measured else torch.device("cpu")  # an earlier scale may have been elsewhere
        rows = torch.stack([wide_on(home, flag.extra) for flag in measured]).tolist() if measured else []
    else:
        rows = [copy_of(flag).newest(flag.extra) or () for flag in measured]
    largest = scaled = zeros = subnormal = seen = 0.0
    for row in rows:
        if row and row[abi.SEEN]:  # empty: no copy has arrived yet
            largest, scaled = max(largest, row[abi.LARGEST] / row[abi.MEASURED_AT]), max(scaled, row[abi.LARGEST])
            zeros, subnormal, seen = zeros + row[abi.ZEROS], subnormal + row[abi.SUBNORMAL], seen + row[abi.SEEN]
    bits = math.log2(FP16_MAX / scaled) if scaled else math.inf
    return Headroom(largest, bits, zeros / max(seen, 1.0), subnormal / max(seen, 1.0), int(seen))


class HeadroomRule(OnDevice, Rule):
    """The window and the cap of `scale_policy="headroom"`, in the order of `kernels.abi`."""

    def __init__(self, bits: int, window: int) -> None:
        super().__init__([0.0, abi.MAX_SCALE, *[0.0] * window])
        self.bits, self.window = bits, window

    def remembered(self) -> tuple[list[int], float]:
        """Return the exponents, oldest first, and the cap, waiting for the device."""
        values = self.read()
        count, ring = int(values[abi.EXPONENTS]), values[abi.HEADROOM_HEADER :]
        known = range(max(0, count - self.window), count)
        return [int(ring[number % self.window]) for number in known], values[abi.CAP]

    def restore(self, exponents: Sequence[int], cap: float) -> None:
        """Replace exponents and cap, of more than the window holds by the last ones."""
        kept = [float(each) for each in exponents][-self.window :]
        self.set([float(len(kept)), cap, *kept, *[0.0] * (self.window - len(kept))])

    def row_of(self, checked: Sequence[Any], device: torch.device) -> Tensor:
        """Return the largest gradient that steps' checks have measured, as a row at scale 1, [1, MEASURED_ROW]."""
        flags = [getattr(step, "flag", None) for step in checked]  # other code may have put plain dicts there
        rows = [flag.extra for flag in flags if flag is not None and flag.extra is not None]
        row = torch.zeros(1, abi.MEASURED_ROW, dtype=wide_dtype(device), device=device)
        row[0, abi.MEASURED_AT].fill_(1.0)
        all_rows = torch.cat([row, *(wide_on(device, each)[None] for each in rows)])
        unscaled = all_rows[:, abi.LARGEST] / all_rows[:, abi.MEASURED_AT]
        row[0, abi.LARGEST] = torch.where(unscaled > 0, unscaled, 0.0).amax()  # NaN where nothing was measured yet
        return row

    def launch_options(self, rows: Any) -> dict[str, Any]:
        """Return the arguments of `bind_update` for rows of what checks have measured."""
        return {"measured": rows, "headroom": self.on(rows.device), "bits": self.bits}

    def moved(self, scale: Tensor, bad: Tensor) -> Tensor:
        """Return what torch's rule moves: the scale if the update is `bad`, else the cap."""
        return torch.where(bad, scale, self.on(scale.device)[abi.CAP].to(scale.dtype))

    def scale_after(self, moved: Tensor, scale: Tensor, row: Tensor, bad: Tensor) -> Tensor:
        """Return the scale after a good update, in `wide_dtype`; remember the largest gradient unless it was `bad`."""
        values, unscaled = self.on(moved.device), row[0, abi.LARGEST] / row[0, abi.MEASURED_AT]
        values[abi.CAP], cap = moved, moved
        count, ring = values[abi.EXPONENTS].long(), values[abi.HEADROOM_HEADER :]
        enters, slot = (unscaled > 0) & ~bad, (count % self.window).reshape(1)
        exponent = exponent_of(unscaled).to(values.dtype).clamp(min=-1023.0)
        ring.index_copy_(0, slot, torch.where(enters, exponent, ring[slot]))
        count = count + enters
        values[abi.EXPONENTS] = count
        place = torch.arange(self.window, device=cap.device)
        top = torch.where(place < count, ring, -4096.0).amax()
        target = times_power_of_2(torch.ones_like(top), (abi.FP16_EXPONENT - self.bits - top).int())
        return torch.where(count > 0, torch.minimum(target, cap.to(values.dtype)), scale.to(values.dtype))

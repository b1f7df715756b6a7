"""What the ranks tell each other in a check: one row of numbers, one all-reduce.

A row is in one of two forms. A maximum is cheaper, and compares the scales exactly; where a look adds numbers of its
own, all are summed:

    status = [found_inf, failed, scale, -scale]                           # fp32 [STATUS], MAX
    totals = [a look's, found_inf, failed, scale, 1 / scale, looks' ...]  # fp64, SUM; the first five are `abi.TOTALS`

Afterwards a flag's status tells the same of both: its flag, whether a rank failed, and whether the scales differ:

    status = [found_inf, failed, max of scales, max of -scales]
    status = [found_inf, failed, sum of scales, excess];  excess = sum(scale) * sum(1 / scale) / ranks**2 - 1

A rank that fails joins with `failed` set, then raises; so does everybody else who reads the flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.core.torch_ops import constants, wide_dtype
from scaler_triton.kernels import abi

if TYPE_CHECKING:
    from scaler_triton.core.flag import Flag
    from scaler_triton.core.look import Look
    from scaler_triton.core.ranks import Ranks

# For n equal scales, `excess` is below n times this in any order of summation, by the dtype of the sums: each of 2n
# roundings is at most an eighth of it.
_ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-21}


class PeerFailedError(RuntimeError):
    """Another rank failed to check its gradients."""


def write(flags: Sequence[Flag], looks: Sequence[Look], scale: Tensor) -> Tensor:
    """Return this rank's row; all that may fail on one rank alone is done here, while it can still tell the others.

    Args:
        flags: of the optimizers that are checked together.
        looks: those of the check.
        scale: one element, on the flags' device; read.
    """
    first, adding = flags[0], _adding(looks)
    if not adding:
        torch.mul(scale, constants(scale, torch.float32, 1.0, -1.0), out=first.status[abi.SCALE :])
        return first.status
    totals = _known_totals(adding)
    totals = _totals_of(first, scale) if totals is None else totals
    numbers = [look.numbers(flags) for look in adding if look.n_sums]
    return torch.cat([totals, *numbers]) if numbers else totals


def agree(flags: Sequence[Flag], looks: Sequence[Look], message: Tensor, peers: Ranks) -> None:
    """Make the flags of one check equal on all ranks, and give each look the sum of its numbers.

    Args:
        flags, looks: as of `write`; the flags are written.
        message: what that returned.
        peers: the ranks that must agree, which all call this.
    """
    first, adding = flags[0], _adding(looks)
    if not adding:
        peers.reduce_(message, "MAX")
        first.summed_over = 0
        return
    peers.reduce_(message, "SUM")
    for flag in flags:
        flag.summed_over, flag.is_final = len(peers.ranks), True
    totals, rest = _known_totals(adding), message[abi.TOTALS :]
    if totals is None:
        read_sums(first, message[: abi.TOTALS])
    elif totals is not message:  # whoever computed them also reads them
        totals.copy_(message[: abi.TOTALS])
    for look in adding:
        if look.n_sums:
            look.agreed(flags, rest[: look.n_sums])
            rest = rest[look.n_sums :]


def _adding(looks: Sequence[Look]) -> list[Look]:
    return [look for look in looks if look.n_sums is not None]


def _known_totals(adding: Sequence[Look]) -> Tensor | None:
    return next((totals for look in adding if (totals := look.totals) is not None), None)


def tell_failure(peers: Ranks, device: torch.device, n_sums: int | None) -> None:
    """Join the ranks that wait in `agree`, with the failure set; `n_sums` is that of their looks together."""
    if n_sums is None:
        status = [1.0, 1.0, -math.inf, -math.inf]  # no scale: the others compare theirs
        peers.reduce_(torch.tensor(status, dtype=torch.float32, device=device), "MAX")
    else:
        # Without a scale, too: an update clears the failure, but scales are still compared.
        totals = [math.nan, 1.0, 1.0, 0.0, 0.0] + [0.0] * n_sums
        peers.reduce_(torch.tensor(totals, dtype=wide_dtype(device), device=device), "SUM")


def _totals_of(flag: Flag, scale: Tensor) -> Tensor:
    totals = torch.zeros(abi.TOTALS, dtype=wide_dtype(flag.device), device=flag.device)
    totals[abi.OVERFLOWS] = flag.found_inf
    write_scales(totals[abi.SCALES :], scale)
    return totals


def write_scales(rows: Tensor, scale: Tensor) -> None:
    """Write the scale and its inverse into `rows` (`wide_dtype`, [2]), for ranks that compare their sums."""
    torch.pow(scale, constants(scale, rows.dtype, 1.0, -1.0), out=rows)


def read_sums(flag: Flag, totals: Tensor) -> None:
    """Compute a flag's status from totals (`wide_dtype`, [TOTALS], on its device) that were summed over the ranks."""
    sums = totals[abi.OVERFLOWS :]
    torch.clamp(sums, max=constants(sums, sums.dtype, 1.0, 1.0, abi.MAX_SCALE, abi.MAX_SCALE), out=flag.status)
    scales, inverses = totals[abi.SCALES : abi.SCALES + 1], totals[abi.INVERSES :]
    minus_one, ranks = constants(totals, totals.dtype, -1.0), flag.summed_over or 1
    torch.addcmul(minus_one, scales, inverses, value=1 / ranks**2, out=flag.status[abi.EXCESS :])


def require_together(status: Any, summed_over: int, device: torch.device) -> None:
    """Raise if an agreed status shows a failed rank or different scales; `summed_over` as of a flag."""
    if status[abi.FAILURE]:
        raise PeerFailedError("Another rank failed to check its gradients, so this step is skipped on all ranks.")
    scale, other = status[abi.SCALE], status[abi.EXCESS]
    if summed_over:
        apart = _compare_sums(summed_over, scale, other, _ROUNDING[wide_dtype(device)])
    else:
        apart = "" if scale == -other else f"from {-other} to {scale}"
    if apart:
        raise RuntimeError(
            f"The ranks hold different scales, {apart}: they no longer train one model. Go back to a checkpoint "
            "in which they agree, or set one scale on all of them with update(new_scale)."
        )


def _compare_sums(ranks: int, scales: float, excess: float, rounding: float) -> str:
    """Return how the scales differ, "" if they do not, from their sum and their mean's excess over the harmonic."""
    if not (excess > ranks * rounding or math.isnan(scales)):
        return ""
    high = min(scales, abi.MAX_SCALE) / ranks
    low = high / (1 + min(excess, abi.MAX_SCALE))
    # As many digits as it takes to distinguish them, at least six.
    digits = next((digits for digits in range(6, 17) if f"{low:.{digits}g}" != f"{high:.{digits}g}"), 6)
    return f"some below {low:.{digits}g}, some above {high:.{digits}g}"

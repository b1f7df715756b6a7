"""Are the ranks' scales equal? What each adds to a reduction so that its outcome tells, and how that is said."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

MAX = torch.finfo(torch.float32).max
# The fp64 sums of n equal scales and of their inverses miss their product by less than n times this, however they are
# added up: each of 2n roundings is at most an eighth of it.
_ROUNDING = 2.0**-50

# Says from the last two signals how far the ranks' scales lie apart, "" where they are equal.
Comparison = Callable[[float, float], str]


def write_scales(rows: Tensor, scale: Tensor) -> None:
    """Write into each row (fp64, [2] or [n, 2]) what ranks that take sums add up to compare their scales."""
    torch.pow(scale, constants(scale, torch.float64, 1.0, -1.0).expand_as(rows), out=rows)


def compare_maxima(scale: float, negative: float) -> str:
    """Tell how far scales lie apart by their maximum and that of their negatives."""
    return "" if scale == -negative else f"from {-negative} to {scale}"


def compare_sums(ranks: int, scales: float, excess: float) -> str:
    """Tell the scales' harmonic mean and, larger by `excess`, the arithmetic one: both lie between the scales."""
    if not (excess > ranks * _ROUNDING or math.isnan(scales)):
        return ""
    mean = min(scales, MAX) / ranks
    return "some below {}, some above {}".format(*_told_apart(mean / (1 + min(excess, MAX)), mean))


def _told_apart(low: float, high: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to see that they differ, six at least."""
    digits = next((digits for digits in range(6, 17) if f"{low:.{digits}g}" != f"{high:.{digits}g}"), 6)
    return f"{low:.{digits}g}", f"{high:.{digits}g}"


def constants(beside: Tensor, dtype: torch.dtype, *numbers: float) -> Tensor:
    """Return `numbers` on the device of `beside`, made once: not for torch's fake tensors, good only in their mode."""
    make = _kept_constants if type(beside) is Tensor else _kept_constants.__wrapped__
    return make(beside.device, dtype, *numbers)


@functools.cache
def _kept_constants(device: torch.device, dtype: torch.dtype, *numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)

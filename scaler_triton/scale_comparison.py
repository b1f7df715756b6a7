"""Compares the ranks' scales: what each rank adds to a MAX or SUM reduction, and what its result says."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from scaler_triton.waiting import unnoticed

MAX = torch.finfo(torch.float32).max
# For n equal scales, `excess` is below n times this in fp64, in whatever order the sums are taken: each of 2n roundings
# is at most an eighth of it.
_ROUNDING = 2.0**-50

# Describes how the ranks' scales differ, by the last two numbers of the status; "" if they are equal.
Comparison = Callable[[float, float], str]


def write_scales(rows: Tensor, scale: Tensor) -> None:
    """Write the scale and its inverse into each row (fp64, [2] or [n, 2]), for ranks that compare by sums."""
    torch.pow(scale, constants(scale, torch.float64, 1.0, -1.0).expand_as(rows), out=rows)


def compare_maxima(scale: float, negative: float) -> str:
    """Compare by the maximum of the scales and that of their negatives."""
    return "" if scale == -negative else f"from {-negative} to {scale}"


def compare_sums(ranks: int, scales: float, excess: float) -> str:
    """Compare by the scales' sum and by how much their arithmetic mean exceeds the harmonic one, relative to it."""
    if not (excess > ranks * _ROUNDING or math.isnan(scales)):
        return ""
    mean = min(scales, MAX) / ranks
    return "some below {}, some above {}".format(*_told_apart(mean / (1 + min(excess, MAX)), mean))


def _told_apart(low: float, high: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to distinguish them, at least six."""
    digits = next((digits for digits in range(6, 17) if f"{low:.{digits}g}" != f"{high:.{digits}g}"), 6)
    return f"{low:.{digits}g}", f"{high:.{digits}g}"


def constants(beside: Tensor, dtype: torch.dtype, *numbers: float) -> Tensor:
    """Return `numbers` on the device of `beside`, cached; not for fake tensors, which are valid in their mode only."""
    make = _kept_constants if type(beside) is Tensor else _kept_constants.__wrapped__
    return make(beside.device, dtype, *numbers)


@functools.cache
def _kept_constants(device: torch.device, dtype: torch.dtype, *numbers: float) -> Tensor:
    with unnoticed(device):
        return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)

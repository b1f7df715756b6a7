"""Sums of squares and other norms in plain torch: for devices without Triton.

torch's own norms are rounded to the gradients' dtype, and on the CPU their fp32 sums of millions of squares drift.
Here squares are summed in fp32 over short rows only, and the rows in fp64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from scaler_triton import reference

# Totals, fp64 [5], that ranks sum: the sum of squares, the flag, whether a rank failed to check its gradients, and the
# scale and its inverse, by which the ranks compare their scales.
SQUARES, FLAG, FAILED, SCALES = range(4)
COLUMNS = 5

# torch's message.
NONFINITE = (
    "The total norm of order {} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
    "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
)

# How many squares are summed in fp32: multiples of a vector, few enough to be accurate, enough to be quick.
_ROWS = range(512, 127, -16)
# Up to so many row sums, Python is quicker than ops.
_FEW_ROWS = 32
# Smaller tensors are concatenated up to so many elements: below the 32,768 from which on torch uses more threads, which
# costs more than it gains; for dtypes that have to be converted larger is better.
_GATHERED, _GATHERED_16BIT = 1 << 13, 1 << 17
# 16-bit dtypes are converted in pieces of so many elements, which stay in the cache and in the allocator's heap.
_CONVERTED = 1 << 17
# If the mean of the squares is below this, underflow may matter.
_LOW_SQUARE = 2.0**-120
_ENOUGH = 2.0**-60  # for more elements than there can be


def sum_one_by_one(tensors: Sequence[Tensor], found_inf: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Return `sum(weight * (tensor.double() ** 2).sum())`, and set `found_inf` to 1 if a tensor holds NaN or Inf.

    In fp64 throughout, for any device and any kind of tensors; no host wait.

    Args:
        tensors: at least one fp16, bf16, fp32 or fp64 tensor, all of one device and dtype, any shape and strides; read.
        found_inf: fp32, one element, on the same device; written only to become 1.
        weights: one a tensor; None: 1 for all.

    Returns: fp64, `()`, on the same device.
    """
    norms = torch._foreach_norm(list(tensors), 2, torch.float64)
    squares = torch._foreach_mul(norms, norms)
    if tensors[0].dtype is torch.float64:  # whose squares overflow even where all is finite
        reference.check_nonfinite(tensors, found_inf)
    else:
        found_inf.copy_(torch.maximum(found_inf, (~torch.stack(squares).isfinite().all()).to(found_inf.dtype)))
    if weights is not None:
        torch._foreach_mul_(squares, list(weights))  # as numbers: a copy to the device could not be captured
    return torch.stack(squares).sum()


def norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return `torch.linalg.vector_norm` of all elements in fp64, as torch takes it: the norm of the tensors' norms.

    Args:
        tensors: floating point, of one device, not all of them empty; read.
        norm_type: its order; inf is the largest absolute value.

    Returns: fp64, `()`, on the same device.
    """
    norms = [torch.linalg.vector_norm(t, norm_type, dtype=torch.float64) for t in tensors if t.numel()]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return whole


def norm_of(totals: Tensor) -> Tensor:
    """Return the 2-norm, fp32 `()`, from totals (fp64, [5])."""
    return totals[SQUARES].sqrt().float()


def sum_on_host(tensors: Sequence[Tensor], found_inf: Tensor, weights: Sequence[float] | None) -> float:
    """`sum_one_by_one` for tensors on the CPU, quicker, and as a number; its relative error is below 1e-6.

    Equal values in equal shapes give equal bits at any address: ranks with replicas must not drift apart.
    """
    if weights is None:
        total = _quick_sum(tensors)
    else:
        total = sum(weight * _quick_sum(members) for weight, members in _by_weight(tensors, weights).items())
    if not math.isfinite(total):
        bad = torch.zeros_like(found_inf)
        reference.check_nonfinite(tensors, bad)
        if bad.item():
            found_inf.fill_(1.0)
            return total
    elif total >= _ENOUGH or total >= sum(tensor.numel() for tensor in tensors) * _LOW_SQUARE:
        return total
    return sum_one_by_one(tensors, found_inf, weights).item()


def _by_weight(tensors: Sequence[Tensor], weights: Sequence[float]) -> dict[float, list[Tensor]]:
    groups: dict[float, list[Tensor]] = {}
    for tensor, weight in zip(tensors, weights, strict=True):
        groups.setdefault(weight, []).append(tensor)
    return groups


def _quick_sum(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares, unless it is infinite or so small that squares may have been lost."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms: list[Tensor] = []
    for piece in _pieces(tensors):
        numel = piece.numel()
        row = _row_length(numel)
        rest = numel % row
        if rest:
            flat = piece.reshape(-1)
            piece = flat[: numel - rest]
            norms.append(torch.linalg.vector_norm(flat[numel - rest :], dim=0, keepdim=True, dtype=wide))
        norms.append(torch.linalg.vector_norm(piece.reshape(-1, row), dim=1, dtype=wide))
    rows = norms[0] if len(norms) == 1 else torch.cat(norms)
    if rows.numel() <= _FEW_ROWS:
        return float(sum(value * value for value in rows.tolist()))
    return rows.double().square_().sum().item()


@functools.lru_cache(maxsize=4096)
def _row_length(numel: int) -> int:
    """Return the longest row that divides `numel`, as a rest is one more op; else the longest of all."""
    return next((row for row in _ROWS if numel % row == 0), _ROWS[0])


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements: small tensors concatenated, large ones split if they have to be converted."""
    converted = tensors[0].element_size() < 4
    enough = _GATHERED_16BIT if converted else _GATHERED
    small: list[Tensor] = []
    size = 0
    for tensor in tensors:
        numel = tensor.numel()
        if numel < enough:
            small.append(tensor)
            size += numel
            if size >= enough:
                yield _concatenated(small)
                small, size = [], 0
        elif converted:
            yield from flat_pieces(tensor, _CONVERTED)
        else:
            yield tensor
    if small:
        yield _concatenated(small)


def _concatenated(tensors: list[Tensor]) -> Tensor:
    if all(tensor.dim() == 1 for tensor in tensors):
        return torch.cat(tensors)  # three times as quick, but only for 1-D tensors
    flat: Tensor = torch.ops.aten.flatten_dense_tensors(tensors)
    return flat


def flat_pieces(tensor: Tensor, numel: int) -> tuple[Tensor, ...]:
    """Return views of a contiguous tensor, of `numel` elements each but for the last."""
    return torch.split(tensor.detach().reshape(-1), numel)

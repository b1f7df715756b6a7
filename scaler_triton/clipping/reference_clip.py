"""Clipping by a known norm in plain torch: for devices without Triton."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from scaler_triton import reference
from scaler_triton.clipping.reference_norm import FLAG, flat_pieces, norm_of
from scaler_triton.neighbours import Neighbours

# Bytes that are unscaled and then clipped while they are in the cache.
_BLOCK_BYTES = 1 << 19
# From this size on a tensor does not fit in the caches.
_SPLIT_BYTES = 1 << 23


def coefficient(flag: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """Return the clip coefficient, fp32 `()`: torch's for a norm, 1 if the flag is not 0."""
    return torch.where(flag != 0, 1.0, _torchs_coefficient(norm, max_norm))


def norm_and_coefficient(totals: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return `norm_of(totals)`, and the clip coefficient."""
    if not totals.is_cpu or type(totals) is not Tensor:  # fake tensors cannot be read
        norm = norm_of(totals)
        return norm, coefficient(totals[FLAG], norm, max_norm)
    squares, flag, *_ = totals.tolist()  # in Python: quicker than ops on one number
    norm = torch.tensor(math.sqrt(squares), dtype=torch.float32, device="cpu")
    return norm, torch.ones_like(norm) if flag else _torchs_coefficient(norm, max_norm)


def _torchs_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    return (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)


def clip_(tensors: Sequence[Tensor], inv_scale: Tensor, coef: Tensor, neighbours: Neighbours | None = None) -> None:
    """Multiply every gradient by `inv_scale`, then by `coef`; each product is rounded to the gradients' dtype.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, then `torch._foreach_mul_` by `coef` in fp32 (for
    fp64 gradients in fp64).

    Args:
        tensors: as for `sum_one_by_one`; written.
        inv_scale: fp32, one element, on the same device.
        coef: fp32 or fp64, one element, on the same device.
        neighbours: what is known of this list from earlier steps.
    """
    ignored = torch.zeros_like(inv_scale)
    if tensors[0].device.type != "cpu":
        reference.unscale_(tensors, inv_scale, ignored, neighbours)
        _multiply_(tensors, coef, ignored)
    elif coef.item() == 1.0:
        reference.unscale_(tensors, inv_scale, ignored, neighbours)
    else:
        for block in _blocks((neighbours or Neighbours()).merged(tensors)):
            torch._amp_foreach_non_finite_check_and_unscale_(block, ignored, inv_scale)
            _multiply_(block, coef, ignored)


def _multiply_(tensors: Sequence[Tensor], coef: Tensor, ignored: Tensor) -> None:
    if tensors[0].dtype in (torch.float32, torch.float64):
        torch._foreach_mul_(list(tensors), coef.reshape(()).to(tensors[0].dtype))
    else:  # the same product; with a factor of another dtype `_foreach_mul_` is one op per tensor
        reference.unscale_(tensors, coef.to(torch.float32), ignored)


def _blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of about `_BLOCK_BYTES`, larger ones alone."""
    block: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= _BLOCK_BYTES:
            yield from _split(tensor)
            continue
        block.append(tensor)
        size += tensor.nbytes
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _split(tensor: Tensor) -> Iterator[list[Tensor]]:
    """Yield a large tensor, in parts if that is quicker: not with several threads, nor with 16-bit dtypes."""
    pays = tensor.nbytes >= _SPLIT_BYTES and tensor.element_size() >= 4 and torch.get_num_threads() == 1
    if pays and tensor.is_contiguous():
        yield from ([part] for part in flat_pieces(tensor, _BLOCK_BYTES // tensor.element_size()))
    else:
        yield [tensor]

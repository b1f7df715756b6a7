"""The ops on gradients in plain torch: for devices without Triton, and the tests' reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scaler_triton.neighbours import Neighbours

# From this size on a tensor on the CPU is checked by a sum, which only reads. Smaller ones go to torch's op, in one
# call: writing the same bits back to the caches is as quick, or quicker.
_LARGE_BYTES = 1 << 19


def unscale_(
    tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, neighbours: Neighbours | None = None
) -> None:
    """Multiply every gradient by `inv_scale` and set `found_inf` to 1 if one held NaN or Inf before.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, for tensors of one device and dtype, also for
    bf16 where that op has none.

    Args:
        tensors: fp16, bf16, fp32 or fp64, any shape and layout torch's op takes, at least one; written.
        inv_scale: fp32, one element, on the same device.
        found_inf: fp32, one element, on the same device; written only to become 1.
        neighbours: what is known of this list from earlier steps.
    """
    if tensors[0].dtype is torch.bfloat16 and not tensors[0].is_cpu:
        _unscale_bf16_(tensors, inv_scale, found_inf)
    elif tensors[0].dtype is torch.float64 and not tensors[0].is_cpu:
        _check_fp64(tensors, found_inf)
        torch._foreach_mul_(list(tensors), inv_scale.double().reshape(()))
    else:
        merged = (neighbours or Neighbours()).merged(tensors)
        torch._amp_foreach_non_finite_check_and_unscale_(merged, found_inf, inv_scale)  # type: ignore[arg-type]


def check_nonfinite(tensors: Sequence[Tensor], found_inf: Tensor, neighbours: Neighbours | None = None) -> None:
    """Set `found_inf` to 1 if a gradient holds NaN or Inf; gradients keep their bits.

    Args: as `unscale_`.
    """
    if not tensors[0].is_cpu:
        if tensors[0].dtype is torch.float64:
            _check_fp64(tensors, found_inf)
        else:
            unscale_(tensors, torch.ones_like(found_inf), found_inf, neighbours)
        return
    small = []
    for tensor in (neighbours or Neighbours()).merged(tensors):
        if tensor.nbytes < _LARGE_BYTES:
            small.append(tensor)
        elif _nonfinite_alone(tensor):
            found_inf.fill_(1.0)
    if small:
        torch._amp_foreach_non_finite_check_and_unscale_(small, found_inf, torch.ones_like(found_inf))


def _unscale_bf16_(tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    # inv_scale as a bf16 operand would be rounded: multiply in fp32, round once.
    for tensor in tensors:
        wide = tensor.float()
        found_inf.copy_(torch.maximum(found_inf, (~wide.isfinite().all()).to(found_inf.dtype)))
        tensor.copy_(wide.mul_(inv_scale.reshape(())))  # shape (1,) does not broadcast into a scalar in place


def _check_fp64(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    # torch's own op on a GPU checks them in fp32, where large ones are infinite.
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    found_inf.copy_(torch.maximum(found_inf, (~finite).to(found_inf.dtype)))


def _nonfinite_alone(tensor: Tensor) -> bool:
    # A finite sum proves every term finite; an infinite one may have overflowed, as in fp16.
    if math.isfinite(_sum(tensor)):
        return False
    low, high = tensor.aminmax()  # both propagate NaN
    return not bool((low.isfinite() & high.isfinite()).item())


def _sum(tensor: Tensor) -> float:
    """Return the sum of all elements, or of their squares: whichever torch finds faster."""
    if tensor.element_size() >= 4 and tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.dot(flat, flat).item()
    return tensor.sum().item()

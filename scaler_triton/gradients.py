"""Checks of single gradients, and the reduction of those that are not summed yet: sparse duplicates, Partial."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from scaler_triton.placement import is_dtensor, partial_terms

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_acceptable(gradient: Tensor) -> bool:
    """Tell whether `check_gradient` lets a gradient pass."""
    try:
        check_gradient(gradient, "")
    except (ValueError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def check_gradient(gradient: Tensor, name: str) -> None:
    """Raise if `gradient` (local, strided or sparse COO) cannot be unscaled; nothing is written.

    Raises: torch's own error for overlapping memory; NotImplementedError naming dtype or layout, ValueError naming
        the device, for what no backend serves.
    """
    if gradient.dtype not in DTYPES:
        raise NotImplementedError(f"{name} has dtype {gradient.dtype}; only {_names(DTYPES)} can be unscaled")
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise NotImplementedError(
            f"{name} has layout {gradient.layout}; only strided and sparse COO gradients can be unscaled"
        )
    if gradient.is_nested:  # the strided kind has no strides to look at
        raise NotImplementedError(f"{name} is a nested tensor; only strided and sparse COO gradients can be unscaled")
    if gradient.device.type == "meta":
        raise ValueError(f"{name} is on device {gradient.device}, where there is nothing to unscale")
    if gradient.layout is torch.strided:
        check_overlap(gradient)
    elif gradient.dtype is not torch.float16:  # those are replaced by ones that can be written
        check_overlap(sparse_values(gradient))


def overlaps(tensor: Tensor) -> bool:
    """Tell whether elements of `tensor` share memory by an expanded dimension."""
    expanded = (stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and any(expanded)


def check_overlap(tensor: Tensor) -> None:
    """Raise torch's RuntimeError if elements of `tensor` share memory by an expanded dimension."""
    if overlaps(tensor):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def sparse_values(gradient: Tensor) -> Tensor:
    """Return the values of a sparse COO gradient, sharing its memory: what an op reads and writes."""
    values: Tensor = gradient._values()
    return values


def coalesce_fp16(gradient: Tensor) -> Tensor:
    """Return a sparse fp16 gradient with its duplicates summed in fp32, itself if it has none; sums may overflow."""
    is_ready = gradient.is_coalesced() and not overlaps(sparse_values(gradient))
    return gradient if is_ready else gradient.float().coalesce().half()


def is_unreduced(gradient: Tensor) -> bool:
    """Tell whether a gradient still has to be summed: a Partial DTensor, or an uncoalesced sparse tensor."""
    if is_dtensor(gradient):
        return partial_terms(gradient) > 1
    return gradient.layout is torch.sparse_coo and not gradient.is_coalesced()


def reduced(gradient: Tensor) -> Tensor:
    """Return an unreduced gradient summed; for a Partial DTensor a collective that all ranks of its mesh must join."""
    if not is_dtensor(gradient):
        return coalesce_fp16(gradient) if gradient.dtype is torch.float16 else gradient.coalesce()
    from torch.distributed.tensor import Replicate

    placements = gradient.placements  # type: ignore[attr-defined]
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    result: Tensor = gradient.redistribute(placements=whole)  # type: ignore[attr-defined]
    return result


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

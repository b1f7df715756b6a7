"""What a gradient may be: its dtype and layout; local shards of DTensors, FSDP1, sparse and Partial gradients."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.torch_ops import is_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# DTensor's private names for its shard and its layout: reading them is quicker than `to_local` and `placements`.
SHARD, SPEC = "_local_tensor", "_spec"
# Private to DDP over tensor parallel: the DTensorSpec of a parameter that DDP replaced by its local shard.
DDP_SPEC = "_st_info"


def check_gradient(gradient: Tensor, name: str) -> None:
    """Raise if a local gradient has a dtype, layout or device that cannot be unscaled, or overlaps itself."""
    if gradient.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(f"{name} has dtype {gradient.dtype}; only {names} can be unscaled")
    has_known_layout = gradient.layout in (torch.strided, torch.sparse_coo)
    if not has_known_layout or gradient.is_nested:  # a strided nested tensor has no strides to check
        what = "is a nested tensor" if has_known_layout else f"has layout {gradient.layout}"
        raise NotImplementedError(f"{name} {what}; only strided and sparse COO gradients can be unscaled")
    if gradient.device.type == "meta":
        raise ValueError(f"{name} is on device {gradient.device}, where there is nothing to unscale")
    if gradient.layout is torch.strided:
        check_overlap(gradient)
    elif gradient.dtype is not torch.float16:  # fp16 values are coalesced into new memory first
        check_overlap(gradient._values())


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` share memory because a dimension was expanded."""
    expanded = (stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and any(expanded)


def check_overlap(tensor: Tensor) -> None:
    """Raise torch's RuntimeError if `tensor` overlaps itself."""
    if overlaps(tensor):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one span of memory without gaps or overlap, in any order of dimensions."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def coalesce_fp16(gradient: Tensor) -> Tensor:
    """Return a sparse fp16 gradient with its duplicates summed in fp32, else itself; a sum may overflow."""
    is_ready = gradient.is_coalesced() and not overlaps(gradient._values())
    return gradient if is_ready else gradient.float().coalesce().half()


def reduced(gradient: Any) -> Any:
    """Return a gradient, summed if it is a Partial DTensor (all ranks of its mesh must call this) or has duplicates."""
    if not is_dtensor(gradient):
        if gradient.layout is not torch.sparse_coo or gradient.is_coalesced():
            return gradient
        return coalesce_fp16(gradient) if gradient.dtype is torch.float16 else gradient.coalesce()
    if partial_terms(gradient) == 1:
        return gradient
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=whole)


def reduce_(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its `reduced` one."""
    with torch.no_grad():
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and (whole := reduced(grad)) is not grad:
                parameter.grad = whole


def state_of(parameters: Iterable[Tensor]) -> list[tuple[Any, int]]:
    """Return for each gradient what changes when somebody writes or replaces it; None has no version."""
    grads = [parameter.grad for parameter in parameters]
    return [(_nothing, -1) if grad is None else (weakref.ref(grad), local_tensor(grad)._version) for grad in grads]


def is_unwritten(parameters: Sequence[Tensor], state: Sequence[tuple[Any, int]]) -> bool:
    """Return whether nobody has written or replaced a gradient since `state_of` returned this."""
    grads = [parameter.grad for parameter in parameters]
    return len(grads) == len(state) and all(
        grad is known() and (grad is None or local_tensor(grad)._version == version)
        for grad, (known, version) in zip(grads, state, strict=True)
    )


def _nothing() -> None:
    """Stand for a gradient that is missing."""


def largest_by_kind(parameters: Mapping[int, Tensor]) -> dict[Any, tuple[list[int], Tensor]]:
    """Return the largest absolute value of each parameter, NaN if it holds one, without a wait.

    Returns: by device and dtype the keys of those that have one, and a tensor with a number for each.
    """
    kinds: dict[Any, dict[int, Tensor]] = {}
    for key, parameter in parameters.items():
        local = local_tensor(parameter.detach())
        is_usual = is_plain(local) and local.layout is torch.strided and local.dtype in DTYPES
        if is_usual and local.numel() and not local.is_meta:
            kinds.setdefault((local.device, local.dtype), {})[key] = local
    return {
        kind: ([*tensors], torch.stack(torch._foreach_norm([*tensors.values()], math.inf)))
        for kind, tensors in kinds.items()
    }


def is_dtensor(tensor: object) -> bool:
    """Return whether `tensor` is a DTensor; the module is not imported, as no DTensor exists before its import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp1(parameter: Any) -> bool:
    """Return whether a parameter belongs to `FullyShardedDataParallel`, whose shards are plain tensors."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def dtensor_spec(tensor: Any) -> Any:
    """Return what holds a tensor's `device_mesh` and `placements`: a DTensor itself, DDP's DTensorSpec, or None."""
    return tensor if is_dtensor(tensor) else getattr(tensor, DDP_SPEC, None)


def is_distributed(parameter: Any) -> bool:
    """Return whether a parameter is known to be sharded or replicated over ranks: a DTensor or one of FSDP1."""
    return dtensor_spec(parameter) is not None or is_fsdp1(parameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard, after its collective has finished, and any other tensor itself."""
    if type(tensor) is Tensor or not is_dtensor(tensor):
        return tensor
    shard = getattr(tensor, SHARD, None)
    if type(shard) is Tensor:
        return shard
    with torch.no_grad():  # under grad, to_local would record an autograd node
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # AsyncCollectiveTensor has wait, Tensor has not


def partial_terms(tensor: Any) -> int:
    """Return how many local tensors add up to a Partial DTensor; 1 if it is not Partial."""
    return math.prod(tensor.device_mesh.size(dim) for dim, each in enumerate(tensor.placements) if each.is_partial())


def num_shards(tensor: Any) -> int:
    """Return the number of distinct shards of a DTensor, or of the tensor of a DTensorSpec."""
    # is_shard() is False for the strided shards of FSDP2 beside TP.
    split = (dim for dim, each in enumerate(tensor.placements) if not each.is_replicate())
    return math.prod(map(tensor.device_mesh.size, split))

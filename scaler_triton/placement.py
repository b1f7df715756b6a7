"""Sharded tensors: the local shard of a DTensor, how many shards there are, and how FSDP1's parameters are told."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# DTensor's private names for its shard and its layout, which are quicker to read than `to_local` and `placements`.
SHARD, SPEC = "_local_tensor", "_spec"
# Private to DDP over tensor parallel: the DTensorSpec of a parameter that DDP replaced by its local shard.
DDP_SPEC = "_st_info"


def is_dtensor(tensor: object) -> bool:
    """Tell whether `tensor` is a DTensor, without importing DTensor: no instance can exist before that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp1(parameter: Any) -> bool:
    """Tell whether a parameter belongs to `FullyShardedDataParallel`, whose shards are plain tensors."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def has_fsdp1(parameters: Iterable[Tensor]) -> bool:
    """Tell whether any of the parameters belongs to `FullyShardedDataParallel`."""
    return any(map(is_fsdp1, parameters))


def dtensor_spec(tensor: Any) -> Any:
    """Return what has a tensor's `device_mesh` and `placements`: a DTensor itself, what DDP kept of one, else None."""
    return tensor if is_dtensor(tensor) else getattr(tensor, DDP_SPEC, None)


def is_distributed(parameter: Any) -> bool:
    """Tell whether a parameter is known to be sharded or replicated over ranks: a DTensor, or FSDP1's."""
    return dtensor_spec(parameter) is not None or is_fsdp1(parameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard (waited for if its collective is still in flight), any other tensor itself."""
    if type(tensor) is Tensor or not is_dtensor(tensor):
        return tensor
    shard = getattr(tensor, SHARD, None)
    if type(shard) is Tensor:
        return shard
    with torch.no_grad():  # under grad, to_local would record an autograd node
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # AsyncCollectiveTensor has wait, Tensor has not


def partial_terms(tensor: Tensor) -> int:
    """Return how many local tensors add up to a Partial DTensor; 1 if it is not Partial."""
    terms = 1
    for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            terms *= tensor.device_mesh.size(dim)  # type: ignore[attr-defined]
    return terms


def num_shards(tensor: Any) -> int:
    """Return into how many different shards a DTensor, or the tensor of a DTensorSpec, is split."""
    shards = 1
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # is_shard() is False for the strided shards of FSDP2 beside TP
            shards *= tensor.device_mesh.size(dim)
    return shards

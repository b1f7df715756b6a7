"""What this rank holds of a tensor, and what tells that other ranks hold the rest: DTensors, FSDP1's shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# DTensor's private names for its shard and its layout, which are quicker to read than `to_local` and `placements`.
SHARD, SPEC = "_local_tensor", "_spec"
# Private to DDP over tensor parallel: the layout of a DTensor whose shard it made a parameter of its own.
DDP_SPEC = "_st_info"


def is_dtensor(tensor: object) -> bool:
    """Tell whether `tensor` is a DTensor, without importing DTensor: no instance can exist before that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp1(parameter: Any) -> bool:
    """Tell whether a parameter is a shard of `FullyShardedDataParallel`, which looks like a plain tensor."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def has_fsdp1(parameters: Iterable[Tensor]) -> bool:
    """Tell whether parameters are shards of `FullyShardedDataParallel`, which look like plain tensors."""
    return any(map(is_fsdp1, parameters))


def placing(tensor: Any) -> Any:
    """Return what tells a tensor's mesh and placements: itself, what DDP notes of a DTensor made plain, else None."""
    return tensor if is_dtensor(tensor) else getattr(tensor, DDP_SPEC, None)


def is_placed(parameter: Any) -> bool:
    """Tell whether a parameter is known to be a part of something that other ranks hold the rest of, or copies."""
    return placing(parameter) is not None or is_fsdp1(parameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`: a DTensor's shard (waited for if still in flight), else itself."""
    if type(tensor) is Tensor or not is_dtensor(tensor):
        return tensor
    shard = getattr(tensor, SHARD, None)
    if type(shard) is Tensor:
        return shard
    with torch.no_grad():  # under grad, to_local would record an autograd node
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local  # AsyncCollectiveTensor has wait, Tensor has not


def partial_terms(tensor: Tensor) -> int:
    """Return how many ranks' local tensors a DTensor is yet to be summed from: 1 if it is not Partial."""
    terms = 1
    for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_partial():
            terms *= tensor.device_mesh.size(dim)  # type: ignore[attr-defined]
    return terms


def cut_into(tensor: Any) -> int:
    """Return into how many different pieces a DTensor, or what a layout describes, is cut."""
    pieces = 1
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # is_shard() is False for the strided shards of FSDP2 beside TP
            pieces *= tensor.device_mesh.size(dim)
    return pieces

"""How many ranks hold the same shard of a parameter, so that a norm counts it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.core.gradients import dtensor_spec, is_fsdp1, num_shards
from scaler_triton.core.ranks import Ranks, several_ranks


def replicas_of(
    parameters: Sequence[Tensor], peers: Ranks | None, model: nn.Module | None, *, guess: bool = False
) -> list[int]:
    """Return for each parameter how many of these ranks hold the same shard of it as this rank: a norm counts it once.

    A DTensor's placements give the number of shards; ranks outside its mesh are taken to hold copies. An FSDP1
    parameter looks the same sharded or not, but its FSDP module in `model` knows, also how tensor parallelism had
    sharded it before; without a model, to `guess` is to take it to be sharded over all ranks. Any other parameter is
    taken to be replicated on all ranks, as under DDP.
    """
    count = 1 if peers is None else len(peers.ranks)
    on_fsdp1 = several_ranks() and any(map(is_fsdp1, parameters))
    known = _fsdp1_shards(model) if on_fsdp1 and model is not None else {}
    replicas = []
    for index, parameter in enumerate(parameters):
        spec, shards = dtensor_spec(parameter), 1
        if spec is not None:
            shards = num_shards(spec)
        elif on_fsdp1 and is_fsdp1(parameter):
            shards = count if guess else known.get(id(parameter), 0)
            if not shards:
                raise ValueError(
                    f"model must be the module that holds the FullyShardedDataParallel modules, which alone know how "
                    f"parameter {index} is sharded, got {type(model).__name__}"
                )
            if shards > count:
                raise ValueError(
                    f"process_group is needed: parameter {index} is FullyShardedDataParallel's, cut into {shards} "
                    f"pieces, and the norm would be that of {count}; use scaler_triton.ShardedGradScaler, or pass "
                    "process_group="
                )
        replicas.append(max(1, count // shards))
    return replicas


def _fsdp1_shards(model: nn.Module) -> dict[int, int]:
    """Return the number of shards of each FSDP1 parameter of `model`, by its id."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    shards: dict[int, int] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):  # outer ones first, so that the innermost counts
        whole = module.sharding_strategy is ShardingStrategy.NO_SHARD
        size = 1 if whole else dist.get_world_size(module.process_group)
        shards.update({id(parameter): size for parameter in module.parameters()})
        shards.update({key: size * before for key, before in _shards_before_fsdp1(module).items()})
    return shards


def _shards_before_fsdp1(module: Any) -> dict[int, int]:
    """Return the number of shards that tensor parallelism made of an FSDP1 module's own parameters, by their ids."""
    try:
        flat = module._handle.flat_param
        specs, originals = flat._param_extensions, flat._params
    except AttributeError:  # it has no parameters of its own, or this torch has no such attributes
        return {}
    before = [1 if spec is None else num_shards(spec) for spec in specs]  # None for what was no DTensor
    if originals is not None:  # use_orig_params=True
        return {id(parameter): shards for parameter, shards in zip(originals, before, strict=True)}
    if len(set(before)) > 1:
        raise ValueError(
            "model must be FullyShardedDataParallel with use_orig_params=True, got flat parameters that hold what "
            "tensor parallelism cut beside what it did not"
        )
    return {id(flat): before[0]}

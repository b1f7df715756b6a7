"""How many ranks hold the same shard of a parameter: a global norm counts each shard once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.collectives import several_ranks
from scaler_triton.placement import dtensor_spec, has_fsdp1, is_fsdp1, num_shards

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement
    from scaler_triton.plan import GradPlan


def copies_of(parameters: Sequence[Tensor], agreement: Agreement | None, model: nn.Module | None) -> list[int]:
    """Return for each parameter how many of the ranks hold the same shard of it as this rank.

    A DTensor's placements give the number of shards; ranks outside its mesh are taken to hold copies. An FSDP1
    parameter looks the same sharded or not, so its FSDP module is asked, which also knows how tensor parallelism had
    sharded it before. DDP over tensor parallel keeps the DTensorSpec on the parameter. Any other parameter is taken to
    be replicated on all ranks, as under DDP.

    Args:
        parameters: of any kind, frozen ones too.
        agreement: the ranks whose gradients make up the norm; None: this one alone.
        model: holds the `FullyShardedDataParallel` modules, where there are any.

    Raises: ValueError naming `model` if an FSDP1 parameter is in none of its modules, or holds several whose copies
        count differently; naming `process_group` if one has more shards than there are ranks.
    """
    ranks = 1 if agreement is None else agreement.size
    if ranks == 1 and not (several_ranks() and has_fsdp1(parameters)):
        return [1] * len(parameters)
    shards = _fsdp1_shards(model)
    return [_copies_of_one(index, parameter, ranks, shards, model) for index, parameter in enumerate(parameters)]


def plan_copies(plan: GradPlan, agreement: Agreement | None, model: nn.Module | None) -> list[int]:
    """`copies_of` for a plan, which caches the result."""
    key = (agreement, None if model is None else weakref.ref(model))
    if plan.copies is None or plan.copies[0] != key:
        plan.copies = (key, copies_of(plan.parameters, agreement, model))
    return plan.copies[1]


def gradient_copies(plan: GradPlan, copies: Sequence[int]) -> Sequence[int]:
    """Return how many ranks hold each gradient that the plan collected last: backward may shard it differently.

    Args:
        copies: how many ranks hold each parameter.

    Returns: `copies` itself where all are sharded alike.
    """
    if not plan.grad_shards:
        return copies
    counts = list(copies)
    for index, shards in plan.grad_shards.items():
        counts[index] = copies_of_gradient(copies[index], plan.parameters[index], shards)
    return counts


def copies_of_gradient(count: int, parameter: Tensor, shards: int) -> int:
    """Return how many ranks hold the same shard of a DTensor gradient, whose placements may not be its parameter's.

    Args:
        count: how many ranks hold the same shard of the parameter.
        shards: how many shards the gradient has.
    """
    return count * num_shards(parameter) // shards


def _copies_of_one(index: int, parameter: Any, ranks: int, shards: dict[int, int], model: nn.Module | None) -> int:
    spec = dtensor_spec(parameter)
    if spec is not None:
        return max(1, ranks // num_shards(spec))
    if not is_fsdp1(parameter):
        return ranks
    if id(parameter) not in shards:
        if model is not None:
            raise ValueError(
                "model must be the FullyShardedDataParallel module or one around it, "
                f"got {type(model).__name__} in which no FSDP module holds parameter {index}"
            )
        raise ValueError(
            f"model is needed: parameter {index} is FullyShardedDataParallel's, which does not tell how it is sharded; "
            "pass model= the module that holds the FSDP modules"
        )
    pieces = shards[id(parameter)]
    if pieces > ranks:
        raise ValueError(
            f"process_group is needed: parameter {index} is FullyShardedDataParallel's, cut into {pieces} pieces, and "
            f"the norm would be that of {ranks}; use scaler_triton.ShardedGradScaler, or pass process_group="
        )
    return ranks // pieces


def _fsdp1_shards(model: nn.Module | None) -> dict[int, int]:
    """Return the number of shards of each FSDP1 parameter of `model`, by its id."""
    if model is None:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    shards = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):  # outer ones first: the innermost has the last word
        whole = module.sharding_strategy is ShardingStrategy.NO_SHARD
        size = 1 if whole else dist.get_world_size(module.process_group)
        shards.update({id(parameter): size for parameter in module.parameters()})
        shards.update({key: size * before for key, before in _shards_before_fsdp1(module).items()})
    return shards


def _shards_before_fsdp1(module: Any) -> dict[int, int]:
    """Return how many shards tensor parallelism made of an FSDP1 module's own parameters, by their ids."""
    try:
        flat = module._handle.flat_param
        specs, originals = flat._param_extensions, flat._params
    except AttributeError:  # it has no parameters of its own, or this torch has no such attributes
        return {}
    before = [1 if spec is None else num_shards(spec) for spec in specs]  # a spec is that of a DTensor
    if originals is not None:  # use_orig_params=True
        return {id(parameter): shards for parameter, shards in zip(originals, before, strict=True)}
    if len(set(before)) > 1:
        raise ValueError(
            "model must be FullyShardedDataParallel with use_orig_params=True, got flat parameters that hold what "
            "tensor parallelism cut beside what it did not"
        )
    return {id(flat): before[0]}

"""How many ranks hold the same piece of a parameter: a global norm counts each piece once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.collectives import several_ranks
from scaler_triton.placement import cut_into, has_fsdp1, is_fsdp1, placing

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement
    from scaler_triton.plan import GradPlan


def copies_of(parameters: Sequence[Tensor], agreement: Agreement | None, model: nn.Module | None) -> list[int]:
    """Return for each parameter how many of the ranks hold what this rank holds of it.

    A DTensor's placements tell, and its mesh if it spans a part of the ranks: the other parts hold copies, as the
    norms of FSDP x TP do. An FSDP1 parameter looks the same sharded or not, so its wrapper is asked, which knows, too,
    how tensor parallelism had cut it before; DDP notes that on the parameter. Any other parameter is taken for a copy,
    as under DDP: torch's own clipping counts it on every rank.

    Args:
        parameters: of any kind, frozen ones too.
        agreement: the ranks whose gradients make up the norm; None: this one alone.
        model: holds the `FullyShardedDataParallel` modules, where there are any.

    Raises: ValueError naming `model` if an FSDP1 parameter is in none of its modules, or holds several whose copies
        count differently; naming `process_group` if one is cut into more pieces than there are ranks.
    """
    ranks = 1 if agreement is None else agreement.size
    if ranks == 1 and not (several_ranks() and has_fsdp1(parameters)):
        return [1] * len(parameters)
    shards = _fsdp1_shards(model)
    return [_copies_of_one(index, parameter, ranks, shards, model) for index, parameter in enumerate(parameters)]


def plan_copies(plan: GradPlan, agreement: Agreement | None, model: nn.Module | None) -> list[int]:
    """`copies_of` for a plan, which keeps the answer."""
    if plan.copies is None or plan.copies[0] is not agreement or plan.copies[1]() is not model:
        seen = (lambda: None) if model is None else weakref.ref(model)
        plan.copies = (agreement, seen, copies_of(plan.parameters, agreement, model))
    return plan.copies[2]


def gradient_copies(plan: GradPlan, copies: Sequence[int]) -> Sequence[int]:
    """Return how many ranks hold each gradient that the plan collected last: backward may cut it differently.

    Args:
        copies: how many ranks hold each parameter.

    Returns: `copies` itself where all are cut alike; else the same list as long as nothing changes.
    """
    if not plan.cut:
        return copies
    if plan.recounted is None or plan.recounted[0] is not copies or plan.recounted[1] is not plan.cut:
        counts = list(copies)
        for index, pieces in plan.cut.items():
            counts[index] = copies_of_gradient(copies[index], plan.parameters[index], pieces)
        plan.recounted = (copies, plan.cut, counts)
    return plan.recounted[2]


def copies_of_gradient(count: int, parameter: Tensor, pieces: int) -> int:
    """Return how many ranks hold a piece of a DTensor gradient: backward need not place it as its parameter is.

    Args:
        count: how many hold a piece of the parameter.
        pieces: into how many the gradient is cut.
    """
    return count * cut_into(parameter) // pieces


def _copies_of_one(index: int, parameter: Any, ranks: int, shards: dict[int, int], model: nn.Module | None) -> int:
    placed = placing(parameter)
    if placed is not None:
        return max(1, ranks // cut_into(placed))
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
    """Return into how many pieces each FSDP1 parameter of `model` is cut, by its id."""
    if model is None:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    shards = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):  # outer ones first: the innermost has the last word
        whole = module.sharding_strategy is ShardingStrategy.NO_SHARD
        pieces = 1 if whole else dist.get_world_size(module.process_group)
        shards.update({id(parameter): pieces for parameter in module.parameters()})
        shards.update({key: pieces * before for key, before in _cut_before(module._handle).items()})
    return shards


def _cut_before(handle: Any) -> dict[int, int]:
    """Return into how many pieces the parameters of an FSDP1 module's own shard were cut before FSDP1, by their ids."""
    try:
        flat, specs, originals = handle.flat_param, handle.flat_param._param_extensions, handle.flat_param._params
    except AttributeError:  # all its parameters are other modules', or this torch keeps that elsewhere
        return {}
    cuts = [1 if spec is None else cut_into(spec) for spec in specs]  # those of DTensors
    if originals is not None:  # use_orig_params=True
        return {id(parameter): cut for parameter, cut in zip(originals, cuts, strict=True)}
    if len(set(cuts)) > 1:
        raise ValueError(
            "model must be FullyShardedDataParallel with use_orig_params=True, got flat parameters that hold what "
            "tensor parallelism cut beside what it did not"
        )
    return {id(flat): cuts[0]}

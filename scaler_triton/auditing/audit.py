"""`scaler_triton.audit`: has this run split? It works with torch's scalers, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.auditing.replicas import hashed_copies
from scaler_triton.auditing.report import AuditReport, judge
from scaler_triton.auditing.state import NOTHING, RankState, Reading, scaler_readings, steps_reading
from scaler_triton.collectives import gather_bytes, gathering_group, is_bare
from scaler_triton.optimizers import parameters_of, unwrap
from scaler_triton.placement import local_tensor
from scaler_triton.text import error_line


def audit(
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    model: nn.Module | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    replicated: bool = False,
    file: TextIO | None = None,
) -> AuditReport:
    """Tell whether this run's ranks have split, and print what each of them holds.

    Compared are the scale and its growth tracker, to the bit; the most steps that a parameter of each optimizer has
    taken; and the bits of every parameter of which several ranks hold a copy: DTensors tell that by their placements,
    DDP and FSDP1's NO_SHARD by `model`. Other plain parameters may be shards: they are hashed, but no verdict rests
    on them. A run that averages weights only now and then (local SGD) differs in between by design, and so do the steps
    of an optimizer whose parameters got no gradients on some ranks, such as one of experts without tokens.

    Every rank of the group must call it, between two steps: an all-gather, two for hundreds of parameters, none for one
    rank. Nothing is written: no parameter, state, scale or random number. A rank that fails to read what it holds says
    so in its row.

    Args:
        optimizer: one, or a list; wrappers that keep theirs as `.optimizer` are understood.
        scaler: any torch.amp.GradScaler: torch's, ShardedGradScaler, ours.
        model: gives parameters their names; hashed is then every parameter of it, not only the optimizers'.
        process_group: the ranks to compare; default: all.
        replicated: plain parameters are meant to be equal on all ranks, as without DDP but with its all-reduce.
        file: where the group's first rank prints the report; default: standard output.

    Returns: the report, the same on all ranks: `.split`, `.ranks`, `.differences`, and `str()`, which is the table.

    Raises: ValueError if this rank is not in `process_group`, torch's if there is no default group beside it; TypeError
        if it is no group.
    """
    group, ranks = _group(process_group)
    rank = dist.get_rank() if group is not None else ranks[0]
    try:
        state = _read(rank, ranks, optimizer, scaler, model, replicated)
    except Exception as error:  # the others wait in the gather
        state = RankState(rank, error=error_line(error))
    report = judge(_of_all_ranks(state, group, _home(scaler)) if group is not None and len(ranks) > 1 else [state])
    if rank == ranks[0]:
        print(report, file=file or sys.stdout, flush=True)
    return report


def _group(process_group: Any) -> tuple[Any, list[int]]:
    """Return the group and its global ranks; without any group this process is rank 0."""
    group = gathering_group(process_group)
    if group is None:
        return None, [0]
    if is_bare(group):  # torch does not know its ranks, nor could objects be gathered by it
        raise TypeError(f"process_group must be one whose ranks torch knows, got {type(group).__name__}")
    return group, dist.get_process_group_ranks(group)


def _read(
    rank: int, ranks: Sequence[int], optimizer: Any, scaler: Any, model: nn.Module | None, replicated: bool
) -> RankState:
    """Return what this rank holds; one rank alone has nothing to compare, so nothing is hashed then."""
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer must be an optimizer or a list of them, got {type(each).__name__}")
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    readings = _scaler_readings(scaler)
    for index, each in enumerate(optimizers):
        name = f"steps of {index} ({type(unwrap(each)).__name__})" if len(optimizers) > 1 else "steps"
        readings[name] = steps_reading(_steps_of(unwrap(each)))
    copies, left_out = hashed_copies(optimizers, model, ranks, replicated) if len(ranks) > 1 else ([], {})
    return RankState(rank, readings, copies, left_out, subject=_subject(scaler, optimizers))


def _scaler_readings(scaler: Any) -> dict[str, Reading]:
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if not scaler.is_enabled():
        return {"scale": Reading("disabled", "disabled"), "tracker": Reading(NOTHING, None)}
    return scaler_readings(scaler.get_scale(), scaler._get_growth_tracker(), used=scaler._scale is not None)


def _steps_of(optimizer: Any) -> list[float]:
    """Return the step counters of an optimizer's states, or of its groups, where a few keep theirs."""
    states = getattr(optimizer, "state", {})
    held = [states[parameter] for parameter in parameters_of(optimizer) if parameter in states]
    found = [each["step"] for each in (*held, *optimizer.param_groups) if isinstance(each, Mapping) and "step" in each]
    numbers = [float(value) for value in found if isinstance(value, (int, float))]
    return numbers + _values([local_tensor(value.detach()) for value in found if isinstance(value, Tensor)])


def _values(tensors: Sequence[Tensor]) -> list[float]:
    """Return tensors of one element as numbers; the host waits once for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 1:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor.reshape(()))
    return [float(value) for members in kinds.values() for value in torch.stack(members).tolist()]


def _subject(scaler: Any, optimizers: Sequence[Any]) -> str:
    names = [type(each).__name__ + (", fused" if _is_fused(each) else "") for each in map(unwrap, optimizers)]
    return "; ".join([f"{type(scaler).__name__} of {type(scaler).__module__.partition('.')[0]}", *names])


def _is_fused(optimizer: Any) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def _home(scaler: Any) -> torch.device:
    """Return the scale's device, the CPU before there is one."""
    scale = getattr(scaler, "_scale", None)
    return scale.device if isinstance(scale, Tensor) else torch.device("cpu")


def _of_all_ranks(state: RankState, group: Any, home: torch.device) -> list[RankState]:
    return [RankState.from_bytes(data) for data in gather_bytes(state.to_bytes(), group, home)]

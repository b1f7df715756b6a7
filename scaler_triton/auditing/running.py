"""`scaler_triton.audit`: has this run split? It works with torch's scalers, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.auditing.replicas import hashed_copies
from scaler_triton.auditing.report import (
    NOTHING,
    AuditReport,
    RankState,
    Reading,
    judge,
    scaler_readings,
    steps_reading,
)
from scaler_triton.core.gradients import local_tensor
from scaler_triton.core.ranks import gather_bytes, gathering_group, is_bare
from scaler_triton.core.registry import unwrap
from scaler_triton.core.step import parameters_of
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
    """Compare what this run's ranks hold, and print it: has the run split?

    It compares the scale and its growth tracker bit by bit, the most steps that a parameter of each optimizer has
    taken, and the bits of every parameter of which several ranks hold a copy: DTensors say so by their placements,
    DDP and FSDP1's NO_SHARD by `model`. Other plain parameters may be shards: they are compared, but a difference
    between them is only noted. Runs that average weights only now and then (local SGD) differ in between by design,
    and so do the steps of an optimizer whose parameters got no gradients on some ranks, such as experts without tokens.

    Every rank of the group must call it, between two steps. When all have come, it takes one all-gather, two for
    hundreds of parameters, none for a single rank, and changes no parameter, state, scale or random number. A rank that
    cannot read what it holds puts the error into its row.

    Args:
        optimizer: one, or a list; wrappers that keep theirs as `.optimizer` are understood.
        scaler: any torch.amp.GradScaler: torch's, ShardedGradScaler, ours.
        model: names the parameters; all of its parameters are compared, not only the optimizers'.
        process_group: the ranks to compare; default: all.
        replicated: plain parameters should be equal on all ranks, as when you all-reduce gradients without DDP.
        file: where the group's first rank prints the report; default: standard output.

    Returns: the report, the same on all ranks: `.split`, `.ranks`, `.differences`, and `str()`, which is the table.

    Raises: TypeError naming an argument that is wrong in the same way on all ranks, or a `process_group` that is no
        group; ValueError if this rank is not in `process_group`; torch's ValueError if there is a `process_group` but
        no default one; TimeoutError if not all ranks come within five minutes, or half of `init_process_group`'s
        timeout if that is shorter, and training can go on then.
    """
    group: Any = gathering_group(process_group)
    if group is not None and is_bare(group):  # torch does not know its ranks
        raise TypeError(f"process_group must be one whose ranks torch knows, got {type(group).__name__}")
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    rank = 0 if group is None else dist.get_rank()
    misuse = _misuse(optimizer, scaler, model)
    try:
        if misuse is not None:
            raise misuse
        state = _read(rank, ranks, optimizer, scaler, model, replicated)
    except Exception as error:  # the other ranks wait in the gather
        state = RankState(rank, error=error_line(error))
    states = [state]
    if len(ranks) > 1:
        scale = getattr(scaler, "_scale", None)
        home = scale.device if isinstance(scale, Tensor) else torch.device("cpu")
        states = [RankState.from_json(data) for data in gather_bytes("audit", state.to_json().encode(), group, home)]
    if misuse is not None and {each.error for each in states} == {state.error}:  # so all of them raise
        raise misuse
    report = judge(states)
    if rank == ranks[0]:
        print(report, file=file or sys.stdout, flush=True)
    return report


def _several(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _misuse(optimizer: Any, scaler: Any, model: Any) -> TypeError | None:
    """Return an error about the first wrong argument, None if all are of the right kind."""
    order = "; the arguments are optimizer, scaler, model, in this order"
    for each in _several(optimizer):
        if not hasattr(each, "param_groups"):
            got = f"got {type(each).__name__}{order}"
            return TypeError(f"optimizer must be an optimizer or a list of them, {got}")
    if not isinstance(model, nn.Module | None):
        return TypeError(f"model must be a module, got {type(model).__name__}{order}")
    if not hasattr(scaler, "_get_growth_tracker"):  # under `patch_torch` not each is a torch.amp.GradScaler
        return TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}{order}")
    return None


def _read(
    rank: int, ranks: Sequence[int], optimizer: Any, scaler: Any, model: nn.Module | None, replicated: bool
) -> RankState:
    """Return what this rank holds; a single rank has nothing to compare with, so it hashes nothing."""
    optimizers = _several(optimizer)
    readings = {"scale": Reading("disabled", "disabled"), "tracker": Reading(NOTHING, None)}
    if scaler.is_enabled():
        used = scaler._scale is not None
        readings = scaler_readings(scaler.get_scale(), scaler._get_growth_tracker(), used=used)
    subject = [f"{type(scaler).__name__} of {type(scaler).__module__.partition('.')[0]}"]
    for index, each in enumerate(map(unwrap, optimizers)):
        name = type(each).__name__
        readings[f"steps of {index} ({name})" if len(optimizers) > 1 else "steps"] = steps_reading(_steps_of(each))
        subject.append(name + (", fused" if any(group.get("fused") for group in each.param_groups) else ""))
    copies, left_out = hashed_copies(optimizers, model, ranks, replicated) if len(ranks) > 1 else ([], {})
    return RankState(rank, readings, copies, left_out, subject="; ".join(subject))


def _steps_of(optimizer: Any) -> list[float]:
    """Return the step counters in an optimizer's states, and in its groups, where a few optimizers keep theirs."""
    states = getattr(optimizer, "state", {})
    held = [states[parameter] for parameter in parameters_of(optimizer) if parameter in states]
    found = [each["step"] for each in (*held, *optimizer.param_groups) if isinstance(each, Mapping) and "step" in each]
    values = [local_tensor(value.detach()) if isinstance(value, Tensor) else value for value in found]
    return [float(v) for v in values if isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1)]

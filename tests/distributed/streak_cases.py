"""What the ranks run in test_streak_ranks: a limit of skips that only one rank's gradients reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from cases import Fault, dtensor_param, line, new_optimizer, new_scaler, plain_param, plant
from torch.distributed.tensor import DTensor, Shard

from scaler_triton import ScalerStats, SkipStreakError


class Outcome(NamedTuple):
    """What one rank saw: what each step was said to do, and which updates raised, counted from 0, and how."""

    skipped: list[bool]
    raised: dict[int, str]
    stats: ScalerStats


def streak(rank: int, kind: str, layout: str, name: str, faults: Sequence[Fault], steps: int, limit: int) -> Outcome:
    """Take `steps` steps with `faults`; the error is caught and the run goes on."""
    scaler = new_scaler(kind, init_scale=2.0**40, max_consecutive_skips=limit, hysteresis=2)
    param = dtensor_param(line(), [Shard(0)]) if layout == "dtensor" else plain_param(2, 3)
    optimizer = new_optimizer(name, [param])
    scaler.scale(torch.ones(()))
    skipped, raised = [], {}
    for step in range(steps):
        local = torch.ones(2, 3)
        is_dtensor = isinstance(param, DTensor)
        param.grad = DTensor.from_local(local, param.device_mesh, param.placements) if is_dtensor else local
        plant(faults, rank, step, [param])
        scaler.step(optimizer)
        try:
            scaler.update()
        except SkipStreakError as error:
            raised[step] = str(error)
        skipped.append(scaler.was_skipped(optimizer))
    return Outcome(skipped, raised, scaler.stats())

"""What the ranks run when one of them cannot even begin to look at its gradients."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import cases
import dtensor_cases
import torch

from scaler_triton.plan import GradPlan

STEPS = 4
OVERFLOWS = 2  # the step in which the other rank has a bad gradient
BAD_RANK = 1
# What may run out of memory before the first gradient is looked at.
WHERE = {
    "plan": (GradPlan, "__init__"),
    "layouts": (GradPlan, "_build_layouts"),
    "flag_buffer": ("scaler_triton.unscaling.FlagBuffer", None),
}


class Course(NamedTuple):
    """What became of a rank: its errors by step, whether it stepped, its scale, and its parameters."""

    errors: list[str]
    stepped: list[bool]
    scale: float
    digests: list[str]


def unplanned(rank: int, kind: str, name: str, where: str, how: str) -> Course:
    """The bad rank runs out of memory in the first step, writes that down and goes on; nothing else is amiss there."""
    scaler = cases.new_scaler(kind)
    params = [cases.plain_param(3)] if kind == "sharded" else dtensor_cases.LAYOUTS["line-shards"]()
    optimizer = cases.new_optimizer(name, params)
    errors, stepped = [], []
    for step in range(STEPS):
        cases.give_grads(scaler, params, step)
        if step == OVERFLOWS and rank != BAD_RANK:
            cases.local_of(params[0].grad).view(-1)[0] = math.inf
        before = [cases.digest(param) for param in params]
        with ExitStack() as stack:
            if step == 0 and rank == BAD_RANK:
                stack.enter_context(out_of_memory(*WHERE[where]))
            errors.append(tried(begin, scaler, optimizer, how))
        errors[-1] += tried(scaler.step, optimizer) if how != "step" else ""
        scaler.update()
        stepped.append(before != [cases.digest(param) for param in params])
    return Course(errors, stepped, scaler.get_scale(), [cases.digest(param) for param in params])


def begin(scaler: Any, optimizer: Any, how: str) -> None:
    if how == "unscale_":
        scaler.unscale_(optimizer)
    elif how == "step":
        scaler.step(optimizer)
    else:
        scaler.clip_grad_norm_([optimizer], 1.0, math.inf if how == "largest" else 2.0)


def tried(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return cases.described(error)
    return ""


def out_of_memory(owner: Any, name: str | None) -> Any:
    error = torch.OutOfMemoryError("out of memory")
    return mock.patch(owner, side_effect=error) if name is None else mock.patch.object(owner, name, side_effect=error)

"""What the ranks run in test_split_ranks: their scales have come apart before the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import dtensor_cases
import torch


def stepped_with_different_scales(rank: int, kind: str, layout: str, how: str) -> list[str]:
    """Rank 1's scale is written over; what each call says, then one step with a scale that all have."""
    scaler, params = cases.new_scaler(kind), dtensor_cases.LAYOUTS[layout]()
    optimizer = cases.new_optimizer("sgd", params)
    first = {"unscale_": lambda: scaler.unscale_(optimizer), "clip": lambda: scaler.clip_grad_norm_(optimizer, 1.0)}
    said = []
    for step in range(3):
        cases.give_grads(scaler, params, step)
        if rank == 1 and step == 1:
            scaler._scale.fill_(64.0)
        try:
            first.get(how, lambda: None)()
            scaler.step(optimizer)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        scaler.update(cases.INIT_SCALE if step == 1 else None)
    return said


def clipped_together_with_different_scales(rank: int) -> list[str]:
    """Rank 1's scale is written over; what the step of each of two optimizers says that were clipped in one call."""
    scaler, params = cases.new_scaler("sharded"), [cases.plain_param(3), cases.plain_param(2)]
    optimizers = [cases.new_optimizer("sgd", [param]) for param in params]
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        scaler._scale.fill_(64.0)
    scaler.clip_grad_norm_(optimizers, 1.0)
    said = []
    for optimizer in optimizers:
        try:
            scaler.step(optimizer)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def clipped_with_scales_a_factor_apart(rank: int, backend: str, dtypes: list[torch.dtype], factor: float) -> list[str]:
    """Rank 1's scale is so much larger; what a step says after a clip, a deferred one and one of two optimizers."""
    said = []
    for several, options in ((1, {}), (1, {"defer": True}), (2, {}), (2, {"defer": True})):
        scaler = cases.new_scaler("sharded", backend=backend)
        scaler.scale(torch.ones(()))
        optimizers = [cases.new_optimizer("sgd-fused", _with_gradients(dtypes)) for _ in range(several)]
        if rank == 1:
            scaler._scale.mul_(factor)
        scaler.clip_grad_norm_(optimizers, 1.0, **options)
        for optimizer in optimizers:
            scaler.step(optimizer)
            said.append(_said(scaler.was_skipped, optimizer))
    return said


def _with_gradients(dtypes: list[torch.dtype]) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def asked_with_different_scales(rank: int, how: str) -> list[str]:
    """Rank 1's scale is written over; what was_skipped says of a fused step, before and after the update."""
    scaler, params = cases.new_scaler("sharded"), [cases.plain_param(3)]
    optimizer = cases.new_optimizer("adamw-fused", params)
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        scaler._scale.fill_(64.0)
    if how == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    scaler.step(optimizer)
    said = [_said(scaler.was_skipped, optimizer)]
    scaler.update(4.0)
    said.append(_said(scaler.was_skipped, optimizer))
    cases.give_grads(scaler, params, 1)
    scaler.step(optimizer)
    return [*said, _said(scaler.was_skipped, optimizer)]


def asked_after_another_rank_failed(rank: int) -> list[str]:
    """Rank 1 cannot clip; what was_skipped says of a fused step, before and after an update that clears the flags."""
    scaler, params = cases.new_scaler("sharded", backend="triton"), [cases.plain_param(3)]
    optimizer = cases.new_optimizer("adamw-fused", params)
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        params[0].grad = torch.ones(1).expand(3)
    _said(scaler.clip_grad_norm_, optimizer, 1.0)
    scaler.step(optimizer)
    said = [_said(scaler.was_skipped, optimizer)]
    scaler.update()
    return [*said, _said(scaler.was_skipped, optimizer)]


def _said(call: Callable[..., Any], *args: Any) -> str:
    try:
        return str(call(*args))
    except RuntimeError as error:
        return str(error)


def stepped_and_clipped_in_turn(rank: int) -> bool:
    """A step compares largest and smallest scales, a clip means: neither may be taken for the other."""
    scaler, params = cases.new_scaler("sharded", init_scale=3.0), [cases.plain_param(3)]
    optimizer = cases.new_optimizer("sgd", params)
    for step in range(4):
        cases.give_grads(scaler, params, step)
        if step % 2:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update(5.0 + step)
    return bool(torch.isfinite(params[0]).all())

"""Optimizers that would step wrongly: two with the same parameters, state in fp16, replicas with other scales."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from scaler_triton.core.observer import Meeting
from scaler_triton.core.step import UNSCALED, OptimizerStep, parameters_of
from scaler_triton.core.warning import warn_once
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.check import Checks

_SHARED = (
    "[ST01] The gradients of {} of this {} were unscaled through a {} already, and would be divided twice: call "
    "unscale_, clip_grad_norm_ and step with the same object"
)
_FP16_STATE = (
    "{name} keeps the averages of {parameters} in fp16: there {what}. Steps become NaN or far too large. Keep "
    "parameters in fp32, where autocast computes in fp16 all the same, or take an optimizer with fp32 state."
)
_OTHER_SCALES = (
    "torchft's manager does not know this scaler: a replica that joins or heals gets the model, but not the scale, and "
    'its gradients are averaged with those of another scale. Call manager.register_state_dict_fn("scaler", '
    "scaler.load_state_dict, scaler.state_dict) on every replica, before the first step."
)
_LOWEST = 2.0**-25  # a smaller or equal number becomes 0 in fp16


def refuse_shared(meeting: Meeting, steps: Sequence[OptimizerStep]) -> None:
    """Raise if gradients that a check is going to divide were divided for the same loss through another optimizer."""
    ids = set(map(id, meeting.parameters))
    for other in steps:
        owner = other.owner()
        if other is meeting.step or owner is None or other.plan is None:
            continue
        shared = ids.intersection(map(id, parameters_of(owner)))
        if shared:
            meeting.plan.is_new = other.plan.is_new = True  # one of them may be unscaled before the other's next check
        if shared and meeting.divides and other.phase is UNSCALED and not other.loss_is_newer:
            names = type(meeting.step.owner()).__name__, type(owner).__name__
            raise RuntimeError(_SHARED.format(count_of(len(shared), "parameter"), *names))


def warn_of_fp16_state(meeting: Meeting, warned: set[str]) -> None:
    """Warn if an optimizer of torch's will keep averages of fp16 gradients in fp16."""
    owner = meeting.step.owner()
    if owner is None or not type(owner).__module__.startswith("torch.optim."):
        return
    for options in owner.param_groups:
        eps = options.get("eps")
        in_fp16 = [each for each in options["params"] if each.dtype is torch.float16 and each.grad is not None]
        if not in_fp16 or not isinstance(eps, float):
            continue
        if options.get("fused"):  # computes in fp32
            what = "the squares of gradients below 2.4e-4 are 0"
        elif eps <= _LOWEST:
            what = f"eps={eps:g} is 0"
        else:
            continue
        known = {"name": type(owner).__name__, "parameters": count_of(len(in_fp16), "fp16 parameter")}
        warn_once(warned, "ST03", _FP16_STATE.format(**known, what=what))


def warn_of_unknown_scales(meeting: Meeting, checks: Checks) -> None:
    """Warn if torchft restores a replica without its scaler."""
    for handle in meeting.step.handles.values():
        manager = getattr(handle(), "manager", None)
        if hasattr(manager, "should_commit"):
            saved = getattr(manager, "_user_state_dicts", {})  # private to torchft
            if not any(_is_of(checks, value) for save in saved.values() for value in _reached_from(save)):
                warn_once(checks.warned, "ST04", _OTHER_SCALES)


def _is_of(checks: Checks, owner: Any) -> bool:
    return getattr(getattr(owner, "__dict__", {}).get("_ours"), "checks", None) is checks


def _reached_from(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the objects that a function may read: its own, its object's and those around it."""
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield owner
        yield from getattr(owner, "__dict__", {}).values()
    with suppress(TypeError):  # no Python function
        around = inspect.getclosurevars(function)  # a method's are those of its function
        yield from around.nonlocals.values()
        yield from around.globals.values()

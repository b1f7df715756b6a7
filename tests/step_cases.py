"""What the tests of steps share: optimizers of each kind, scalers in each phase, events that fail."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import sgd, started
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler
from scaler_triton.clipping import norm
from scaler_triton.core import ranks
from scaler_triton.core.check import Checks
from scaler_triton.core.step import Phase

CPU = torch.device("cpu")
SCALE = 4.0
# CHECKED is READY with a flag.
PHASES = ["READY", "CHECKED", "UNSCALED", "CARRIED", "FAILED", "STEPPED"]
OLDER = pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")


class Older(torch.optim.SGD):
    """An optimizer of the older kind: it asks the scaler for the flag, and divides where that is not done yet."""

    _step_supports_amp_scaling = True
    fails = ""  # or: before, or after it has asked and divided

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
        if self.fails == "before":
            raise MemoryError
        stage = grad_scaler._per_optimizer_states[id(self)]["stage"]
        found_inf = sum(flag.item() for flag in grad_scaler._check_inf_per_device(self).values())
        if not found_inf:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad /= 1.0 if stage is OptState.UNSCALED else grad_scaler.get_scale()
            if self.fails:
                raise MemoryError
            super().step()


def optimizer_of(kind: str = "plain", gradient: float = 8.0) -> Any:
    optimizer = sgd([torch.tensor([gradient])], fused=kind == "fused")
    return Older(optimizer.param_groups[0]["params"], lr=0.5) if kind == "older" else optimizer


def renew(optimizer: Any, gradient: float = 8.0) -> None:
    """Gradients of another backward."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, gradient)


Event = Callable[[Any, Any], Any]


def call(
    method: str, *given: Any, fails: str = "", after: bool = False, error: type[BaseException] = MemoryError
) -> Event:
    """Return the event of a call to the scaler; a pass or a reduction may fail in it, even after doing its work."""
    target: Any = {"reduce_": ranks.Ranks, "take_looks": Checks}.get(fails, norm)
    if fails == "unscale_":
        target, fails = torch, "_amp_foreach_non_finite_check_and_unscale_"
    real = getattr(target, fails, None)

    def fail(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        raise error

    def event(scaler: Any, optimizer: Any) -> None:
        general = mock.patch.object(Checks, "repeat", return_value=False)  # a prepared check has no such function
        with (
            mock.patch.object(target, fails, fail) if fails else nullcontext(),
            general if fails == "take_looks" else nullcontext(),
        ):
            getattr(scaler, method)(optimizer, *given)

    return event


def scale(scaler: Any, *_: Any) -> None:
    scaler.scale(torch.ones(()))


def bring_to(phase: str, scaler: Any, optimizer: Any) -> None:
    """From a fresh gradient."""
    if phase == "CHECKED":
        scaler._check_inf_per_device(optimizer)
    elif phase in ("UNSCALED", "CARRIED"):
        scaler.unscale_(optimizer)
        if phase == "CARRIED":
            scaler.update()
    elif phase == "FAILED":
        with suppress(MemoryError):
            call("unscale_", fails="unscale_", after=True)(scaler, optimizer)
    elif phase == "STEPPED":
        scaler.step(optimizer)


def begin(event: str, phase: str, request: Any) -> tuple[Any, Any]:
    """Return a scaler and an optimizer in a phase."""
    kind = next((kind for kind in ("fused", "older") if kind in event.split()), "plain")
    group = None
    if "ranks:" in event:
        request.getfixturevalue("two_ranks")
        group = torch.distributed.group.WORLD
    scaler = started(GradScaler, "cpu", init_scale=SCALE, process_group=group, backend="torch")
    optimizer = optimizer_of(kind)
    bring_to(phase, scaler, optimizer)
    return scaler, optimizer


def phase_of(scaler: Any, optimizer: Any) -> str:
    """Return the phase as the table has it."""
    step = scaler._ours.steps.open(optimizer)
    return "CHECKED" if step.phase is Phase.READY and step["found_inf_per_device"] else step.phase.name

"""What public training code does to a scaler's states, flags and scale ends as with torch's class, to the bit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import Place, assert_same, places
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from scaler_triton import GradScaler

BAD_STEPS = (False, True, False, False, True, False)


class Run:
    """One class of scaler, in one place; takes down what each step leaves."""

    def __init__(self, base: Any, place: Place) -> None:
        self.base, self.device = base, place.device
        self.options = {"backend": place.backend} if issubclass(base, GradScaler) else {}
        self.seen: list[Tensor] = []

    def scaler(self, cls: Any = None) -> Any:
        return (cls or self.base)(self.device, init_scale=8.0, growth_interval=2, **self.options)

    def parameters(self, count: int = 3, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        made = [torch.linspace(-1, 1, 4 + i, dtype=dtype, device=self.device) for i in range(count)]
        return [nn.Parameter(values) for values in made]

    def look(self, scaler: Any, parameters: Sequence[Tensor]) -> None:
        self.seen += [p.detach().clone() for p in parameters]
        self.seen += [p.grad.clone() for p in parameters if p.grad is not None]
        self.seen += [torch.tensor([scaler.get_scale(), scaler._get_growth_tracker()])]

    def finish(self, scaler: Any, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        """End a step, and look at what it left."""
        scaler.step(optimizer)
        scaler.update()
        self.look(scaler, parameters)
        optimizer.zero_grad()


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def loss(parameters: Sequence[Tensor], bad: bool = False) -> Tensor:
    total = torch.stack([p.float().square().sum() for p in parameters]).sum()
    return total * math.inf if bad else total


def climbed(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Take a step up the gradients, as SAM does; return it."""
    steps = [p.grad.nan_to_num(posinf=0, neginf=0) / 16 for p in parameters if p.grad is not None]
    with torch.no_grad():
        torch._foreach_add_(list(parameters), steps)
    return steps


def sam_that_makes_the_optimizer_ready_again(run: Run, set_to_none: bool = True) -> None:
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for step, bad in enumerate(BAD_STEPS):
        scaler.scale(loss(parameters, bad and step == 1)).backward()
        scaler.unscale_(optimizer)
        climb = climbed(parameters)
        optimizer.zero_grad(set_to_none)
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        scaler.scale(loss(parameters, bad and step == 4)).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, climb)
        scaler.step(optimizer)
        scaler.update()
        run.look(scaler, parameters)
        optimizer.zero_grad(set_to_none)


def sam_that_keeps_its_gradients_memory(run: Run) -> None:
    sam_that_makes_the_optimizer_ready_again(run, set_to_none=False)


def sam_with_an_update_for_each_pass(run: Run) -> None:
    """Between the passes `update` finds an optimizer that was unscaled, but will not be stepped."""
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for step, bad in enumerate(BAD_STEPS):
        scaler.scale(loss(parameters, bad and step == 1)).backward()
        scaler.unscale_(optimizer)
        climb = climbed(parameters)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scaler.update()
        scaler.scale(loss(parameters, bad and step == 4)).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, climb)
        run.finish(scaler, optimizer, parameters)


def two_kinds_of_loss_each_clipped_by_itself(run: Run) -> None:
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for step, bad in enumerate(BAD_STEPS):
        scaler.scale(loss(parameters, bad and step == 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        clipped = [p.grad for p in parameters]
        optimizer.zero_grad()
        scaler._per_optimizer_states.pop(id(optimizer))
        scaler.scale(loss(parameters, bad and step == 4)).backward()
        scaler.unscale_(optimizer)
        for parameter, gradient in zip(parameters, clipped, strict=True):
            parameter.grad += gradient
        run.finish(scaler, optimizer, parameters)


def a_subclass_with_an_update_of_its_own(run: Run) -> None:
    """Hysteresis, as where a model is split: torch's `update` copied, with a condition in its middle."""

    class Patient(run.base):  # type: ignore[misc, name-defined]
        spared = 1

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found_inf = sum(flag for state in states for flag in state["found_inf_per_device"].values())
            if found_inf and self.spared:
                self.spared -= 1
            else:
                torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    parameters, others = run.parameters(), run.parameters(2)
    optimizers, scaler = [sgd(parameters), sgd(others)], run.scaler(Patient)
    for bad in BAD_STEPS:
        scaler.scale(loss([*parameters, *others], bad)).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        run.look(scaler, [*parameters, *others])
        for optimizer in optimizers:
            optimizer.zero_grad()


class Holding:
    """Parameters that look like an optimizer's."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]


def unscaled_parts(scaler: Any, optimizer: Any, *parts: Any) -> None:
    """Unscale only some parameters, some in fp16, and store the flags for the optimizer."""
    inverse, found_inf = scaler._scale.double().reciprocal().float(), torch.zeros_like(scaler._scale)
    state, merged = scaler._per_optimizer_states[id(optimizer)], dict[torch.device, Tensor]()
    for part, allow_fp16 in parts:
        for device, flag in scaler._unscale_grads_(part, inverse, found_inf, allow_fp16).items():
            merged[device] = merged[device].add_(flag) if device in merged else flag
    state["found_inf_per_device"], state["stage"] = merged, OptState.UNSCALED


def parameters_stepped_in_backward_one_by_one(run: Run) -> None:
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()

    def step(parameter: Any) -> None:
        unscaled_parts(scaler, optimizer, (Holding([parameter]), False))
        if not sum(flag.item() for flag in scaler._found_inf_per_device(optimizer).values()):
            with torch.no_grad():
                parameter -= parameter.grad / 8
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        scaler.update()
        run.look(scaler, parameters)


def an_optimizer_for_each_parameter_stepped_in_backward(run: Run) -> None:
    parameters, scaler = run.parameters(), run.scaler()
    optimizers = {parameter: sgd([parameter]) for parameter in parameters}

    def step(parameter: Any) -> None:
        scaler.step(optimizers[parameter])
        optimizers[parameter].zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters) + loss(parameters[1:2], bad)).backward()
        scaler.update()
        run.look(scaler, parameters)


def fp16_allowed_in_one_group(run: Run) -> None:
    parameters, halves = run.parameters(2), run.parameters(2, torch.float16)
    optimizer = sgd([{"params": parameters}, {"params": halves}])
    scaler = run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters) + loss(halves, bad)).backward()
        unscaled_parts(scaler, optimizer, (Holding(parameters), False), (Holding(halves), True))
        run.finish(scaler, optimizer, [*parameters, *halves])


def an_optimizer_that_unscales_itself(run: Run) -> None:
    """Adaptive clipping within the step, which older optimizers are passed the scaler for."""

    class Adaptive(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
            state = grad_scaler._per_optimizer_states[id(self)]
            assert state["stage"] is OptState.READY
            grad_scaler.unscale_(self)
            nn.utils.clip_grad_value_(parameters, 0.5)
            if not sum(flag.item() for flag in state["found_inf_per_device"].values()):
                super().step()

    parameters = run.parameters()
    optimizer, scaler = Adaptive(parameters, lr=0.125), run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        with pytest.warns(FutureWarning, match="stop passing itself"):
            run.finish(scaler, optimizer, parameters)


def a_step_that_was_taken_elsewhere(run: Run) -> None:
    """Overlapped with backward, say: the scaler is told only its flag."""
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        flag = torch.zeros((), device=run.device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in parameters if p.grad is not None], flag, 1 / scaler._get_scale_async()
        )
        if not flag:
            optimizer.step()
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"], state["found_inf_per_device"] = OptState.STEPPED, {flag.device: flag}
        scaler.update()
        run.look(scaler, parameters)
        optimizer.zero_grad()


def a_scale_that_two_scalers_share(run: Run) -> None:
    """A backbone and a head with a scaler each, of which one must follow the other."""
    models, scalers = [run.parameters(), run.parameters(2)], [run.scaler(), run.scaler()]
    optimizers = [sgd(parameters) for parameters in models]
    for bad in BAD_STEPS:
        for scaler, parameters in zip(scalers, models, strict=True):
            scaler.scale(loss(parameters, bad and parameters is models[0])).backward()
        for scaler, optimizer, parameters in zip(scalers, optimizers, models, strict=True):
            scaler._scale, scaler._growth_tracker = scalers[0]._scale, scalers[0]._growth_tracker
            run.finish(scaler, optimizer, parameters)


def a_scale_that_takes_effect_one_step_late(run: Run) -> None:
    """Another thread steps the optimizer: the loss is scaled by what was the scale an update ago."""
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    used, newest = (torch.full((), 8.0, device=run.device) for _ in range(2))
    scaler._lazy_init_scale_growth_tracker(used.device)
    for bad in BAD_STEPS:
        scaler._scale.copy_(used)
        scaler.scale(loss(parameters, bad)).backward()
        scaler.step(optimizer)
        scaler._scale.copy_(newest)
        scaler.update()
        used.copy_(newest)
        newest.copy_(scaler._scale)
        run.look(scaler, parameters)
        optimizer.zero_grad()


def a_scale_with_a_ceiling_by_its_growth_factor(run: Run) -> None:
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for bad in BAD_STEPS * 2:
        scaler.set_growth_factor(1 if scaler.get_scale() >= 12.0 else 2)
        if scaler.get_scale() > 12.0:
            scaler._scale.fill_(12.0)
        scaler.scale(loss(parameters, bad)).backward()
        run.finish(scaler, optimizer, parameters)


def parameters_replaced_after_every_step(run: Run) -> None:
    """As the splats of a scene are split and pruned."""
    parameters = run.parameters()
    optimizer, scaler = sgd([{"params": [p]} for p in parameters]), run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        run.finish(scaler, optimizer, parameters)
        for index, group in enumerate(optimizer.param_groups):
            (before,) = group["params"]
            parameters[index] = nn.Parameter(torch.cat([before.detach(), before.detach()[:1]]))
            optimizer.state.pop(before, None)
            group["params"] = [parameters[index]]


def a_step_tried_again_with_a_flag_of_ones_own(run: Run) -> None:
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for step, bad in enumerate(BAD_STEPS):
        scaler.scale(loss(parameters, bad))  # without backward there are no gradients
        if step % 2:
            scaler.scale(loss(parameters, bad)).backward()
        try:
            scaler.step(optimizer)
        except AssertionError as error:
            assert str(error) == "No inf checks were recorded for this optimizer."  # noqa: PT017
            flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            flags[torch.device(run.device)] = torch.zeros(1, device=run.device)
            scaler.step(optimizer)
        scaler.update()
        run.seen += scaler._found_inf_per_device(optimizer).values()  # none: the step is over
        run.look(scaler, parameters)
        optimizer.zero_grad()


PATTERNS: list[Callable[[Run], None]] = [
    sam_that_makes_the_optimizer_ready_again,
    sam_that_keeps_its_gradients_memory,
    sam_with_an_update_for_each_pass,
    two_kinds_of_loss_each_clipped_by_itself,
    a_subclass_with_an_update_of_its_own,
    parameters_stepped_in_backward_one_by_one,
    an_optimizer_for_each_parameter_stepped_in_backward,
    fp16_allowed_in_one_group,
    an_optimizer_that_unscales_itself,
    a_step_that_was_taken_elsewhere,
    a_scale_that_two_scalers_share,
    a_scale_that_takes_effect_one_step_late,
    a_scale_with_a_ceiling_by_its_growth_factor,
    parameters_replaced_after_every_step,
    a_step_tried_again_with_a_flag_of_ones_own,
]


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_a_pattern_ends_as_with_torch(pattern: Callable[[Run], None], place: Place) -> None:
    theirs, ours = Run(torch.amp.GradScaler, place), Run(GradScaler, place)
    for run in (theirs, ours):
        pattern(run)
    assert len(ours.seen) == len(theirs.seen)
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        assert_same(mine, other)
    scales = {each[0].item() for each in ours.seen if each.shape == (2,)}
    assert len(scales) > 1  # it did back off


@pytest.mark.parametrize(("outer", "inner"), [(math.inf, 1.0), (1.0, math.inf), (1.0, 1.0)])
@pytest.mark.parametrize("place", places(), ids=str)
def test_states_that_were_set_aside_for_another_pass_come_back_as_they_were(
    outer: float, inner: float, place: Place
) -> None:
    """As a trainer does that looks at other gradients in between: its flags must not become the step's."""
    ended = []
    for cls in (torch.amp.GradScaler, GradScaler):
        parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = cls(place.device, init_scale=4.0, **({"backend": place.backend} if cls is GradScaler else {}))
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameter.sum() * outer).backward()
            scaler.unscale_(optimizer)
            kept, states = parameter.grad, scaler._per_optimizer_states
            parameter.grad, scaler._per_optimizer_states = None, defaultdict(_refresh_per_optimizer_state)
            scaler.scale(parameter.sum() * inner).backward()
            scaler.unscale_(optimizer)
            parameter.grad, scaler._per_optimizer_states = kept, states
            scaler.step(optimizer)
            scaler.update()
        ended.append((parameter.tolist(), scaler.get_scale()))
    assert ended[0] == ended[1]

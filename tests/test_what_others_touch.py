"""What hooks, subclasses and frameworks do to a scaler's own things: all of it ends as with torch's class."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Place, places, sgd, started
from scaler_triton.optimizers import parameters_of
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim.optimizer import register_optimizer_step_pre_hook

import scaler_triton
from scaler_triton import GradScaler, lending

BOTH = [torch.amp.GradScaler, GradScaler]


def trained(cls: Any, optimizer_class: Any, prepare: Callable[[Any], object], place: Place) -> list[Any]:
    """Three steps; the parameter and the scale after each of them."""
    parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
    optimizer = optimizer_class([parameter], lr=0.5, fused=True)
    options = {"backend": place.backend} if cls is GradScaler else {}
    scaler = cls(place.device, init_scale=4.0, growth_interval=2, **options)
    prepare(optimizer)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((parameter.tolist(), scaler.get_scale()))
    return seen


def averaging(optimizer: Any, *args: Any) -> None:
    optimizer.grad_scale *= 4


def dropping(optimizer: Any, *args: Any) -> None:
    optimizer.found_inf.fill_(1.0)


class Averaging(torch.optim.SGD):
    """A fused optimizer of somebody's own."""

    def step(self, closure: Any = None) -> Any:
        averaging(self)
        return super().step(closure)


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("hook", [averaging, dropping])
@pytest.mark.parametrize("way", ["pre", "post", "global"])
def test_what_a_hook_writes_into_what_was_lent_stays_there(hook: Any, way: str, place: Place) -> None:
    handles = []

    def register(optimizer: Any) -> None:
        if way == "global":
            handles.append(register_optimizer_step_pre_hook(hook))
        else:
            handles.append(getattr(optimizer, f"register_step_{way}_hook")(hook))

    try:
        theirs = trained(torch.amp.GradScaler, torch.optim.SGD, register, place)
        handles.pop().remove()
        assert trained(GradScaler, torch.optim.SGD, register, place) == theirs
    finally:
        handles.pop().remove()


@pytest.mark.parametrize("place", places(), ids=str)
def test_what_an_optimizer_of_somebodys_own_writes_stays_there(place: Place) -> None:
    theirs, ours = (trained(cls, Averaging, lambda optimizer: None, place) for cls in BOTH)
    assert ours == theirs


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_number_as_grad_scale_is_passed_on(unscaled: bool) -> None:
    class Taking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            taken.append(float(self.grad_scale))  # type: ignore[attr-defined]

    taken: list[float] = []
    for cls in BOTH:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer: Any = Taking([parameter], lr=0.5)
        optimizer.grad_scale = 3.0
        scaler = cls("cpu", init_scale=4.0)
        parameter.grad = scaler.scale(torch.ones(2))
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert taken == [3.0 if unscaled else 12.0] * 2
    optimizer.grad_scale = 3.0
    with lending.lent((optimizer,), None, torch.zeros(()), on_host=True):
        assert optimizer.grad_scale == 3.0


def test_torchs_own_optimizers_are_lent_the_scale_itself() -> None:
    """A copy would be a launch more in every step."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    scale, found_inf = torch.ones(()), torch.zeros(())
    with lending.lent((optimizer,), scale, found_inf):
        assert optimizer.grad_scale is scale
        assert optimizer.found_inf is found_inf
    optimizer.register_step_pre_hook(averaging)
    with lending.lent((optimizer,), scale, found_inf):
        assert optimizer.grad_scale is not scale
        assert optimizer.found_inf is not found_inf
    with lending.lent((optimizer,), None, found_inf):
        assert optimizer.grad_scale is None


@pytest.mark.parametrize("bad", [1.0, math.inf])
@pytest.mark.parametrize("place", places(), ids=str)
def test_a_state_that_was_put_under_another_optimizers_id_is_its_state(bad: float, place: Place) -> None:
    """As hivemind does: it unscales an outer optimizer and steps the one within."""
    ended = []
    for cls in BOTH:
        parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
        outer, inner = (torch.optim.SGD([parameter], lr=0.5) for _ in range(2))
        scaler = cls(place.device, init_scale=4.0, **({"backend": place.backend} if cls is GradScaler else {}))
        scaler.scale(parameter.sum() * bad).backward()
        scaler.unscale_(outer)
        scaler._per_optimizer_states[id(inner)] = copy.deepcopy(scaler._per_optimizer_states[id(outer)])
        scaler.step(inner)
        scaler.update()
        ended.append((parameter.tolist(), scaler.get_scale()))
    assert ended[0] == ended[1]


class Lookahead:
    """As its many implementations are: the optimizer inside is `.optimizer`, and its groups are shared."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def by_its_flags(scaler: Any, wrapper: Lookahead) -> None:
    scaler.unscale_(wrapper)
    state = scaler._per_optimizer_states[id(wrapper)]
    scaler._maybe_opt_step(wrapper, state)
    state["stage"] = OptState.STEPPED


def by_torchs_step(scaler: Any, wrapper: Lookahead) -> None:
    """As a subclass does that has copied it, or a profiler that wraps what it found."""
    torch.amp.GradScaler.step(scaler, wrapper)


def after_another_look(scaler: Any, wrapper: Lookahead) -> None:
    scaler.unscale_(wrapper)
    scaler._per_optimizer_states[id(wrapper)] = _refresh_per_optimizer_state()
    scaler.unscale_(wrapper)
    scaler.step(wrapper)


def with_flags_of_ones_own(scaler: Any, wrapper: Lookahead) -> None:
    state = scaler._per_optimizer_states[id(wrapper)]
    flag = torch.zeros((), device=scaler._scale.device)
    state["found_inf_per_device"] = scaler._unscale_grads_(wrapper, flag + 1, flag, False)
    state["stage"] = OptState.UNSCALED
    scaler._check_inf_per_device(wrapper)
    scaler.step(wrapper)


@pytest.mark.parametrize("bad", [1.0, math.inf])
@pytest.mark.parametrize("step", [by_its_flags, by_torchs_step, after_another_look, with_flags_of_ones_own])
@pytest.mark.parametrize("place", places(), ids=str)
def test_a_wrappers_state_is_found_under_its_own_id(place: Place, step: Any, bad: float) -> None:
    ended = []
    for cls in BOTH:
        parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
        wrapper = Lookahead(torch.optim.SGD([parameter], lr=0.5))
        scaler = cls(place.device, init_scale=4.0, **({"backend": place.backend} if cls is GradScaler else {}))
        seen = []
        for factor in (bad, 1.0):
            parameter.grad = None
            scaler.scale(parameter.sum() * factor).backward()
            step(scaler, wrapper)
            stage = scaler._per_optimizer_states[id(wrapper)]["stage"]
            scaler.update()
            seen.append((parameter.tolist(), scaler.get_scale(), stage))
        ended.append(seen)
    assert ended[0] == ended[1]


@pytest.mark.parametrize("others", [0, 1])
def test_an_optimizer_at_the_id_of_a_wrapper_that_is_gone_begins_its_own_step(others: int) -> None:
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(first.param_groups[0]["params"][0].sum()).backward()
    wrapper, *later = (Lookahead(first) for _ in range(1 + others))
    scaler.unscale_(wrapper)
    for each in later:
        scaler._found_inf_per_device(each)
    states, there = scaler._per_optimizer_states, id(wrapper)
    states[id(second)] = states.pop(there)  # as if it had been made where the wrapper was
    states[id(first)]["wrappers"][id(second)] = states[id(first)]["wrappers"].pop(there)
    del wrapper
    assert scaler._state(second)["stage"] is OptState.READY
    assert {scaler._state(each)["stage"] for each in (first, *later)} == {OptState.UNSCALED}


def test_a_look_for_a_wrappers_state_does_not_end_that_of_the_optimizer_inside() -> None:
    """As where a framework unscales the optimizer inside, and its user looks at the one that he knows."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    wrapper = Lookahead(optimizer)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert not scaler._per_optimizer_states[id(wrapper)]["found_inf_per_device"]  # this look makes one
    scaler.step(wrapper)
    assert parameter.tolist() == [0.5, 0.5]  # not divided twice


class Slotted:
    """A wrapper that nothing can refer to weakly."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_an_optimizer_in_a_wrapper_without_weak_references_is_not_kept_alive() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    wrapper = Slotted(torch.optim.SGD([parameter], lr=0.5))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(wrapper)
    scaler.update()
    assert not scaler.was_skipped(wrapper)
    reference = weakref.ref(wrapper.optimizer)
    del wrapper
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("place", places(), ids=str)
def test_unscaling_some_parameters_by_hand_begins_no_step(place: Place) -> None:
    """As a backward pass does that steps each parameter at once: every one in an optimizer made for it alone."""
    parameters = [torch.nn.Parameter(torch.ones(2, device=place.device)) for _ in range(3)]
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    scaler.scale(torch.stack([*parameters]).sum()).backward()
    inverse, flag = torch.full((), 0.25, device=place.device), torch.zeros((), device=place.device)
    for parameter in parameters:
        scaler._unscale_grads_(torch.optim.SGD([parameter]), inverse, flag, False)
    assert all(parameter.grad is not None and parameter.grad.tolist() == [1.0, 1.0] for parameter in parameters)
    assert not scaler._per_optimizer_states
    copy.deepcopy(scaler)  # refused within a step


@pytest.mark.parametrize("place", places(), ids=str)
def test_every_micro_batch_may_be_looked_at(place: Place) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    for factor in (1.0, math.inf):
        scaler.scale(parameter.sum() * factor).backward()
        found = [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()]
        assert found == [float(factor == math.inf)]
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_what_looks_found_stays_until_the_update(place: Place, fused: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    found = []
    for factor in (math.inf, 1.0, 1.0, math.inf, 1.0):
        parameter.grad = None
        scaler.scale(parameter.sum() * factor).backward()
        found += scaler._check_inf_per_device(optimizer).values()
    scaler.step(optimizer)
    assert [flag.item() for flag in found] == [1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("place", places(), ids=str)
def test_gradients_are_looked_at_again_when_asked_for(place: Place) -> None:
    """After unscaling somebody divides them by a count of tokens, which is 0."""
    parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert parameter.grad is not None
    for divisor, found in ((0.0, 1.0), (math.inf, 1.0)):  # inf / inf is NaN
        parameter.grad.div_(divisor)
        assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [found]
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0)


def test_a_look_does_not_overrule_a_failure() -> None:
    """Gradients may be half unscaled: the step is skipped, whatever they hold."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scaler._skip(scaler._state(optimizer))
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]


def test_a_keyword_that_the_older_step_gets_from_the_scaler_is_the_scalers() -> None:
    class Older(torch.optim.SGD):
        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
            taken.append(grad_scaler)

    parameter = torch.nn.Parameter(torch.ones(2))
    for cls in BOTH:
        taken: list[Any] = []
        optimizer = Older([parameter], lr=0.5)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        scaler = cls("cpu")
        parameter.grad = scaler.scale(torch.ones(2))
        with pytest.warns(FutureWarning, match="stop passing itself"):
            scaler.step(optimizer, grad_scaler="mine")
        assert taken == [scaler]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Lookahead], ids=["bare", "wrapped"])
def test_an_optimizer_whose_attribute_optimizer_means_something_else_is_stepped(wrap: Any) -> None:
    class Odd(torch.optim.SGD):
        @property
        def optimizer(self) -> Any:
            raise RuntimeError("not built yet")

    parameter = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu", init_scale=4.0), Odd([parameter], lr=0.5)
    parameter.grad = scaler.scale(torch.ones(2))
    scaler.step(wrap(optimizer))
    assert parameter.tolist() == [0.5, 0.5]


def test_a_subclass_that_only_passes_through_has_an_empty_state() -> None:
    class PassThrough(scaler_triton.GradScaler):
        def __init__(self) -> None:
            self._enabled = False

    scaler = PassThrough()
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_steps_that_an_integration_ends_are_those_it_names() -> None:
    optimizers = [sgd([torch.ones(3)]) for _ in range(4)]
    scaler = started(GradScaler, "cpu")
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaler.step(optimizers[0])
    assert scaler._awaiting_step() == optimizers[1:]
    heir = torch.optim.SGD(optimizers[1].param_groups[0]["params"])  # of the same parameters
    scaler._abandon_steps_of(parameters_of(heir))
    del optimizer, optimizers[3]
    assert scaler._awaiting_step() == [optimizers[2]]
    scaler.update()
    assert scaler._awaiting_step() == [optimizers[2]]  # its gradients are unscaled still
    scaler.unscale_(optimizers[1])
    assert scaler._awaiting_step() == [optimizers[1], optimizers[2]]
    optimizers[2].zero_grad()
    assert scaler._awaiting_step() == [optimizers[1]]
    scaler._abandon_all_steps()
    assert scaler._awaiting_step() == []

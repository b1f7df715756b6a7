"""Wrappers around optimizers, and containers of several: each is stepped as what it holds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import sgd, started

from scaler_triton import GradScaler


class Wrapper:
    """As frameworks wrap an optimizer: its own step, everything else the inner one's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_and_the_optimizer_inside_share_one_state(fused: bool) -> None:
    """Difference 15 from torch."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([8.0])
    inner = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(inner)
    scaler.step(Wrapper(inner))
    scaler.update()
    assert parameter.item() == -2.0


@pytest.mark.parametrize("value", [8.0, math.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_that_keeps_its_groups_shares_the_state_after_a_resume(fused: bool, value: float) -> None:
    """Loading puts new groups into the inner optimizer, with the lists of parameters of those before."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    wrapper: Any = Wrapper(inner)
    wrapper.param_groups = inner.param_groups
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.param_groups[0] is not inner.param_groups[0]
    parameter.grad = torch.tensor([value])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(wrapper)
    assert scaler.was_skipped(wrapper) == scaler.was_skipped(inner) == (value == math.inf)
    scaler.update()
    assert parameter.item() == (0.0 if value == math.inf else -2.0)
    assert scaler.get_scale() == (2.0 if value == math.inf else 4.0)


def test_a_wrapper_around_nothing_but_itself_is_an_optimizer() -> None:
    optimizer: Any = sgd([torch.tensor([8.0])])
    optimizer.optimizer = optimizer
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


@pytest.mark.parametrize("stepped", [0, 1])
def test_wrappers_that_hold_each_other_are_optimizers_of_their_own(stepped: int) -> None:
    inner: Any = sgd([torch.tensor([8.0])])
    pair = (inner, Wrapper(inner))
    inner.optimizer = pair[1]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(pair[stepped])
    scaler.step(pair[stepped])
    scaler.update()
    assert inner.param_groups[0]["params"][0].item() == -1.0


def test_a_fused_optimizer_in_a_wrapper_gets_scale_and_flag() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([8.0])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(Wrapper(torch.optim.SGD([parameter], lr=1.0, fused=True)))
    assert parameter.item() == -2.0


def test_a_wrapper_that_takes_scale_and_flag_itself_gets_them() -> None:
    class Looking(Wrapper):
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= (1 - self.found_inf) * parameter.grad / self.grad_scale

    for cls in (GradScaler, torch.amp.GradScaler):
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([8.0])
        wrapper = Looking(torch.optim.SGD([parameter], lr=1.0, fused=True))
        started(cls, "cpu", init_scale=4.0).step(wrapper)
        assert parameter.item() == -2.0
        assert not {"grad_scale", "found_inf"} & set(vars(wrapper))


class Slotted:
    """A wrapper that nothing can be set on."""

    __slots__ = ("__weakref__", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("bad", [False, True])
def test_a_fused_optimizer_in_a_wrapper_without_attributes_gets_scale_and_flag(bad: bool) -> None:
    optimizer = sgd([torch.tensor([math.inf if bad else 8.0])], fused=True)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(Slotted(optimizer))
    assert parameter.item() == (0.0 if bad else -1.0)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


class Container:
    """Several optimizers stepped as one, without weak references to itself."""

    __slots__ = ("optimizers",)

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Chained(Container):
    """The same, whose groups can only be iterated over."""

    __slots__ = ()

    @property
    def param_groups(self) -> Any:
        return itertools.chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)


@pytest.mark.parametrize("container", [Container, Chained])
@pytest.mark.parametrize("bad", [False, True])
def test_a_container_of_optimizers_steps_as_one(container: type[Container], bad: bool) -> None:
    optimizers = [sgd([torch.tensor([8.0])]), sgd([torch.tensor([math.inf if bad else 4.0])])]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(container(optimizers))
    scaler.update()
    values = [o.param_groups[0]["params"][0].item() for o in optimizers]
    assert values == ([0.0, 0.0] if bad else [-1.0, -0.5])


@pytest.mark.parametrize("container", [Container, Chained])
def test_a_wrapper_around_a_container_shares_its_state(container: type[Container]) -> None:
    """The same groups may come in a new list each time."""
    inner = container([sgd([torch.tensor([8.0])]), sgd([torch.tensor([4.0])])])
    wrapper, scaler = Wrapper(inner), started(GradScaler, "cpu", init_scale=4.0)
    scaler.clip_grad_norm_(wrapper, 1e9)
    scaler.step(inner)
    scaler.update()
    assert [group["params"][0].item() for group in inner.param_groups] == [-1.0, -0.5]  # divided once
    assert not scaler.was_skipped(wrapper)


def test_containers_without_weak_references_leave_one_plan_behind() -> None:
    scaler = started(GradScaler, "cpu")
    for _ in range(5):
        scaler.step(Container([sgd([torch.ones(2)])]))
        scaler.update()
    assert len(scaler._records.plans()) == 1


def test_a_container_that_an_update_left_unscaled_is_not_divided_again() -> None:
    """Although another one came first."""
    late, early = (Container([sgd([torch.tensor([8.0])])]) for _ in range(2))
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(late)
    scaler.step(early)
    scaler.update()
    scaler.step(Container([sgd([torch.ones(2)])]))
    scaler.step(late)
    assert [container.param_groups[0]["params"][0].item() for container in (early, late)] == [-1.0, -1.0]


def test_an_optimizer_that_keeps_another_one_is_no_wrapper() -> None:
    outer, kept = sgd([torch.tensor([8.0])]), sgd([torch.tensor([math.inf])])
    outer.optimizer = kept
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(outer)
    assert not scaler.was_skipped(outer)
    assert outer.param_groups[0]["params"][0].item() == -1.0

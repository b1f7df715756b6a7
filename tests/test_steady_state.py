"""A thousand steps of the loops whose gradients come and go: planned once, and right beside torch's scaler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import WAYS, Place, assert_same, places, take_step
from scaler_triton.flag_buffer import FlagBuffer

from scaler_triton import GradScaler, placement, records
from scaler_triton.plan import GradPlan

STEPS = 1000
Loop = tuple[list[torch.optim.Optimizer], Callable[[int], None]]


def parameters(count: int, requires_grad: bool = True, device: str = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, device=device), requires_grad=requires_grad) for _ in range(count)]


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2.0**-10, foreach=False)


def give(params: list[torch.nn.Parameter], step: int, absent: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    for index, parameter in enumerate(params):
        value = float("inf") if step % 50 == 49 and index == len(params) - 1 else float(index + step)
        parameter.grad = None if index in absent else torch.full_like(parameter, value)


def experts() -> Loop:
    params, chance = parameters(64), random.Random(0)
    return [sgd(params)], lambda step: give(params, step, set(chance.sample(range(64), 48)))


def lora() -> Loop:
    trained, frozen = parameters(8), parameters(2000, requires_grad=False)
    return [sgd([*frozen, *trained])], lambda step: give(trained, step)


def gan() -> Loop:
    generator, critic = parameters(5), parameters(7)

    def backward(step: int) -> None:
        give(generator, step, set(range(5)) if step % 3 else set())
        give(critic, step)

    return [sgd(generator), sgd(critic)], backward


def train(scaler: Any, loop: Loop) -> list[torch.Tensor]:
    optimizers, backward = loop
    scaler.scale(torch.ones(()))
    for step in range(STEPS):
        backward(step)
        for optimizer in optimizers:
            if any(p.grad is not None for p in optimizer.param_groups[0]["params"]):
                scaler.step(optimizer)
        scaler.update()
    return [p.detach() for optimizer in optimizers for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("make", [experts, lora, gan], ids=lambda make: make.__name__)
def test_a_thousand_steps_are_planned_once_and_are_torchs(make: Callable[[], Loop]) -> None:
    numbers = {"init_scale": 16.0, "growth_interval": 20}
    scaler = GradScaler("cpu", backend="torch", **numbers)
    with (
        mock.patch.object(records, "GradPlan", side_effect=GradPlan) as made,
        mock.patch.object(GradPlan, "_add_forms", autospec=True, side_effect=GradPlan._add_forms) as compared,
        mock.patch.object(FlagBuffer, "verdict", autospec=True, side_effect=FlagBuffer.verdict) as flags,
    ):
        ours = train(scaler, loop := make())
    plans = [scaler._records.plan(optimizer) for optimizer in loop[0]]
    assert made.call_count == flags.call_count == len(plans)
    assert sum(plan.rebuilds for plan in plans) <= 1
    assert compared.call_count <= 20  # while gradients are seen for the first time; then torch's guards know them
    torchs = torch.amp.GradScaler("cpu", **numbers)
    for mine, theirs in zip(ours, train(torchs, make()), strict=True):
        assert_same(mine, theirs)
    assert scaler.state_dict() == torchs.state_dict()


@pytest.mark.parametrize("name", ["_spec", "_local_tensor"])
def test_shards_are_found_without_dtensors_private_names(name: str, monkeypatch: Any) -> None:
    class Layered:
        """Looks like a DTensor whose private attribute has another name."""

        placements = ()
        device_mesh = None

        def __init__(self, shard: torch.Tensor) -> None:
            self.__dict__.update({"_spec": self, "_local_tensor": shard})
            del self.__dict__[name]
            self.shard = shard

        def to_local(self) -> torch.Tensor:
            return self.shard

    (parameter,) = parameters(1)
    made = GradPlan([parameter])
    layered: Any = Layered(torch.ones(3))
    made.parameters, made._dtensors = [layered], [0]
    monkeypatch.setattr(placement, "is_dtensor", lambda tensor: isinstance(tensor, Layered))
    for _ in range(3):
        shard = torch.ones(3)
        gradients: list[Any] = [Layered(shard)]
        quick = made._known_shards(gradients)
        assert quick in ([], [shard])
        assert made._localise(gradients) == {}
        assert gradients[0] is shard


def test_each_mode_has_a_table_for_its_own_launch_configuration(monkeypatch: Any) -> None:
    from scaler_triton.kernels.launch_config import LaunchConfig

    from scaler_triton.kernels import lookup

    if torch.cuda.is_available():
        pytest.skip("the interpreter takes any configuration")
    wide, narrow = LaunchConfig(8, 2, 2), LaunchConfig(4, 1, 2)
    monkeypatch.setattr(lookup, "config_for", lambda device, mode, size: {"unscale": wide, "check": narrow}[mode])
    (parameter,) = parameters(1)
    optimizer = sgd([parameter])
    scaler = GradScaler("cpu", init_scale=4.0, backend="triton")
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full((3,), 8.0)
    scaler._check_inf_per_device(optimizer)
    scaler.step(optimizer)
    (layout,) = scaler._records.plan(optimizer).layouts
    assert {mode: table.config for mode, table in layout.tables.items()} == {"unscale": wide, "check": narrow}
    assert parameter.tolist() == [-(2.0**-9)] * 3


@pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)
@pytest.mark.parametrize("how", WAYS)
def test_a_launch_configuration_is_looked_up_with_a_plan_and_never_in_a_step(place: Place, how: str) -> None:
    from scaler_triton.kernels import lookup, tuned_file

    params, chance = parameters(4, device=place.device), random.Random(0)
    optimizer = torch.optim.SGD(params, lr=2.0**-10, fused=True)
    scaler = GradScaler(place.device, backend=place.backend)
    scaler.scale(torch.ones((), device=place.device))

    def step(number: int) -> None:
        give(params, number, set(chance.sample(range(3), 1)))
        take_step(scaler, optimizer, how)

    with (
        mock.patch.object(lookup, "config_for", side_effect=lookup.config_for) as config_for,
        mock.patch.object(tuned_file, "read", side_effect=tuned_file.read) as read,
    ):
        step(0)
        assert config_for.called
        for looks in (config_for, read):
            looks.reset_mock()
        for number in range(1, 60):  # one of them overflows
            step(number)
    assert config_for.call_args_list == read.call_args_list == []
    assert scaler.stats().skipped == 1

"""Whole training steps, bitwise beside torch's scaler where torch is right."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, assert_same, flags, places, sgd, started

from scaler_triton import GradScaler, optimizers
from scaler_triton.dispatch import choose

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
IMPLEMENTATIONS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def train(cls: type, optimizer_name: str, implementation: str, explicit: bool, device: str, **kwargs: Any) -> tuple:
    """Train ten steps, two of them overflowing, and return the trace of scales and the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(device)
    make, options = OPTIMIZERS[optimizer_name]
    optimizer = make(model.parameters(), lr=0.1, **options, **IMPLEMENTATIONS[implementation])
    scaler = cls(device, init_scale=8.0, growth_interval=2, **kwargs)
    trace = []
    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 7, device=device)).square().mean()).backward()
        if step in (3, 7):
            model[0].weight.grad[1, 2] = math.inf if step == 3 else math.nan
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return trace, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", places(), ids=str)
def test_training_equals_torch_bitwise(place: Place, optimizer: str, implementation: str, explicit: bool) -> None:
    if optimizer == "adagrad" and implementation == "fused" and place.device != "cpu":
        pytest.skip("torch has no fused Adagrad off the CPU")
    theirs = train(torch.amp.GradScaler, optimizer, implementation, explicit, place.device)
    ours = train(GradScaler, optimizer, implementation, explicit, place.device, backend=place.backend)
    device = torch.zeros(0, device=place.device).device
    assert choose(device, torch.float32, place.backend) == place.backend
    assert ours[0] == theirs[0]
    assert {8.0, 16.0} == {scale for scale, _ in ours[0]}  # it grew and backed off
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert_same(mine, other)


@pytest.mark.parametrize("place", places(), ids=str)
def test_first_step_skipped_leaves_no_garbage_in_fused_momentum(place: Place) -> None:
    """Difference 14 from torch."""
    parameter = torch.nn.Parameter(torch.ones(1000, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    scaler = GradScaler(place.device, init_scale=2.0, backend=place.backend)
    for gradient in (math.inf, 4.0):
        scaler.scale(torch.ones((), device=place.device))
        parameter.grad = torch.full_like(parameter, gradient)
        assert optimizers.skip_would_corrupt(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(parameter.detach().cpu(), torch.full((1000,), 1.0 - 4.0 / 1.0))
    assert not optimizers.skip_would_corrupt(optimizer)  # no wait any more
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1, device=place.device))]})
    assert not optimizers.skip_would_corrupt(optimizer)  # without a gradient it is left out


class OwnSGD(torch.optim.SGD):
    """A subclass with buffers of its own, which its own kernel initialises."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, **defaults: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": 1.0, **defaults})
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1


@pytest.mark.parametrize("defaults", [{}, {"momentum": 0.9}])
def test_an_sgd_of_ones_own_is_called_as_by_torchs_scaler(defaults: dict[str, float]) -> None:
    for cls in (torch.amp.GradScaler, GradScaler):
        optimizer, scaler = OwnSGD([torch.nn.Parameter(torch.ones(2))], **defaults), cls("cpu")
        scaler.scale(optimizer.param_groups[0]["params"][0].sum() * math.inf).backward()
        scaler.step(optimizer)
        assert optimizer.calls == 1


def test_disabled_passes_everything_through() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", enabled=False)
    loss = parameter.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0]
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_failed_unscale_leaves_the_flag_of_an_earlier_check(place: Place) -> None:
    optimizer = sgd([torch.full((3,), math.inf, dtype=torch.float16)], place.device)
    scaler = started(GradScaler, place.device, init_scale=8.0, backend=place.backend)
    scaler._check_inf_per_device(optimizer)
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [1.0]
    scaler.update()
    assert scaler.get_scale() == 4.0


class Slotted:
    """A callable that nothing can refer to weakly."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *, grad_scaler: Any = None) -> None:
        self.calls.append(grad_scaler)


def test_whether_a_step_takes_the_scaler_is_asked_of_each_function_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    with mock.patch("inspect.signature", wraps=inspect.signature) as asked:
        for _ in range(3):
            assert not optimizers.takes_scaler(optimizer)
    assert asked.call_count <= 1  # another test may have asked before
    optimizer.step = Slotted()  # type: ignore[method-assign]
    assert optimizers.takes_scaler(optimizer)
    optimizer.step = functools.partial(optimizer.step, grad_scaler=None)  # type: ignore[method-assign]
    assert optimizers.takes_scaler(optimizer)

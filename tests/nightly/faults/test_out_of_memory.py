"""Whichever op of a call fails for want of memory: the phase is true, the same call or the next step is right, and a
rank makes as many reductions as those on which none fails. In a scaler's first step, and in one after three good ones.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, grads, sgd, started, take_step, values
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.core.check import Checks
from scaler_triton.core.ranks import Ranks
from scaler_triton.kernels import launch

FUSED = pytest.mark.parametrize("fused", [False, True])
GOOD_STEPS = pytest.mark.parametrize("good_steps", [0, 3])
MOST = 400  # ops of a call: that many are not made


def first_of(optimizer: Any) -> list[Tensor]:
    return optimizer.param_groups[0]["params"][:1]


WAYS: dict[str, Callable[[Any, Any], object]] = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "check": lambda scaler, optimizer: scaler._check_inf_per_device(optimizer),
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1e6),
    "largest": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1e6, math.inf),
    "some": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1e6, parameters=first_of(optimizer)),
}


class FailAt(TorchDispatchMode):
    """Fails one of torch's ops, by its number. What is `spared` does not count.

    Args:
        every: also ops that write into memory that is there, which fail for other reasons.
    """

    def __init__(self, number: int, *, every: bool = True) -> None:
        super().__init__()
        self.left, self.every, self.is_spared = number, every, False
        self.raised, self.reductions = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_spared and (self.every or allocates(func._schema)):
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError(str(func))
        return func(*args, **(kwargs or {}))

    def spared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(self, "is_spared", True):
                return function(*args, **kwargs)

        return call

    def reduce(self, values: Tensor, op: str) -> None:
        """Stand for a reduction over this rank and another like it."""
        self.reductions += 1
        if op == "SUM":
            self.spared(values.mul_)(2)


def allocates(schema: Any) -> bool:
    """Return whether an op returns tensors that share no memory with its arguments."""
    return any(returned.alias_info is None and "Tensor" in str(returned.type) for returned in schema.returns)


@contextmanager
def failing(number: int, optimizer: Any, *, every: bool = True) -> Iterator[FailAt]:
    """Fail the scaler alone: what a half-done optimizer leaves is its own affair, and a launch makes no op on a GPU.

    Whether the error came through is in `raised`.
    """
    mode = FailAt(number, every=every)
    step = mock.patch.object(optimizer, "step", mode.spared(optimizer.step))
    start = mock.patch.object(launch.Launch, "__call__", mode.spared(launch.Launch.__call__))
    try:
        with step, start, mode:
            yield mode
    except torch.OutOfMemoryError:
        mode.raised = True


def backward(scaler: Any, optimizer: Any) -> None:
    """Scale a loss; every gradient is 2, scaled."""
    scale = scaler.scale(torch.ones((), device=scaler._device)).item()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 2.0 * scale)


def good_step(scaler: Any, optimizer: Any) -> None:
    before = values(optimizer)
    backward(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert values(optimizer) == [value - 2.0 for value in before]


def three_dtypes(place: Place, fused: bool, good_steps: int) -> tuple[Any, Any]:
    """Return a scaler of scale 4 and an optimizer with gradients in three dtypes, after so many good steps."""
    dtypes = (torch.float32, torch.float64, torch.float32, torch.bfloat16)
    params = [torch.nn.Parameter(torch.zeros(4, dtype=dtype, device=place.device)) for dtype in dtypes]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    for _ in range(good_steps):
        good_step(scaler, optimizer)
    return scaler, optimizer


@PLACES
@FUSED
@GOOD_STEPS
@pytest.mark.parametrize("way", WAYS)
def test_every_op_of_a_step(place: Place, fused: bool, way: str, good_steps: int) -> None:
    """READY means that no gradient was touched; either way the step is taken once or skipped, and the next is right."""
    for number in itertools.count():
        scaler, optimizer = three_dtypes(place, fused, good_steps)
        start = values(optimizer)
        backward(scaler, optimizer)
        with failing(number, optimizer) as mode:
            WAYS[way](scaler, optimizer)
        if mode.raised:
            stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
            assert grads(optimizer) == [8.0] * 4 if stage is OptState.READY else stage is OptState.UNSCALED
            assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
            assert scaler.get_scale() == 4.0
        if mode.raised or way != "step":
            scaler.step(optimizer)
        stepped = [value - 2.0 for value in start]
        assert values(optimizer) in ([start, stepped] if mode.raised else [stepped])
        scaler.update(4.0)
        good_step(scaler, optimizer)
        if not mode.raised:
            break
    assert 0 < number < MOST or place.backend == "triton"


@PLACES
@GOOD_STEPS
@pytest.mark.parametrize(("bad", "hysteresis", "scale"), [(False, 1, 8.0), (True, 1, 2.0), (True, 2, 4.0)])
def test_every_allocation_of_an_update(place: Place, good_steps: int, bad: bool, hysteresis: int, scale: float) -> None:
    """A failed update has changed nothing; the same call again is right."""
    for number in range(MOST):
        scaler, optimizer = three_dtypes(place, False, good_steps)
        scaler.set_growth_interval(good_steps + 1)
        scaler.set_limits(hysteresis=hysteresis)
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device=place.device))], lr=1.0)
        for each in (optimizer, other):
            backward(scaler, each)
        if bad:
            other.param_groups[0]["params"][0].grad[0] = torch.inf
        for each in (optimizer, other):
            scaler.step(each)
        with failing(number, optimizer, every=False) as mode:
            scaler.update()
        if mode.raised:
            scaler.update()
        assert (scaler.get_scale(), scaler.stats().updates, scaler.stats().skipped) == (scale, good_steps + 1, bad)
        if not mode.raised:
            break
    assert number > 5 or str(place) != "cuda-torch"  # the other places' updates make few ops


@pytest.fixture
def two_pretended_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checks, "find_peers", lambda checks, parameters, group: Ranks((None,), (0, 1)))  # type: ignore[arg-type]
    monkeypatch.setattr(Ranks, "reduce_", lambda self, values, op: values.mul_(2 if op == "SUM" else 1))


@FUSED
@GOOD_STEPS
@pytest.mark.parametrize("way", [*WAYS, "step of what was carried"])
@pytest.mark.usefixtures("two_pretended_ranks")
def test_a_rank_that_fails_reduces_as_often_as_others(way: str, good_steps: int, fused: bool) -> None:
    made = []  # by the number of the op that fails; last, where none does
    for number in range(MOST):
        optimizer = sgd([torch.ones(5), torch.ones(3, 2)], fused=fused)
        scaler = started(ShardedGradScaler, "cpu", init_scale=16.0)
        for _ in range(good_steps):
            take_step(scaler, optimizer, "step")
            scaler.scale(torch.ones(()))
        if way not in WAYS:
            scaler.unscale_(optimizer)
            scaler.update()
        with failing(number, optimizer) as mode, mock.patch.object(Ranks, "reduce_", mode.reduce):
            WAYS.get(way, WAYS["step"])(scaler, optimizer)
        made.append(mode.reductions)
        if not mode.raised:
            break
        if way != "check":  # a step checks again, as those of the other ranks do
            assert scaler._ours.steps.open(optimizer).phase.name in ("FAILED", "UNSCALED", "CARRIED")
    assert 1 < len(made) < MOST
    assert set(made) == {made[-1]}, [number for number, count in enumerate(made) if count != made[-1]]


@FUSED
@pytest.mark.parametrize("sigma", [None, 6.0])
@pytest.mark.parametrize("way", ["step", "unscale_", "clip", "largest"])
@pytest.mark.usefixtures("two_pretended_ranks")
def test_a_rank_whose_guard_fails_does_too(way: str, sigma: float | None, fused: bool) -> None:
    """Also in the update of the step before, which a guard makes by itself."""
    made = []
    for number in range(MOST):
        optimizer, guard = sgd([torch.ones(5), torch.ones(3, 2)], fused=fused), StepGuard("cpu", spike_sigma=sigma)
        for _ in range(2):
            guard.step(optimizer)
        with failing(number, optimizer) as mode, mock.patch.object(Ranks, "reduce_", mode.reduce):
            WAYS[way](guard, optimizer)
        made.append(mode.reductions)
        if not mode.raised:
            break
    assert 1 < len(made) < MOST
    assert set(made) == {made[-1]}, made


@pytest.mark.usefixtures("two_pretended_ranks")
@pytest.mark.parametrize("twice", [False, True])
def test_a_wrong_call_reduces_nothing_on_a_rank_without_a_scale_either(twice: bool) -> None:
    optimizer = sgd([torch.ones(5)])
    for scaler in (ShardedGradScaler("cpu"), started(ShardedGradScaler, "cpu")):
        with mock.patch.object(Ranks, "reduce_") as reduce, pytest.raises((AssertionError, ValueError)):
            scaler.clip_grad_norm_([optimizer] * 2 * twice, 1.0)
        reduce.assert_not_called()

"""Memory runs out at every point where the scaler asks for some; the same step again, or the next, is right."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, assert_same, grads, places, started, values
from scaler_triton.limits import Limits
from scaler_triton.verdict import Verdict
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import GradScaler, plan, reference_update
from scaler_triton.kernels import launcher

PLACES = pytest.mark.parametrize("place", places(), ids=str)
FUSED = pytest.mark.parametrize("fused", [False, True])


class Allocations(TorchDispatchMode):
    """Counts the torch operations that return new tensors, and has the n-th one run out of memory."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.left = failing
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and allocates(func._schema):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError(str(func))
        return func(*args, **(kwargs or {}))


def allocates(schema: Any) -> bool:
    """Tell whether an operation returns tensors that share no memory with its arguments."""
    return any(returned.alias_info is None and "Tensor" in str(returned.type) for returned in schema.returns)


def backward(optimizer: Any, factor: float) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 2.0 * factor)


def three_dtypes(place: Place, fused: bool) -> tuple[Any, Any]:
    """Return a started scaler and an optimizer with a gradient in each of three dtypes, scaled by 4."""
    shapes = [(torch.float32, (4,)), (torch.float64, (4,)), (torch.float32, (4,)), (torch.bfloat16, (4,))]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=place.device)) for dtype, shape in shapes]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    return started(GradScaler, place.device, init_scale=4.0, backend=place.backend), optimizer


@contextmanager
def out_of_memory_at(failing: int, optimizer: Any) -> Iterator[None]:
    """Run out of memory in the scaler alone.

    What a half-done optimizer leaves is its own affair, and a launch allocates under Triton's interpreter only.
    """
    mode = Allocations(failing)
    step = mock.patch.object(optimizer, "step", paused(mode, optimizer.step))  # no hooks: it would be lent copies
    with step, mock.patch.object(launcher.Launch, "__call__", paused(mode, launcher.Launch.__call__)), mode:
        yield


def paused(mode: Allocations, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, mode.paused = mode.paused, True
        result = function(*args, **kwargs)
        mode.paused = before
        return result

    return call


def attempt(failing: int, optimizer: Any, call: Callable[..., Any], *args: Any) -> bool:
    """Make the call with the n-th allocation failing; whether it failed."""
    try:
        with out_of_memory_at(failing, optimizer):
            call(*args)
    except torch.OutOfMemoryError:
        return True
    return False


@PLACES
@FUSED
@pytest.mark.parametrize("method", ["unscale_", "step"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_every_allocation_of_a_step(place: Place, fused: bool, method: str, warm: bool) -> None:
    """READY means that no gradient was touched; either way the step is taken once or skipped, and the next is right."""
    failures = 0
    for failing in itertools.count(1):
        scaler, optimizer = three_dtypes(place, fused)
        start = one_good_step(scaler, optimizer) if warm else values(optimizer)
        backward(optimizer, 4.0)
        failed = attempt(failing, optimizer, getattr(scaler, method), optimizer)
        if failed:
            failures += 1
            assert_stage_is_true(scaler, optimizer)
        if failed or method == "unscale_":
            scaler.step(optimizer)
        stepped = [value - 2.0 for value in start]
        assert values(optimizer) in ([start, stepped] if failed else [stepped])
        scaler.update(4.0)
        before = values(optimizer)
        one_good_step(scaler, optimizer)
        assert values(optimizer) == [value - 2.0 for value in before]
        if not failed:
            break
    # torch's op takes a one to check with, and on a GPU an inverse scale that its ops make.
    by_torch = place.backend == "torch" and (place.device != "cpu" or (fused and method == "step"))
    if warm and not by_torch:
        assert failures == 0  # a step of a known form allocates nothing
    else:
        assert failures >= (1 if warm else 2)


def one_good_step(scaler: Any, optimizer: Any) -> list[float]:
    """Take a step that must be right; the values after it."""
    backward(optimizer, scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    return values(optimizer)


def assert_stage_is_true(scaler: Any, optimizer: Any) -> None:
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY:
        assert grads(optimizer) == [8.0] * 4
    else:
        assert state["stage"] is OptState.UNSCALED
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    assert (scaler.get_scale(), scaler._get_growth_tracker() in (0, 1)) == (4.0, True)


@PLACES
def test_every_allocation_of_an_update(place: Place) -> None:
    """A failed update has changed nothing; the same call again is right."""
    for failing in itertools.count(1):
        scaler, optimizer = three_dtypes(place, False)
        other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device=place.device))], lr=1.0)
        for each in (optimizer, other):
            backward(each, 4.0)
        other.param_groups[0]["params"][0].grad[0] = torch.inf
        for each in (optimizer, other):
            scaler.step(each)
        failed = attempt(failing, optimizer, scaler.update)
        if not failed:
            break
        assert scaler.get_scale() == 4.0
        scaler.update()
        assert scaler.get_scale() == 2.0
    assert scaler.get_scale() == 2.0
    assert failing > 1


@pytest.mark.parametrize("limits", [Limits(), Limits(hysteresis=2, consecutive_hysteresis=True)])
@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_every_allocation_of_an_update_by_torchs_ops_on_a_device(flag: float, limits: Limits) -> None:
    """Here on the CPU, whose own update allocates nothing."""
    for failing in itertools.count(1):
        held = [torch.tensor(4.0), torch.tensor(1, dtype=torch.int32), torch.ones(7, dtype=torch.int64)]
        scale, tracker, counters = held
        before = [tensor.clone() for tensor in held]
        found_inf = torch.tensor(flag)
        try:
            with Allocations(failing):
                reference_update.update_on_device_(scale, tracker, found_inf, (2.0, 0.5, 2), limits, counters)
        except torch.OutOfMemoryError:
            assert all(map(torch.equal, held, before))
            continue
        assert failing > 5
        assert (scale.item(), tracker.item(), counters[0].item()) == (2.0 if flag else 8.0, 0, 2)
        return


@pytest.mark.parametrize("method", ["copy_to", "add", "start_mirror"])
@PLACES
def test_after_the_gradients_were_written(place: Place, method: str, monkeypatch: Any) -> None:
    """The flag cannot be copied to a second device or to the host: the retry must not unscale again."""
    scaler, optimizer = three_dtypes(place, False)
    backward(optimizer, 4.0)
    real, calls = getattr(Verdict, method), []

    def once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError(method)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Verdict, method, once)
        with pytest.raises(torch.OutOfMemoryError):
            scaler.unscale_(optimizer)
    assert grads(optimizer) == [2.0] * 4
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    scaler.step(optimizer)
    assert values(optimizer) in ([0.0] * 4, [-2.0] * 4)


@pytest.mark.parametrize("point", ["__init__", "_build_layouts", "collect"])
@PLACES
def test_a_plan_is_being_built(place: Place, point: str, monkeypatch: Any) -> None:
    """No plan, or half of one, is left behind: the same call again is right."""
    scaler, optimizer = three_dtypes(place, False)
    backward(optimizer, 4.0)
    with monkeypatch.context() as patch:
        patch.setattr(plan.GradPlan, point, out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            scaler.unscale_(optimizer)
    assert grads(optimizer) == [8.0] * 4
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler.step(optimizer)
    assert values(optimizer) == [-2.0] * 4


def out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("while planning")


@PLACES
def test_a_plan_is_being_built_anew(place: Place, monkeypatch: Any) -> None:
    """A gradient comes in another dtype, and there is no memory to plan for it."""
    scaler, optimizer = three_dtypes(place, False)
    one_good_step(scaler, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(plan.GradPlan, "_build_layouts", out_of_memory)
        torch.nn.ParameterList(optimizer.param_groups[0]["params"]).to(torch.float64)
        backward(optimizer, 4.0)
        with pytest.raises(torch.OutOfMemoryError):
            scaler.unscale_(optimizer)
    assert grads(optimizer) == [8.0] * 4
    scaler.step(optimizer)
    scaler.update()
    assert values(optimizer) == [-4.0] * 4
    one_good_step(scaler, optimizer)
    assert values(optimizer) == [-6.0] * 4


def composer_step(scaler: Any, model: Any, optimizer: Any, batch: torch.Tensor, fails: int) -> None:
    """Composer's loop: after an out-of-memory error the states are new and the batch is tried in halves."""
    for micro in (1, 2, 4):
        try:
            optimizer.zero_grad()
            for piece in batch.chunk(micro):
                scaler.scale(model(piece).square().sum() / len(batch)).backward()
            scaler.unscale_(optimizer)
            if micro <= fails:
                raise torch.OutOfMemoryError("in the clipping, say")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
        except torch.OutOfMemoryError:
            scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            continue
        scaler.update()
        return


@PLACES
@FUSED
def test_retry_loops_that_assign_fresh_states(place: Place, fused: bool) -> None:
    seen = []
    settings = {"init_scale": 8.0, "growth_interval": 2}
    for scaler in (
        torch.amp.GradScaler(place.device, **settings),
        GradScaler(place.device, backend=place.backend, **settings),
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(place.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        run = []
        for step in range(6):
            batch = torch.randn(4, 4, device=place.device) * (1e30 if step == 3 else 1.0)  # its square overflows
            composer_step(scaler, model, optimizer, batch, fails=(0, 2, 0, 1, 2, 0)[step])
            run += [scaler._scale.clone(), model.weight.detach().clone(), model.bias.detach().clone()]
        seen.append(run)
    assert [scale.item() for scale in seen[1][::3]] == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]
    for theirs, ours in zip(*seen, strict=True):
        assert_same(ours, theirs)

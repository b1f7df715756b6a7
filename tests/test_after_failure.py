"""After a failure the stage tells the truth, and the same step again gives the right parameters."""

from __future__ import annotations

import math
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, flags, grads, places, sgd, started, values
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ShardedGradScaler, batch_ops, lending, states


def two_dtypes(place: Place, **kwargs: Any) -> tuple[Any, Any]:
    """Return a started scaler and an optimizer with a gradient in each of two dtypes, scaled by 4."""
    made = []
    for dtype in (torch.float32, torch.float64):
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype, device=place.device))
        made.append(parameter)
    optimizer = torch.optim.SGD(made, lr=1.0, **kwargs)
    backward(optimizer)
    return started(GradScaler, place.device, init_scale=4.0, growth_interval=1000, backend=place.backend), optimizer


def backward(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 8.0)


def fail_on_second_call(function: Any) -> Any:
    calls = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("in the second launch")
        return function(*args, **kwargs)

    return failing


def test_a_check_that_cannot_begin_does_not_skip_a_step_that_was_unscaled(monkeypatch: Any) -> None:
    scaler, optimizer = two_dtypes(Place("cpu", "torch"))
    scaler.unscale_(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(GradScaler, "_new_verdict", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            scaler._check_inf_per_device(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert values(optimizer) == [-2.0, -2.0]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_second_dtype_fails_while_unscaling(place: Place, fused: bool, monkeypatch: Any) -> None:
    scaler, optimizer = two_dtypes(place, fused=fused)
    with monkeypatch.context() as patch:
        patch.setattr(batch_ops, "unscale_batch_", fail_on_second_call(batch_ops.unscale_batch_))
        with pytest.raises(MemoryError):
            scaler.unscale_(optimizer)
    assert grads(optimizer) == [2.0, 8.0]
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert flags(scaler, optimizer) == [1.0]
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 0)
    scaler.step(optimizer)  # skips
    assert values(optimizer) == [0.0, 0.0]
    scaler.update(4.0)
    backward(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-2.0, -2.0]


@pytest.mark.parametrize("place", places(), ids=str)
def test_second_dtype_fails_while_checking(place: Place, monkeypatch: Any) -> None:
    scaler, optimizer = two_dtypes(place, fused=True)
    with monkeypatch.context() as patch:
        patch.setattr(batch_ops, "check_batch", fail_on_second_call(batch_ops.check_batch))
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
    assert grads(optimizer) == [8.0, 8.0]
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler.step(optimizer)  # nothing was touched: the same call again
    assert values(optimizer) == [-2.0, -2.0]


class Older(torch.optim.SGD):
    """A step that is passed the scaler, and fails before it asks for the flag."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        raise TypeError("not implemented")


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, Older], ids=["fused", "older"])
@pytest.mark.parametrize("place", places(), ids=str)
def test_what_was_found_before_outlives_a_step_that_cannot_look(place: Place, optimizer_class: Any) -> None:
    ended = []
    for cls in (torch.amp.GradScaler, GradScaler):
        parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
        optimizer = optimizer_class([parameter], lr=1.0, **({} if optimizer_class is Older else {"fused": True}))
        scaler = started(cls, place.device, init_scale=4.0, **({"backend": place.backend} if cls is GradScaler else {}))
        parameter.grad = torch.full_like(parameter, math.inf)
        assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]
        parameter.grad = torch.ones(1, device=place.device).expand(2)  # no op writes it
        with pytest.raises((RuntimeError, TypeError)):
            scaler.step(optimizer)
        scaler.update()
        ended.append((scaler.get_scale(), parameter.tolist()))
    assert ended[0] == ended[1] == (2.0, [1.0, 1.0])


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_plain_step_raises_and_is_called_again(place: Place, explicit: bool) -> None:
    scaler, optimizer = two_dtypes(place)
    if explicit:
        scaler.unscale_(optimizer)
    hook = optimizer.register_step_pre_hook(raising)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    hook.remove()
    scaler.step(optimizer)
    scaler.update()
    assert values(optimizer) == [-2.0, -2.0]
    assert scaler._get_growth_tracker() == 1


def raising(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("in the optimizer")


@pytest.mark.parametrize("own", [None, 2.0])
@pytest.mark.parametrize("place", places(), ids=str)
def test_fused_step_of_unscaled_gradients_raises_and_is_called_again(place: Place, own: float | None) -> None:
    scaler, optimizer = two_dtypes(place, fused=True)
    if own is not None:
        optimizer.grad_scale = torch.tensor(own, device=place.device)
    scaler.unscale_(optimizer)
    hook = optimizer.register_step_pre_hook(raising)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert not hasattr(optimizer, "found_inf")
    assert hasattr(optimizer, "grad_scale") == (own is not None)
    hook.remove()
    scaler.step(optimizer)
    assert values(optimizer) == [-2.0 / (own or 1.0)] * 2
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("where", ["before", "half-way", "after"])
@pytest.mark.parametrize("place", places(), ids=str)
def test_fused_step_that_unscales_raises_and_can_only_be_skipped(place: Place, where: str, monkeypatch: Any) -> None:
    scaler, optimizer = two_dtypes(place, fused=True)
    with monkeypatch.context() as patch:
        if where == "half-way":
            patch.setattr(torch, "_fused_sgd_", fail_on_second_call(torch._fused_sgd_))
        register = optimizer.register_step_pre_hook if where == "before" else optimizer.register_step_post_hook
        hook = register(raising)
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        hook.remove()
    divided = {"before": 0, "half-way": 1, "after": 2}[where]
    assert sorted(grads(optimizer)) == [2.0] * divided + [8.0] * (2 - divided)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    before = values(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    optimizer.grad_scale = torch.tensor(2.0, device=place.device)  # the user's, for this step only
    scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert values(optimizer) == before
    scaler.update()
    assert scaler.get_scale() == 4.0  # nothing overflowed: on other ranks the optimizer may not have raised
    if where == "before":
        backward(optimizer)
        scaler.step(optimizer)
        assert values(optimizer) == [-2.0, -2.0]


def test_what_was_found_before_does_not_outlive_a_failure_without_room_for_a_flag(monkeypatch: Any) -> None:
    scaler, optimizer = two_dtypes(Place("cpu", "torch"))
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(batch_ops, "unscale_batch_", fail_on_second_call(batch_ops.unscale_batch_))
        patch.setattr(torch, "ones", raising)
        with pytest.raises(MemoryError):
            scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    assert values(optimizer) == [0.0, 0.0]


class Asking(torch.optim.SGD):
    """A step that is passed the scaler, asks it for the flag, divides, and raises the first time."""

    _step_supports_amp_scaling = True
    calls = 0

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        if not sum(flag.item() for flag in grad_scaler._check_inf_per_device(self).values()):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad /= grad_scaler.get_scale()
            if self.calls == 1:
                raise MemoryError("in the optimizer")
            super().step()


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.parametrize("place", places(), ids=str)
def test_an_older_step_that_divides_and_raises_can_only_be_skipped(place: Place) -> None:
    scaler, fused = two_dtypes(place)
    optimizer = Asking(fused.param_groups[0]["params"], lr=1.0)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    scaler.step(optimizer)
    assert (optimizer.calls, values(optimizer)) == (1, [0.0, 0.0])
    scaler.update()
    backward(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-2.0, -2.0]


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_fused_step_that_could_not_begin_after_the_check_can_only_be_skipped(place: Place, monkeypatch: Any) -> None:
    scaler, optimizer = two_dtypes(place, fused=True)
    with monkeypatch.context() as patch:
        patch.setattr(lending, "lent", raising)
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
    scaler.step(optimizer)  # on other ranks, which have checked once, it is over
    assert (grads(optimizer), values(optimizer)) == ([8.0, 8.0], [0.0, 0.0])
    scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [-2.0, -2.0]


def interrupt_the_end(scaler: GradScaler, optimizer: Any) -> None:
    """Interrupt `unscale_` once all is divided: a look at the gradients is what is left to do then."""
    with mock.patch.object(states, "first_gradient", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        scaler.unscale_(optimizer)


def test_interrupted_once_all_is_divided() -> None:
    optimizer = sgd([torch.full((2,), 8.0)])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    interrupt_the_end(scaler, optimizer)
    scaler.step(optimizer)
    assert (grads(optimizer), values(optimizer)) == ([2.0], [-1.0])


@pytest.mark.usefixtures("two_ranks")
def test_interrupted_and_given_up() -> None:
    optimizer = sgd([torch.full((2,), math.inf)])
    scaler = started(ShardedGradScaler, "cpu", init_scale=4.0)
    interrupt_the_end(scaler, optimizer)
    optimizer.zero_grad()
    scaler.update()
    scaler.step(optimizer)  # on this rank there is no gradient to check: the flag is not that of the step before
    scaler.update()
    assert (scaler.get_scale(), scaler.stats().skipped) == (2.0, 1)


def test_an_override_that_raises_may_have_written_anything() -> None:
    class Own(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            raise KeyError("in the override")

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = started(Own, "cpu", init_scale=4.0)
    with pytest.raises(KeyError):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert parameter.item() == 0.0


def test_an_override_that_reached_us_with_a_bad_gradient_wrote_nothing() -> None:
    class Own(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            return super()._unscale_grads_(*args)

    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.ones(2, dtype=torch.complex64)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = started(Own, "cpu")
    with pytest.raises(NotImplementedError):
        scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def test_an_override_that_returns_flags_of_its_own_is_heard() -> None:
    class Own(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            super()._unscale_grads_(*args)
            return {torch.device("cpu"): torch.tensor([math.nan])}

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = started(Own, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [1.0]


def test_a_check_without_a_scale_leaves_no_trace() -> None:
    scaler, optimizer = GradScaler("cpu"), sgd([torch.ones(1)])
    for _ in range(2):
        with pytest.raises(AssertionError, match="Attempted _check_inf_per_device but _scale is None"):
            scaler._check_inf_per_device(optimizer)
        pickle.dumps(scaler)  # refused in the middle of a step


@pytest.mark.parametrize("devices", [["cuda:1", "cpu"], ["cpu", "cuda:1"], ["cuda:1"], []])
def test_a_rank_that_fails_without_a_scale_meets_the_others_where_theirs_is(devices: list[str]) -> None:
    """Offloaded parameters lie elsewhere, and another backend may serve that place."""
    scaler = GradScaler("cpu")
    assert scaler._home(map(torch.device, devices)) == torch.device("cpu")
    scaler._device = "cuda"
    assert scaler._home(map(torch.device, devices)).type == "cuda"
    assert scaler._home([torch.device("cpu"), torch.device("cuda:1")]) == torch.device("cuda:1")

"""Methods of torch's that a subclass or an object replaces: what they are given, and what becomes of what they do."""

import itertools
import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import flags, grads, sgd, started, values

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.core.overrides import overrides
from scaler_triton.core.step import Phase

CPU = torch.device("cpu")
SCALE = 4.0


def a_scaler(cls: type = GradScaler, **options: Any) -> Any:
    return started(cls, "cpu", init_scale=SCALE, **options)


def call(scaler: Any, how: str, optimizer: Any) -> None:
    """Call a method that checks."""
    getattr(scaler, how)(optimizer, *([1.0] if how == "clip_grad_norm_" else []))


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, StepGuard])
def test_our_own_classes_replace_nothing_and_a_subclass_or_object_what_it_defines(cls: Any) -> None:
    assert overrides(cls("cpu")) == frozenset()
    below = type("Below", (cls,), {"unscale_": lambda self, optimizer: None, "step": lambda self, optimizer: None})
    scaler = below("cpu")
    assert overrides(scaler) == {"unscale_"}
    scaler._maybe_opt_step = scaler.scale = None
    assert overrides(scaler) == {"unscale_", "_maybe_opt_step"}
    assert overrides(below("cpu")) == {"unscale_"}


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *itertools.product(["step", "clip_grad_norm_"], ["unscale_", "_unscale_grads_"]),
        ("step", "_check_inf_per_device"),
    ],
)
def test_a_method_that_is_replaced_on_the_class_or_on_the_object_is_called(how: str, name: str) -> None:
    own, on_object = mock.Mock(side_effect=getattr(GradScaler, name)), a_scaler()
    setattr(on_object, name, partial(own, on_object))
    for scaler in (a_scaler(type("Below", (GradScaler,), {name: lambda *args: own(*args)})), on_object):
        call(scaler, how, sgd([torch.full((1,), 8.0)], fused=name == "_check_inf_per_device"))
    assert own.call_count == 2


def test_flags_that_an_overridden_maybe_opt_step_writes_count() -> None:
    class Vetoes(GradScaler):
        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer_state["found_inf_per_device"][CPU] = torch.ones(())
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    scaler, optimizer = a_scaler(Vetoes), sgd([torch.tensor([8.0])])
    scaler.step(optimizer)
    scaler.update()
    assert (values(optimizer), scaler.get_scale()) == ([0.0], SCALE / 2)


# Overrides of `_unscale_grads_`


class Own(GradScaler):
    """Returns what `returns` says, having unscaled, and notes what it was called with."""

    returns: Any = None

    def _unscale_grads_(self, *args: Any) -> Any:
        self.given = args
        flags = super()._unscale_grads_(*args)
        return flags if self.returns is None else self.returns


def test_an_override_gets_torchs_four_arguments_by_position() -> None:
    scaler, optimizer = a_scaler(Own), sgd([torch.full((1,), 8.0)])
    scaler.unscale_(optimizer)
    _, inv_scale, found_inf, allow_fp16 = scaler.given
    assert scaler.given[0] is optimizer
    assert (inv_scale.item(), found_inf.item(), found_inf.shape, allow_fp16) == (0.25, 0.0, (), False)
    assert grads(optimizer) == [2.0]


@pytest.mark.parametrize("cls", [GradScaler, Own])
def test_a_report_names_the_gradients_that_an_override_found(cls: type) -> None:
    scaler, optimizer = a_scaler(cls), sgd([torch.full((2,), math.inf), torch.tensor([3e38])])
    scaler.step(optimizer)
    scaler.update()
    assert [(each.numel, each.name) for each in scaler.overflow_report().bad] == [(2, "optimizer 0, parameter 0")]


@pytest.mark.parametrize("cls", [GradScaler, Own])
def test_a_gradient_that_only_unscaling_makes_infinite_skips_nothing_and_is_named_with_others_at_most(cls: Any) -> None:
    scaler, optimizer = started(cls, "cpu", init_scale=0.5), sgd([torch.full((2,), math.inf), torch.tensor([3e38])])
    scaler.step(optimizer)
    scaler.update()
    assert 2 in [each.numel for each in scaler.overflow_report().bad]
    scaler, optimizer = started(cls, "cpu", init_scale=0.5), sgd([torch.tensor([3e38])])
    scaler.step(optimizer)
    assert (scaler.was_skipped(optimizer), values(optimizer)) == (False, [-math.inf])
    scaler.update()
    assert not scaler.overflow_report().bad


def test_a_guard_that_looks_for_spikes_judges_the_norm_whatever_is_overridden() -> None:
    class OwnGuard(StepGuard):
        def _unscale_grads_(self, *args: Any) -> Any:
            raise NotImplementedError

    guard, optimizer, skipped = OwnGuard("cpu", spike_sigma=3.0, window=4), sgd([torch.ones(2)]), []
    for size in (1.0, 1.1, 0.9, 1.0, 1000.0, math.inf, 1.0):
        optimizer.param_groups[0]["params"][0].grad.fill_(size)
        guard.step(optimizer)
        skipped.append(guard.was_skipped(optimizer))
    assert skipped == [False] * 4 + [True, True, False]


@pytest.mark.parametrize(("value", "found"), [(0.0, 0.0), (1.0, 1.0), (3.0, 1.0), (math.nan, 1.0)])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_flags_that_an_override_returns_count(value: float, found: float, shape: tuple[int, ...]) -> None:
    scaler, optimizer = a_scaler(Own), sgd([torch.ones(1)])
    scaler.returns = {CPU: torch.full(shape, value)}
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [found]


@pytest.mark.parametrize("set_before", [0.0, 1.0])
def test_a_flag_that_was_set_before_stays_set(set_before: float) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)])
    found = scaler._unscale_grads_(optimizer, torch.ones(()), torch.tensor(set_before))
    assert found[CPU].item() == set_before


def test_an_override_may_pass_a_flag_of_one_element_as_torchs_sharded_scaler_does() -> None:
    class Passes(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf.reshape(1), allow_fp16)

    scaler, optimizer = a_scaler(Passes), sgd([torch.tensor([math.inf])])
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [1.0]


@pytest.mark.parametrize("calls_ours", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_an_override_that_raises_may_have_written_unless_ours_refused(dtype: torch.dtype, calls_ours: bool) -> None:
    class Raises(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            if calls_ours:
                super()._unscale_grads_(*args)
            raise KeyError

    scaler, optimizer = a_scaler(Raises), sgd([torch.ones(1, dtype=dtype)])
    with pytest.raises((KeyError, NotImplementedError)):
        scaler.unscale_(optimizer)
    refused = dtype.is_complex and calls_ours
    assert scaler._ours.steps.open(optimizer).phase is (Phase.READY if refused else Phase.FAILED)


def test_an_override_that_raises_after_a_write_divides_no_second_time() -> None:
    class RaisesOnce(GradScaler):
        raised = False

        def _unscale_grads_(self, *args: Any) -> Any:
            flags = super()._unscale_grads_(*args)
            if not self.raised:
                self.raised = True
                raise KeyError
            return flags

    scaler, optimizer = a_scaler(RaisesOnce), sgd([torch.full((1,), 8.0)])
    with pytest.raises(KeyError):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert (grads(optimizer), values(optimizer), scaler.was_skipped(optimizer)) == ([2.0], [0.0], True)

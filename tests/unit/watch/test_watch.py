"""The observer itself: what it must not do to others."""

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import sgd, started, take_step

from scaler_triton import GradScaler, StepGuard
from scaler_triton.watch import notes, watch
from scaler_triton.watch.watch import Watch


def test_an_observer_that_fails_does_not_hide_an_error() -> None:
    scaler = started(GradScaler, "cpu")
    with (
        mock.patch.object(notes, "add_notes", side_effect=ZeroDivisionError),
        pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"),
    ):
        scaler.step(sgd([None]))


def test_a_steady_step_tells_nobody_anything() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), sgd([torch.ones(1)])
    for _ in range(3):
        take_step(scaler, optimizer, "step")
    events = [name for name, member in vars(Watch).items() if callable(member) and not name.startswith("_")]
    assert sorted(events) == ["met", "raising", "skipped"]
    with mock.patch.multiple(Watch, **dict.fromkeys(events, mock.Mock(side_effect=ZeroDivisionError))):
        for _ in range(5):
            take_step(scaler, optimizer, "step")
            take_step(scaler, optimizer, "unscale_")
            take_step(scaler, optimizer, "clip")


def test_an_error_of_the_watch_comes_before_a_write_and_the_call_may_be_repeated(monkeypatch: Any) -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((1,), 8.0)])
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "met", mock.Mock(side_effect=ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            scaler.unscale_(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.item() == 8.0
    take_step(scaler, optimizer, "unscale_")
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


@pytest.mark.parametrize("is_in_capture", [False, True])
@pytest.mark.parametrize(("cls", "divides"), [(GradScaler, True), (StepGuard, False)])
def test_what_is_looked_at_where_gradients_are_new(
    cls: Any, divides: bool, is_in_capture: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(watch, "is_captured", lambda scale: is_in_capture)
    called = []
    for module, names in {
        watch.optimizers: ["refuse_shared", "warn_of_fp16_state", "warn_of_unknown_scales"],
        watch.derived: ["divide", "wait_for_copies"],
        watch.after_skips: ["look_at_parameters"],
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    started(cls, "cpu").unscale_(sgd([torch.ones(1)]))
    of_division = ["refuse_shared", "warn_of_fp16_state", "warn_of_unknown_scales", "divide"] if divides else []
    assert called == ([] if is_in_capture else [*of_division, "wait_for_copies", "look_at_parameters"])

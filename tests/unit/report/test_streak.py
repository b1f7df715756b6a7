"""Skips in a row: one warning, a plain optimizer's at the 50th, a fused one's at the next look; no wait before it."""

import math
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, sgd
from torch import nn

from scaler_triton import GradScaler, ScalerWarning, SkipStreakError, StepGuard
from scaler_triton.core.update import Counters
from scaler_triton.report import streak
from scaler_triton.report.streak import Streaks

CPU = Place("cpu", "torch")
KINDS = pytest.mark.parametrize("cls", [GradScaler, StepGuard])


class Run:
    """A scaler or a guard, and optimizers whose gradients are as said: "x" is infinite."""

    def __init__(self, cls: Any, place: Place = CPU, *, fused: bool = False, **options: Any) -> None:
        self.scaler = cls(place.device, backend=place.backend, **options)
        self.scaler.scale(torch.ones((), device=place.device))
        self.optimizers = [sgd([torch.ones(1)], place.device, fused=fused) for _ in range(2)]

    def step(self, bad: str, which: int = 0) -> list[str]:
        """Take steps; return what was warned of, after the number of the step, from 1."""
        said = []
        for number, each in enumerate(bad, 1):
            (parameter,) = self.optimizers[which].param_groups[0]["params"]
            parameter.grad = torch.full_like(parameter, math.inf if each == "x" else 1.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.scaler.step(self.optimizers[which])
                self.scaler.update()
            said += [f"{number}: {each.message}" for each in caught]
            assert all(each.filename == __file__ for each in caught)
        return said


@PLACES
@KINDS
def test_a_plain_optimizers_fiftieth_skip_in_a_row_is_warned_of_once(cls: Any, place: Place) -> None:
    run = Run(cls, place)
    assert run.step("x" * 49 + "." + "x" * 49 + ".") == []
    (text,) = run.step("x" * 120)
    scale = f"; the scale is {2.0**-126}" if cls is GradScaler else ""
    is_marked = place.device == "cpu" or place.backend == "triton"  # torch's op on a GPU leaves no marks
    named = (
        "1 of 1 gradients: overflow_report(model) names them."
        if is_marked
        else "The last skip: nothing known on any rank."
    )
    assert text == (
        f"50: [ST09] 50 steps of SGD in a row were skipped{scale}. {named} "
        "Set max_consecutive_skips to end such a run with SkipStreakError."
    )
    assert [each[:3] for each in run.step("." + "x" * 60)] == ["51:"]  # another streak


@KINDS
def test_a_fused_optimizer_looks_every_64th_step_at_what_the_updates_counted(cls: Any) -> None:
    run = Run(cls, fused=True)
    assert run.step("." * 20 + "x" * 43) == []
    (text,) = run.step("x" * 150)  # the 64th step sees 43, the 128th 107
    scale = "; the scale is " if cls is GradScaler else ". "
    # A guard's last update comes with the step that looks.
    assert text.startswith(f"65: [ST09] 107 updates in a row were skipped, the last one update 127{scale}")
    assert "1 of 1 gradients" in text
    assert text.endswith("Set max_consecutive_skips to end such a run with SkipStreakError.")
    assert run.step("." + "x" * 50 + "." * 10) == []  # over before a look
    assert len(run.step("x" * 128)) == 1


def test_one_of_two_optimizers_that_never_steps_is_noticed() -> None:
    """Its skips are no streak of updates, as the other one's steps come in between."""
    run, said = Run(GradScaler), []
    for _ in range(60):
        said += run.step("x", 0) + run.step(".", 1)
    assert [each[:44] for each in said] == ["1: [ST09] 50 steps of SGD in a row were skip"]
    assert run.scaler.stats().consecutive_skips == 0


def test_the_warning_tells_names_and_limit() -> None:
    run = Run(StepGuard, max_consecutive_skips=99)
    run.step("x")
    model = nn.Module()
    model.weight = run.optimizers[0].param_groups[0]["params"][0]
    run.scaler.overflow_report(model)
    (text,) = run.step("x" * 49)
    assert text == (
        "49: [ST09] 50 steps of SGD in a row were skipped. Only weight: overflow there. "
        "After more than max_consecutive_skips=99 in a row, SkipStreakError ends the run."
    )


def test_the_error_at_the_limit_tells_of_a_scale_if_there_is_one() -> None:
    for cls, late in ((GradScaler, "late; by now the scale is 256.0"), (StepGuard, "late")):
        run = Run(cls, max_consecutive_skips=3)
        with pytest.raises(SkipStreakError, match=rf"max_consecutive_skips=3 \(raised 4 updates {late}\)"):
            run.step("x" * 9)


def test_spikes_are_told_as_such() -> None:
    run = Run(StepGuard, spike_sigma=0.01, window=2)
    for size in (1.0, 1.0):
        run.optimizers[0].param_groups[0]["params"][0].grad = torch.full((1,), size)
        run.scaler.step(run.optimizers[0])
    run.optimizers[0].param_groups[0]["params"][0].grad.fill_(1e20)
    for _ in range(49):
        run.scaler.step(run.optimizers[0])
    with pytest.warns(UserWarning, match=r"were skipped\. The last skip: spike: norm 1e\+20, limit 1"):
        run.scaler.step(run.optimizers[0])


def test_it_is_told_even_if_nothing_else_can_be_and_as_an_error_leaves_a_skipped_step() -> None:
    run = Run(GradScaler)
    run.step("x" * 49)
    run.optimizers[0].param_groups[0]["params"][0].grad = torch.full((1,), math.inf)
    text = r"^\[ST09\] 50 steps of SGD in a row were skipped; the scale is [^ ]+\. Set max_consecutive_skips"
    run.scaler._ours.streaks._report = mock.Mock(side_effect=RuntimeError)
    with pytest.raises(ScalerWarning, match=text):  # as tests take warnings
        run.scaler.step(run.optimizers[0])
    assert run.optimizers[0].param_groups[0]["params"][0].item() == 0.0
    run.scaler.update()
    assert run.step("xx") == []


@pytest.mark.parametrize("is_fused", [False, True])
def test_after_a_checkpoint_a_streak_begins_anew(is_fused: bool) -> None:
    run = Run(GradScaler, fused=is_fused)
    saved = run.scaler.state_dict()
    assert len(run.step("x" * 128)) == 1
    run.scaler.load_state_dict(saved)
    assert len(run.step("x" * 128)) == 1


def test_copied_steps_go_on_with_their_streak() -> None:
    run = Run(GradScaler)
    run.step("x" * 49)
    run.scaler._per_optimizer_states = {}
    assert [each[:3] for each in run.step("x" * 3)] == ["1: "]


def test_a_look_waits_for_nothing_and_none_is_taken_in_a_capture(monkeypatch: Any) -> None:
    run = Run(GradScaler, fused=True)
    run.step("x" * 50)
    monkeypatch.setattr(streak, "is_captured", lambda scale: True)
    look = partial(run.scaler._ours.streaks.look, run.scaler._scale)
    look()
    monkeypatch.setattr(streak, "is_captured", lambda scale: False)
    with pytest.warns(UserWarning, match="50 updates in a row were skipped, the last one update 50"):
        look()
    run.step(".")
    monkeypatch.setattr(Counters, "read", mock.Mock(side_effect=AssertionError))
    assert run.step("." * 66) == []


def test_a_good_step_looks_one_time_in_64() -> None:
    run = Run(GradScaler, fused=True)
    with mock.patch.object(Streaks, "look") as look:
        run.step("." * 640)
    assert look.call_count == 10


def test_a_cause_that_was_warned_of_is_named_again() -> None:
    run = Run(GradScaler, max_consecutive_skips=3)
    run.scaler._ours.checks.warned.update({"ST03", "ST05"})  # the first makes no streak
    with pytest.raises(SkipStreakError, match=r" It was warned of the cause: ST05\.$"):
        run.step("x" * 9)
    run = Run(GradScaler)
    run.scaler._ours.checks.warned.add("ST06")
    (text,) = run.step("x" * 50)
    assert " It was warned of the cause: ST06. Set max_consecutive_skips" in text

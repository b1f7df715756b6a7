"""Counters, limits and the limit of skips on a GPU: no step waits, and a replayed graph counts and obeys setters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import parameters, started, waits_raise
from scaler_triton.stats import Lagging
from test_capture import CAPTURABLE, Run, assert_equal_runs

from scaler_triton import GradScaler, ScalerStats, SkipStreakError

pytestmark = [pytest.mark.gpu, CAPTURABLE]

BACKENDS = pytest.mark.parametrize("backend", ["triton", "torch"])


def trained(scaler: Any, steps: int, bad: set[int], *, quiet_from: int) -> Any:
    """Return a fused optimizer after `steps` steps, those from `quiet_from` on without a wait for the device."""
    (parameter,) = parameters([torch.ones(8)], "cuda")
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    gradients = [torch.full((8,), math.inf if step in bad else 1.0, device="cuda") for step in range(steps)]
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient
        with waits_raise() if step >= quiet_from else torch.enable_grad():
            scaler.step(optimizer)
            scaler.update()
            scaler.stats(wait=False)
    return optimizer


@BACKENDS
def test_counting_and_watching_a_streak_never_wait(backend: str) -> None:
    scaler = started(
        GradScaler, "cuda", backend=backend, hysteresis=2, min_scale=1.0, max_scale=2.0**30, max_consecutive_skips=50
    )
    optimizer = trained(scaler, 24, {5, 6, 23}, quiet_from=2 + Lagging.LAG)
    assert scaler.stats() == ScalerStats(24, 3, 1, 0, 2, 24)
    assert scaler.was_skipped(optimizer)
    for _ in range(2):  # the first call may take an older copy, and starts the one that the second takes
        torch.cuda.synchronize()
        newest = scaler.stats(wait=False)
    assert newest == scaler.stats()


@BACKENDS
def test_a_streak_raises_a_fixed_lag_later(backend: str) -> None:
    scaler = started(GradScaler, "cuda", backend=backend, max_consecutive_skips=1)
    with pytest.raises(SkipStreakError, match="^2 consecutive skips, more"):
        trained(scaler, 20, {3, 4}, quiet_from=20)
    assert scaler.stats().updates == 5 + Lagging.LAG


def captured(**settings: Any) -> tuple[Run, Run, Any]:
    runs = Run(), Run()
    for run in runs:
        for name, value in settings.items():
            getattr(run.scaler, f"set_{name}")(value)
    replay = runs[1].captured()
    for step in range(3):
        runs[0].load(step)
        runs[0].step()
    return *runs, replay


def test_a_replayed_graph_counts_and_tells_of_its_last_step() -> None:
    eager, graphed, replay = captured()
    for step in range(3, 45):
        assert_equal_runs(eager, graphed, replay, range(step, step + 1))
        assert graphed.scaler.stats() == eager.scaler.stats()
        assert graphed.scaler.was_skipped(graphed.optimizer) is eager.scaler.was_skipped(eager.optimizer)


def test_limits_set_later_take_effect_under_replay() -> None:
    eager, graphed, replay = captured(hysteresis=2)
    assert_equal_runs(eager, graphed, replay, range(3, 12))
    for run in (eager, graphed):
        run.scaler.set_hysteresis(3)
        run.scaler.set_consecutive_hysteresis(True)
        run.scaler.set_max_scale(2.0**11)
        run.scaler.set_min_scale(2.0**9)
    assert_equal_runs(eager, graphed, replay, range(35, 100))
    assert graphed.scaler.stats() == eager.scaler.stats()


def test_a_checkpoint_loaded_under_replay_is_counted_on() -> None:
    eager, graphed, replay = captured(hysteresis=2)
    saved = eager.scaler.state_dict()
    assert_equal_runs(eager, graphed, replay, range(3, 12))
    for run in (eager, graphed):
        run.scaler.load_state_dict(saved)
    assert_equal_runs(eager, graphed, replay, range(38, 60))
    assert graphed.scaler.stats() == eager.scaler.stats()

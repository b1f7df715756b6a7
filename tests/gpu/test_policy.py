"""Counters, limits and the limit of skips on a GPU: no step waits for them. Under replay: `test_capture.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import parameters, started, waits_raise

from scaler_triton import GradScaler, ScalerStats, SkipStreakError
from scaler_triton.update import LaggingCounters

pytestmark = pytest.mark.gpu

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
    limits = {"hysteresis": 2, "min_scale": 1.0, "max_scale": 2.0**30, "max_consecutive_skips": 50}
    scaler = started(GradScaler, "cuda", backend=backend, **limits)
    optimizer = trained(scaler, 24, {5, 6, 23}, quiet_from=2 + LaggingCounters.LAG)
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
    assert scaler.stats().updates == 5 + LaggingCounters.LAG

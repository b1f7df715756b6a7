"""Counters, limits and the limit of skips on a GPU: no step waits for them. Under replay: `test_capture.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_same, parameters, started, waits_raise

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


@BACKENDS
@pytest.mark.parametrize("limits", [{}, {"hysteresis": 2}, {"min_scale": 3.0, "max_scale": 100.0}])
def test_the_rule_is_that_of_the_cpu(limits: dict[str, Any], backend: str) -> None:
    """Bounds, growth in fp64, setters and scales that were written by hand, step by step beside a scaler on the CPU."""
    scalers = [started(GradScaler, device, init_scale=16.0, growth_interval=3, **limits) for device in ("cuda", "cpu")]
    scalers[0]._ours.steps.requested = backend
    optimizers = [torch.optim.SGD(parameters([torch.ones(2)], device), lr=0.0) for device in ("cuda", "cpu")]
    acts = {
        8: lambda each: each.set_growth_factor(1.1),
        13: lambda each: each._scale.fill_(math.inf),
        18: lambda each: each.update(48.0),
        23: lambda each: each.load_state_dict({**each.state_dict(), "_growth_tracker": 2, "backoff_factor": 0.3}),
        28: lambda each: each._scale.fill_(math.nan),
    }
    for step in range(40):
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            acts.get(step, lambda each: None)(scaler)
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad.fill_(math.nan if step in (2, 5, 6, 19, 30, 31, 32) else 1.0)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert_same(scalers[0]._scale.cpu(), scalers[1]._scale)
        assert scalers[0]._growth_tracker.item() == scalers[1]._growth_tracker.item()
        assert scalers[0].stats() == scalers[1].stats()

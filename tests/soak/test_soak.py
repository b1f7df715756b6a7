"""A long run leaves nothing behind: memory, tensors and plans stay flat, and the scale is what the rule says."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import Place, places
from torch import nn

from scaler_triton import GradScaler

OVERFLOWS = 0.01
INIT_SCALE, INTERVAL = 2.0**10, 50
SAMPLES = 20
# RSS counts whole pages and the allocator keeps some in reserve; one fp32 scalar leaked a step (a Tensor object and
# its storage: over 500 bytes) would be 9 MiB over the long run's 18,000 steps after warm-up.
RSS_BOUND = 2 << 20
CUDA_RSS_BOUND = 16 << 20  # the driver's own memory counts, too, and grows by pools


@pytest.fixture(autouse=True, scope="module")
def only_new_objects() -> Iterator[None]:
    """Have the collector pass over what was there before these tests: a sample then takes no time."""
    gc.freeze()
    for fused in (False, True):
        soak(Place("cpu", "torch"), SAMPLES, fused)  # torch imports more of itself at the first step
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def reference_scales(bad: list[bool]) -> list[float]:
    """Return the scale after each step, by the rule."""
    scale, good, scales = INIT_SCALE, 0, []
    for overflow in bad:
        good = 0 if overflow else good + 1
        scale *= 0.5 if overflow else 2.0 if good == INTERVAL else 1.0
        good %= INTERVAL
        scales.append(scale)
    return scales


def host_bytes() -> int:
    """Return what this process holds of the host's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@dataclass
class Samples:
    """What a run held at equal distances."""

    host: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    plans: list[tuple[int, int, int, int]] = field(default_factory=list)
    states: list[tuple[int, int, int]] = field(default_factory=list)

    def take(self, scaler: Any, optimizer: Any) -> None:
        """Measure, after a collection."""
        gc.collect()
        plan = scaler._records.plan(optimizer)
        self.host.append(host_bytes())
        self.device.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
        self.tensors.append(live_tensors())
        tables = sum(len(layout.tables) for layout in plan.layouts)
        self.plans.append((len(scaler._records.plans()), plan.rebuilds, len(plan.layouts), tables))
        kept = (scaler._per_optimizer_states, scaler._records._records, scaler._lagging._taken)
        self.states.append(tuple(map(len, kept)))

    def assert_flat(self, bound: int) -> None:
        """Assert that nothing grew after warm-up, the first tenth of the run."""
        warm = len(self.host) // 10
        assert max(self.host[warm:]) - self.host[warm] <= bound, self.host
        for name in ("device", "tensors", "plans", "states"):
            held = getattr(self, name)[warm:]
            assert held == held[:1] * len(held), (name, held)


def another_steps(scaler: Any, device: str) -> None:
    """Step an optimizer that is gone afterwards."""
    parameter = nn.Parameter(torch.zeros(3, device=device))
    parameter.grad = torch.ones_like(parameter)
    scaler.step(torch.optim.SGD([parameter], lr=0.1))


def soak(place: Place, steps: int, fused: bool, busy: bool = False) -> tuple[Samples, list[float], list[bool]]:
    """Train a tiny model; the samples, the scale after every step, and which steps were to overflow.

    Args:
        busy: clip, have other optimizers come and go, limit the skips in a row, and read what the scaler tells.
    """
    torch.manual_seed(0)
    draw = random.Random(0)
    bad = [draw.random() < OVERFLOWS for _ in range(steps)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused)
    numbers = {"init_scale": INIT_SCALE, "growth_interval": INTERVAL}
    scaler = GradScaler(place.device, **numbers, backend=place.backend, max_consecutive_skips=steps if busy else None)
    inputs, scales, samples = torch.ones(3, 4, device=place.device), [], Samples()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scaler.scale(model(inputs).square().mean() * 1e-3 * (torch.inf if bad[step] else 1.0)).backward()
        if step % 3 == 0:
            scaler.clip_grad_norm_(optimizer, 1e-3) if busy else scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if busy:
            another_steps(scaler, place.device)
        scaler.update()
        if busy:
            assert scaler.was_skipped(optimizer) == bad[step]
            assert scaler.stats(wait=False).updates <= step + 1
        scales.append(scaler.get_scale())
        if (step + 1) % (steps // SAMPLES) == 0:
            samples.take(scaler, optimizer)
    return samples, scales, bad


def assert_soaks(place: Place, steps: int, fused: bool, bound: int = RSS_BOUND, busy: bool = False) -> None:
    samples, scales, bad = soak(place, steps, fused, busy)
    assert scales == reference_scales(bad)
    assert 0 < sum(bad) < steps / 20
    samples.assert_flat(bound)


@pytest.mark.parametrize("fused", [False, True])
def test_500_steps(fused: bool) -> None:
    assert_soaks(Place("cpu", "torch"), 500, fused)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_20000_steps(fused: bool) -> None:
    assert_soaks(Place("cpu", "torch"), 20_000, fused)


@pytest.mark.parametrize("steps", [60, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_steps_of_a_busy_loop(place: Place, fused: bool, steps: int) -> None:
    """Clipping, optimizers that come and go, limits and readers; without a GPU also by the interpreted kernels."""
    assert_soaks(place, steps, fused, CUDA_RSS_BOUND if place.device == "cuda" else RSS_BOUND, busy=True)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_steps_on_a_gpu(backend: str, fused: bool, steps: int) -> None:
    """Device memory too: what torch has allocated is the same number of bytes at every sample."""
    assert_soaks(Place("cuda", backend), steps, fused, CUDA_RSS_BOUND)


def optimizers_come_and_go(scaler: Any, rounds: int) -> list[tuple[int, int]]:
    """Return live tensors and plans after each round of a new model and optimizer under one scaler."""
    held = []
    for _ in range(rounds):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        del model, optimizer
        gc.collect()
        held.append((live_tensors(), len(scaler._records.plans())))
    return held


def test_optimizers_that_come_and_go_leave_nothing() -> None:
    held = optimizers_come_and_go(GradScaler("cpu"), 20)
    assert held[1:] == [held[1]] * 19
    assert held[-1][1] == 0

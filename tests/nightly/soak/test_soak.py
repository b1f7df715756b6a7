"""A long run leaves nothing behind: memory, tensors and plans stay flat, and every update is counted."""

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Place, places, sgd
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


def sample(scaler: Any, optimizer: Any) -> tuple[int, dict[str, int]]:
    """Return what this process holds of the host's memory, and what must stay the same, after a collection."""
    gc.collect()
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    ours = scaler._ours
    plan = ours.steps.last(optimizer).plan
    return held, {
        "bytes on the device": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "steps": len(ours.steps),
        "layouts": len(plan.layouts),
        "identity of the layouts": id(plan.layouts),  # which are built anew for gradients of a new form
        "tables": sum(len(layout.tables) for layout in plan.layouts),
        "free rows": sum(len(each._free) for each in ours.rows.values()),
    }


def soak(place: Place, steps: int, fused: bool, busy: bool = False) -> list[Any]:
    """Train a tiny model; return samples.

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
    inputs, samples = torch.ones(3, 4, device=place.device), []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scaler.scale(model(inputs).square().mean() * 1e-3 * (torch.inf if bad[step] else 1.0)).backward()
        if step % 3 == 0:
            scaler.clip_grad_norm_(optimizer, 1e-3) if busy else scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if busy:  # another one steps, which is gone afterwards
            scaler.step(sgd([torch.ones(3)], place.device))
        scaler.update()
        if busy:
            assert scaler.was_skipped(optimizer) == bad[step]
            assert scaler.stats(wait=False).updates <= step + 1
            assert (len(scaler.overflow_report().bad) > 0) == any(bad[: step + 1])
        if (step + 1) % (steps // SAMPLES) == 0:
            samples.append(sample(scaler, optimizer))
    stats = scaler.stats()
    assert (stats.updates, stats.skipped) == (steps, sum(bad))
    assert scaler.get_scale() == INIT_SCALE * 2.0 ** (stats.growths - stats.backoffs)
    return samples


def assert_soaks(place: Place, steps: int, fused: bool, busy: bool = False) -> None:
    """Assert that nothing grows after warm-up, the first tenth of the run."""
    host, held = zip(*soak(place, steps, fused, busy)[SAMPLES // 10 :], strict=True)
    assert max(host) - host[0] <= (CUDA_RSS_BOUND if place.device == "cuda" else RSS_BOUND), host
    assert list(held) == [held[0]] * len(held)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", [place for place in places() if str(place) != "cpu-triton"], ids=str)
def test_20000_steps(place: Place, fused: bool) -> None:
    """On a GPU device memory, too: what torch has allocated is the same number of bytes at every sample."""
    assert_soaks(place, 20_000, fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_1000_steps_of_a_busy_loop(place: Place, fused: bool) -> None:
    """Clipping, optimizers that come and go, limits and readers; without a GPU also by the interpreted kernels."""
    assert_soaks(place, 1_000, fused, busy=True)

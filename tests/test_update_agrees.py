"""The kernel and the torch paths give the same scale, tracker and counters, whatever was in them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import Place, assert_same, places
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scaler_triton.limits import NO_LIMITS, Limits
from scaler_triton.stats import NAMES, Counters
from torch import Tensor

from scaler_triton import ops, policy, reference_update

FLAGS = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])
SCALES = st.one_of(st.floats(width=32), st.sampled_from([2.0**-126, 2.0**127, 1e-45, 0.0, 65536.0]))
TRITON = pytest.mark.parametrize("place", [p for p in places() if p.backend == "triton"], ids=str)
Numbers = tuple[float, float, int]


@TRITON
@given(SCALES, st.integers(0, 9), FLAGS, st.floats(1.0, 4.0), st.floats(0.01, 1.0), st.integers(1, 9))
@example(math.nan, 0, 1.0, 2.0, 0.5, 1)
@example(2.0**-126, 3, 1.0, 2.0, 0.5, 1)
@example(1e-45, 0, 0.0, 2.0, 0.5, 9)
@example(3e38, 8, 0.0, 4.0, 0.5, 2)
@example(2.0**127, 0, 0.0, 2 - 2.0**-24, 0.5, 1)  # the least product that rounds to infinity
@settings(max_examples=200, deadline=None)
def test_update_is_the_same_on_every_backend(
    place: Place, scale: float, tracker: int, flag: float, growth: float, backoff: float, interval: int
) -> None:
    results = []
    for backend in (place.backend, "torch"):
        state = (
            torch.tensor(scale, device=place.device),
            torch.tensor(tracker, dtype=torch.int32, device=place.device),
        )
        found_inf = torch.tensor(flag, device=place.device)
        ops.update_scale_(*state, found_inf, growth, backoff, interval, backend=backend)
        results.append(state)
    assert_same(results[0][0], results[1][0])
    assert results[0][1].item() == results[1][1].item()
    assert 2.0**-126 <= results[0][0].item() <= torch.finfo(torch.float32).max


def with_triton(scale: Tensor, tracker: Tensor, flag: Tensor, numbers: Numbers, limits: Limits, held: Counters) -> None:
    from scaler_triton.kernels.update_scale import DevicePolicy, launch_update_rows

    on_device = DevicePolicy(scale.device).hold(*numbers, *limits[:-1])
    launch_update_rows(scale, tracker, flag, on_device, held.on(scale.device), 1, clear=False)


def on_host(scale: Tensor, tracker: Tensor, flag: Tensor, numbers: Numbers, limits: Limits, held: Counters) -> None:
    reference_update.update_scale_(scale, tracker, flag, *numbers, limits, held)


def on_device(scale: Tensor, tracker: Tensor, flag: Tensor, numbers: Numbers, limits: Limits, held: Counters) -> None:
    """What devices without kernels of ours run; here on the CPU."""
    reference_update.update_on_device_(scale, tracker, flag, numbers, limits, held.on(scale.device))


@pytest.mark.parametrize("interval", [2**31, 2**32 + 3, 10**12])
def test_an_interval_beyond_a_gpus_int_is_never_reached(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernel takes it modulo 2^32, the CPU's as it is."""
    update = torch._amp_update_scale_

    def on_cuda(*args: object) -> Tensor:
        *others, given = args
        return update(*others, (given + 2**31) % 2**32 - 2**31)

    monkeypatch.setattr(torch, "_amp_update_scale_", on_cuda)
    scale, tracker, held = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32), Counters()
    for done in (1, 2, 3, 4):
        on_device(scale, tracker, torch.tensor(0.0), (2.0, 0.5, interval), NO_LIMITS, held)
        assert (scale.item(), tracker.item()) == (4.0, done)
    tracker.fill_(policy.MAX_TRACKER)
    on_device(scale, tracker, torch.tensor(0.0), (2.0, 0.5, interval), NO_LIMITS, held)
    assert (scale.item(), tracker.item()) == (4.0, policy.MAX_TRACKER)


@st.composite
def limits_of(draw: st.DrawFn) -> Limits:
    bounds = st.one_of(st.floats(2.0**-126, policy.MAX_SCALE, width=32), st.sampled_from([1.0, 4096.0, 65536.0]))
    low, high = sorted((draw(bounds), draw(bounds)))
    if draw(st.booleans()):
        low, high = policy.MIN_SCALE, policy.MAX_SCALE
    return Limits(low, high, draw(st.integers(1, 4)), draw(st.booleans()))


FEW_FLAGS = st.lists(st.sampled_from([0.0, 0.0, 1.0, math.nan]), min_size=1, max_size=12)
NUMBERS = st.tuples(st.floats(1.0, 4.0), st.floats(0.01, 1.0), st.integers(1, 4))


@TRITON
@given(SCALES, FEW_FLAGS, NUMBERS, limits_of(), st.sampled_from([(), (1,)]))
@example(65536.0, [1.0] * 4 + [0.0] * 4, (2.0, 0.5, 2), Limits(1.0, 65536.0, 3, False), ())
@example(65536.0, [1.0, 0.0, 1.0, 1.0], (2.0, 0.5, 2), Limits(1.0, 65536.0, 2, True), ())
@example(policy.MAX_SCALE, [0.0, 0.0], (1 + 2.0**-26, 0.5, 1), Limits(), ())  # the product rounds back: no growth
@example(math.nan, [0.0, 1.0, 1.0], (2.0, 0.5, 1), Limits(hysteresis=2), (1,))
@settings(max_examples=100, deadline=None)
def test_a_run_is_counted_and_limited_the_same_on_every_path(
    place: Place, scale: float, flags: list[float], numbers: Numbers, limits: Limits, shape: tuple[int, ...]
) -> None:
    paths = ((place.device, with_triton), ("cpu", on_host), (place.device, on_device), ("cpu", on_device))
    runs = [run(device, update, scale, flags, numbers, limits, shape) for device, update in paths]
    for trace in runs[1:]:
        for (mine, *rest), (theirs, *others) in zip(runs[0], trace, strict=True):
            assert_same(mine, theirs)
            assert rest == others
    for values, _, counts in runs[0]:
        assert limits.min_scale <= values.item() <= limits.max_scale
        assert counts["updates"] >= counts["skipped"] >= counts["consecutive_skips"]


def run(
    device: str,
    update: Callable[..., None],
    scale: float,
    flags: list[float],
    numbers: Numbers,
    limits: Limits,
    shape: tuple[int, ...],
) -> list[tuple[Tensor, int, dict[str, int]]]:
    """Return scale, tracker and counters after every update."""
    scales = torch.full(shape, scale, device=device)
    tracker = torch.zeros(shape, dtype=torch.int32, device=device)
    counters, trace = Counters(), []
    for flag in flags:
        update(scales, tracker, torch.tensor(flag, device=device), numbers, limits, counters)
        counts = dict(zip(NAMES, counters.read(), strict=True))
        trace.append((scales.reshape(()).cpu().clone(), int(tracker.item()), counts))
    return trace

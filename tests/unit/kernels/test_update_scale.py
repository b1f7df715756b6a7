"""The one launch that updates the scale: torch's op to the bit where torch is right; bounds, hysteresis, counters."""

import math
import random

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, assert_same, launched

from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import MAX_SCALE, MIN_SCALE
from scaler_triton.kernels.update_scale import launch_update

GUARD = -7


class Run:
    """A scale, its tracker and its counters, every buffer guarded, moved by one launch a step."""

    def __init__(
        self, scale=64.0, tracker=0, growth=2.0, backoff=0.5, interval=3, low=MIN_SCALE, high=MAX_SCALE, hysteresis=1
    ):
        self.scales = torch.tensor([NAN, scale, NAN]).to(DEVICE)
        self.trackers = torch.tensor([GUARD, tracker, GUARD], dtype=torch.int32).to(DEVICE)
        self.counters = torch.tensor([GUARD, *[0] * abi.COUNTERS, GUARD]).to(DEVICE)
        numbers = [growth, backoff, interval, low, high, hysteresis]
        self.policy = torch.tensor(numbers, dtype=torch.float64).to(DEVICE)

    def update(self, flags, rows=1, *, last_flags=None, clear=False):
        """One launch; whatever lies around what it may write must be as it was."""
        with launched("_update_scale_kernel"):
            launch_update(
                self.scales[1],
                self.trackers[1],
                flags,
                flags if last_flags is None else last_flags,
                self.policy,
                self.counters[1:-1],
                rows,
                clear=clear,
            )
        assert self.scales[::2].isnan().all()
        assert self.trackers[::2].tolist() == self.counters[[0, -1]].tolist() == [GUARD] * 2
        return self.scales[1].item()

    def step(self, flag):
        """The scale after one step by one flag, which must stay as it was."""
        flags = torch.tensor([NAN, float(flag), NAN])
        on_device = flags.to(DEVICE)
        scale = self.update(on_device[1])
        assert_same(on_device, flags)
        return scale

    def steps(self, flags):
        return [self.step(flag) for flag in flags]

    def counted(self, which):
        return self.counters[1 + which].item()


def update(scale, tracker, found_inf, growth=2.0, backoff=0.5, interval=2000):
    """Scale and tracker after one launch without limits."""
    run = Run(scale, tracker, growth, backoff, interval)
    run.step(found_inf)
    return run.scales[1].cpu(), run.trackers[1].item()


def assert_is_torchs(*state_and_numbers):
    """The scale is what torch's op makes of it, and so is the tracker, which are returned."""
    scale, tracker, found_inf, *numbers = state_and_numbers
    want, want_tracker = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(want, want_tracker, torch.tensor(found_inf), *numbers)
    after, tracker = update(*state_and_numbers)
    assert_same(after, want)
    assert tracker == want_tracker.item(), state_and_numbers
    return after, tracker


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_are_torchs(seed):
    rng = random.Random(seed)
    for _ in range(40):
        scale, interval = math.ldexp(rng.uniform(1, 2), rng.randint(-120, 127)), rng.randint(1, 4)
        growth = rng.choice([2.0, 1.0, 1.1, 1.001, 3.3, rng.uniform(1, 4)])
        backoff = rng.choice([0.5, 1.0, 0.9, 1 / 3, 0.1, rng.uniform(0.1, 1)])
        tracker = rng.randrange(interval)  # torch asks for ==, so beyond it torch is wrong
        assert_is_torchs(scale, tracker, rng.choice([0.0, 0.0, 0.0, 1.0]), growth, backoff, interval)


@pytest.mark.parametrize("flag", [1.0, NAN, INF, -1.0, 2.0**-149])
def test_any_flag_but_zero_is_bad(flag):
    scale, tracker = update(8.0, 3, flag, interval=4)
    assert (scale.item(), tracker) == (4.0, 0)


@pytest.mark.parametrize(
    ("scale", "backoff", "want"),
    [
        (MIN_SCALE, 0.5, MIN_SCALE),
        (2 * MIN_SCALE, 0.5, MIN_SCALE),
        (2 * MIN_SCALE, 0.4, MIN_SCALE),
        (MIN_SCALE, 1.0, MIN_SCALE),
        (2.0**-149, 0.5, MIN_SCALE),
        (0.0, 0.5, MIN_SCALE),
        (-4.0, 0.5, MIN_SCALE),
        (NAN, 0.5, MIN_SCALE),
        (INF, 0.5, MAX_SCALE),
        (MAX_SCALE, 1.0, MAX_SCALE),
    ],
)
def test_backoff_stays_where_the_inverse_is_finite(scale, backoff, want):
    assert_same(update(scale, 3, 1.0, backoff=backoff)[0], torch.tensor(want))


@pytest.mark.parametrize(
    ("scale", "growth", "want"),
    [
        (2.0**127, 2.0, 2.0**127),
        (2.0**126, 2.0, 2.0**127),
        (MAX_SCALE, 1.0, MAX_SCALE),
        (MAX_SCALE, 1 + 2.0**-26, MAX_SCALE),  # rounds back to the same number
        (MAX_SCALE, 1 + 2.0**-24, MAX_SCALE),  # rounds to infinity
        (2.0**127, 2 - 2.0**-24, 2.0**127),
        (2.0**127, 2 - 2.0**-23, MAX_SCALE),
        (1.0, 1e300, 1.0),
    ],
)
def test_growth_that_would_not_be_finite_is_not_taken(scale, growth, want):
    after, tracker = assert_is_torchs(scale, 6, 0.0, growth, 0.5, 7)
    assert_same(after, torch.tensor(want))
    assert tracker == 0


def test_hysteresis_waits_for_the_last_overflow_and_only_growth_refills_it():
    want = [64, 64, 32, 32, 16, 16, 16, 32, 32, 32, 16]
    assert Run(hysteresis=3).steps([1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1]) == want


@pytest.mark.parametrize("rows", [0b10110, 1 << 31, (1 << 32) - 1, 0])
def test_only_the_flags_that_count_are_read_cleared_and_kept(rows):
    before = torch.arange(float(abi.ROWS * abi.STATUS)).view(abi.ROWS, abi.STATUS) % 3
    flags, last_flags = before.to(DEVICE, copy=True), torch.full((abi.ROWS + 2,), NAN).to(DEVICE)
    run = Run()
    run.update(flags, rows, last_flags=last_flags[1:-1], clear=True)

    chosen = [rows >> row & 1 for row in range(abi.ROWS)]
    bad = any(before[row, abi.FLAG] for row in range(abi.ROWS) if chosen[row])
    assert run.counted(abi.SKIPPED) == bad
    for row in range(abi.ROWS):
        assert (
            flags[row].tolist() == ([0.0, 0.0] if chosen[row] else before[row, :2].tolist()) + before[row, 2:].tolist()
        )
        kept = last_flags[1 + row].item()
        assert kept == before[row, abi.FLAG] if chosen[row] else math.isnan(kept)
    assert last_flags[::33].isnan().all()
    assert_same(before[:, abi.SCALE :], flags[:, abi.SCALE :])


def test_every_update_is_counted():
    run = Run(interval=2, low=16.0)
    run.steps([0, 0, 1, 1, 1, 1, 0])
    want = {
        abi.UPDATES: 7,
        abi.SKIPPED: 4,
        abi.STREAK: 0,
        abi.GROWTHS: 1,
        abi.BACKOFFS: 3,  # the last overflow found the scale at its minimum
        abi.LAST_SKIP: 6,
        abi.STRIKES: 4,
        abi.SPIKES: 0,
    }
    assert {which: run.counted(which) for which in range(abi.COUNTERS)} == want
    run.steps([1])
    assert (run.counted(abi.STREAK), run.counted(abi.LAST_SKIP)) == (1, 8)

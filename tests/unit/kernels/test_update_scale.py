"""The one launch that updates the scale: torch's op to the bit where torch is right; bounds, hysteresis, counters."""

import math
import random

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, assert_same, assert_untouched, launched

from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import MAX_SCALE, MIN_SCALE
from scaler_triton.kernels.update_scale import launch_update
from scaler_triton.policy import NO_LIMITS, no_counters
from scaler_triton.update import HeadroomRule, update_by_ops_, update_on_host_

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

    def update(self, flags, rows=1, *, last_flags=None, clear=False, **headroom):
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
                **headroom,
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


class ByHeadroom(Run):
    """A run under the headroom policy; rows that do not count hold what would change the scale."""

    def __init__(self, window=3, bits=2, **numbers):
        super().__init__(**numbers)
        self.bits = bits
        self.ring = torch.tensor([GUARD, 0.0, MAX_SCALE, *[0.0] * window, GUARD], dtype=torch.float64).to(DEVICE)

    def step(self, largest, flag=0.0, *, clear=False):
        """The scale after one update, by the largest gradient of each row that counts: a number is that of row 0."""
        largest = largest if isinstance(largest, dict) else {0: largest}
        flags, measured = torch.ones(abi.ROWS, abi.STATUS), torch.full((abi.ROWS, abi.MEASURED_ROW), 1e30).double()
        measured[:, abi.MEASURED_AT] = 1.0
        for row, unscaled in largest.items():
            flags[row, : abi.SCALE] = 0.0
            measured[row, abi.LARGEST], measured[row, abi.MEASURED_AT] = unscaled * 2.0**row, 2.0**row
        flags[max(largest), abi.FLAG] = flag
        on_device, last_flags = flags.to(DEVICE, copy=True), torch.zeros(abi.ROWS).to(DEVICE)
        on_gpu, rows = measured.to(DEVICE, copy=True), sum(1 << row for row in largest)
        given = {"measured": on_gpu, "headroom": self.ring[1:-1], "bits": self.bits}
        scale = self.update(on_device, rows, last_flags=last_flags, clear=clear, **given)
        assert self.ring[[0, -1]].tolist() == [GUARD] * 2
        assert_untouched(on_gpu, measured)
        assert last_flags.sum().item() == clear * flag
        flags[max(largest), abi.FLAG] *= not clear
        assert_same(on_device, flags)
        return scale

    def steps(self, largest, flag=0.0):
        return [self.step(each, flag) for each in largest]

    def exponents(self):
        """How many entered the ring, and those in it."""
        count, _, *ring = self.ring[1:-1].tolist()
        return count, ring


def test_the_largest_gradient_of_the_last_updates_sets_the_scale():
    run = ByHeadroom(window=3, bits=2)
    scales = run.steps([1.0, 9.0, 0.75, 1.5, 1.99, 0.0, 2.0**-20, 2.0**-21, 2.0**-22])
    assert scales == [2.0**13, *[2.0**10] * 3, *[2.0**13] * 4, 2.0**33]
    assert run.exponents() == (8, [-21, -22, -20])


@pytest.mark.parametrize(("window", "bits"), [(1, 0), (16, 2), (17, 30), (1024, 5)])
def test_random_gradients_leave_their_exponents(window, bits):
    rng, known, run = random.Random(window), [], ByHeadroom(window, bits)
    for _ in range(50 if window > 17 else 3 * window + 3):
        exponent = rng.randint(-60, 10)
        known = [*known, exponent][-window:]
        assert run.step(math.ldexp(rng.uniform(1, 2), exponent)) == 2.0 ** (15 - bits - max(known))


@pytest.mark.parametrize("rows", [[1, 2, 4], [31], range(abi.ROWS)])
@pytest.mark.parametrize("clear", [False, True])
def test_the_largest_gradient_of_the_rows_that_count(rows, clear):
    run = ByHeadroom(bits=0)
    for largest in rows:
        run.ring[1] = 0.0  # forget
        assert run.step({row: 8.0 if row == largest else 0.5 for row in rows}, clear=clear) == 2.0**12
    assert run.step(dict.fromkeys(rows, 8.0), flag=1.0, clear=clear) == 2.0**11
    assert run.counted(abi.SKIPPED) == 1
    assert run.exponents()[0] == 1


def test_an_overflow_leaves_a_cap_that_grows():
    run = ByHeadroom(scale=64.0, interval=2)
    scales = [run.step(1.0, flag) for flag in (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)]
    assert scales == [32.0, 32.0, 64.0, 64.0, 128.0, 64.0, 64.0]
    assert run.ring[1 + abi.CAP].item() == 64.0
    assert (run.counted(abi.GROWTHS), run.counted(abi.BACKOFFS)) == (2, 2)
    assert ByHeadroom(scale=64.0, hysteresis=2).steps([1.0, 1.0, 1.0], flag=1.0) == [64.0, 32.0, 16.0]


def test_where_no_gradient_was_measured_the_last_known_ones_count():
    run = ByHeadroom(scale=48.0, interval=1)
    assert run.steps([0.0, 0.0]) == [48.0] * 2
    assert run.exponents()[0] == 0
    assert run.steps([1.0, 0.0]) == [2.0**13] * 2
    assert (run.step(1.0, flag=1.0), run.step(0.0)) == (2.0**12, 2.0**13)  # the cap has grown


@pytest.mark.parametrize("largest", [0.0, 1e-30, 2.0**-1074, 1e30, 1e300])
@pytest.mark.parametrize("scale", [NAN, 4.0, 2.0**30, INF])
def test_a_scale_by_headroom_is_within_the_limits(scale, largest):
    run = ByHeadroom(scale=scale, low=16.0, high=2.0**20)
    high = 0.0 < largest < 1.0 or (largest == 0.0 and scale > 4.0)
    assert run.step(largest) == (2.0**20 if high else 16.0)
    limits, unscaled = NO_LIMITS._replace(min_scale=16.0, max_scale=2.0**20), torch.tensor(largest, dtype=torch.float64)
    by_ops, on_host, tracker = torch.tensor(scale), torch.tensor(scale), torch.zeros((), dtype=torch.int32)
    counted, numbers = torch.zeros(abi.COUNTERS, dtype=torch.int64), (2.0, 0.5, 3)
    update_by_ops_(by_ops, tracker, torch.zeros(()), numbers, limits, counted, HeadroomRule(2, 3), unscaled)
    memory, counters = tracker.view(-1).numpy().data, no_counters()
    update_on_host_(on_host, memory, False, numbers, limits, counters, HeadroomRule(2, 3), unscaled)
    assert by_ops == on_host == run.scales[1].cpu()

"""The one launch that updates the scale: to the bit the rule in Python or ops; and nothing written beside."""

import math
import random

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, assert_same, assert_untouched, launched

from scaler_triton.core.torch_ops import host_memory
from scaler_triton.core.update import update_by_ops_, update_on_host_
from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import MAX_SCALE, MIN_SCALE
from scaler_triton.kernels.update_scale import bind_update, launch_counts
from scaler_triton.measuring.headroom import HeadroomRule
from scaler_triton.policy import NO_LIMITS, Limits

GUARD = -7
BAD_FLAGS = [1.0, NAN, INF, -1.0, 2.0**-149]
EDGES = [MIN_SCALE, 2 * MIN_SCALE, 2.0**-149, 0.0, -4.0, NAN, INF, 1.0, 2.0**126, 2.0**127, MAX_SCALE]
# The greatest scale times these rounds back to it, and to infinity; 2^127 times these to the greatest, and to infinity.
GROWTHS = [1 + 2.0**-26, 1 + 2.0**-24, 2 - 2.0**-23, 2 - 2.0**-24, 1.0, 2.0, 1.1, 3.3, 1e300]
BACKOFFS = [0.5, 0.4, 1.0, 1 / 3]


class Run:
    """What updates move, every buffer guarded; and the same on the host, moved by the rule."""

    def __init__(self, scale, numbers=(2.0, 0.5, 1), limits=NO_LIMITS, headroom=None, *, for_good=False):
        self.numbers, self.limits, self.headroom, self.for_good = numbers, limits, headroom, for_good
        self.scale, self.tracker = torch.tensor(scale), torch.zeros((), dtype=torch.int32)
        self.counted = torch.zeros(abi.COUNTERS, dtype=torch.int64)
        self.scales = torch.tensor([NAN, scale, NAN], device=DEVICE)
        self.trackers = torch.tensor([GUARD, 0, GUARD], dtype=torch.int32, device=DEVICE)
        self.counters = torch.tensor([GUARD, *self.counted.tolist(), GUARD], device=DEVICE)
        self.policy = torch.tensor([*numbers, *limits[:3]], dtype=torch.float64, device=DEVICE)
        ring = [GUARD, *headroom.read(), GUARD] if headroom else []
        self.ring = torch.tensor(ring, dtype=torch.float64, device=DEVICE)

    def step(self, flag, largest=0.0, rows=(0,), *, clear=False):
        """One update; the flag is that of the first of the rows that count, the largest gradient that of the last."""
        flags = torch.ones(abi.ROWS, abi.STATUS)  # rows that do not count hold what would change the scale
        measured = torch.full((abi.ROWS, abi.MEASURED_ROW), 1e30, dtype=torch.float64)
        measured[:, abi.MEASURED_AT] = 2.0 ** -torch.arange(float(abi.ROWS))
        for row in rows:
            flags[row, abi.FLAG] = flag if row == rows[0] else 0.0
            measured[row, abi.LARGEST] = (largest if row == rows[-1] else largest / 4) * 2.0**-row
        on_gpu, measured_there = flags.to(DEVICE, copy=True), measured.to(DEVICE, copy=True)
        last_flags, kept = torch.full((abi.ROWS + 2,), NAN, device=DEVICE), torch.full((abi.ROWS + 2,), NAN)
        state = on_gpu, last_flags[1:-1], self.policy, self.counters[1:-1]
        options, mask = {}, sum(1 << row for row in rows)
        if self.headroom:
            options = {"measured": measured_there, "headroom": self.ring[1:-1], "bits": self.headroom.bits}
        launch = bind_update(*state, clear=clear, for_good=self.for_good, **options)
        with launched("_update_scale_kernel"):
            launch(self.scales[1], self.trackers[1], mask)
        bad, rule = bool(rows) and flag != 0, (self.numbers, self.limits)
        if self.headroom:
            row = torch.tensor([[largest, 0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
            found_inf = torch.tensor(float(bad))
            update_by_ops_(self.scale, self.tracker, found_inf, *rule, self.counted, self.headroom, row)
        else:
            update_on_host_(self.scale, host_memory(self.tracker.view(-1)), bad, *rule, host_memory(self.counted))
        assert_same(self.scales, torch.tensor([NAN, self.scale.item(), NAN]))
        assert self.trackers.tolist() == [GUARD, self.tracker.item(), GUARD]
        assert self.counters.tolist() == [GUARD, *self.counted.tolist(), GUARD]
        if self.headroom:
            assert self.ring.tolist() == [GUARD, *self.headroom.read(), GUARD]
        for row in rows if clear else ():
            kept[1 + row] = flags[row, abi.FLAG]
            flags[row, : abi.SCALE] = 0.0
        assert_same(on_gpu, flags)
        assert_same(last_flags, kept)
        assert_untouched(measured_there, measured)


@pytest.mark.parametrize("scale", EDGES)
def test_where_products_are_not_finite_and_no_scale_should_be(scale):
    for growth in GROWTHS:
        Run(scale, (growth, 0.5, 1)).step(0.0)
    for number, flag in enumerate(BAD_FLAGS):
        Run(scale, (2.0, BACKOFFS[number % 4], 1)).step(flag)


@pytest.mark.parametrize("by_headroom", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random_steps(seed, by_headroom):
    draw = random.Random(seed)
    for _ in range(20):
        growth = draw.choice([*GROWTHS, draw.uniform(1, 4)])
        numbers = growth, draw.choice([*BACKOFFS, draw.uniform(0.1, 1)]), draw.randint(1, 4)
        low, high = sorted(draw.choices([MIN_SCALE, 1.0, 4096.0, 65536.0, MAX_SCALE], k=2))
        headroom = HeadroomRule(draw.randint(0, 30), draw.choice([1, 3, 16])) if by_headroom else None
        scale = draw.choice([*EDGES, *[math.ldexp(draw.uniform(1, 2), draw.randint(-120, 127)) for _ in EDGES]])
        run = Run(scale, numbers, Limits(low, high, draw.randint(1, 3)), headroom, for_good=seed % 2 == 0)
        for _ in range(4):
            rows, flag = draw.sample(range(abi.ROWS), draw.choice([0, 1, 3, 32])), draw.choice([0.0, 0.0, *BAD_FLAGS])
            largest = draw.choice([0.0, math.ldexp(draw.uniform(1, 2), draw.randint(-60, 10))]) if rows else 0.0
            run.step(flag if draw.random() < 0.5 else 0.0, largest, rows, clear=draw.random() < 0.5)


@pytest.mark.parametrize("window", [1, 3, 16, 17, abi.MAX_HEADROOM_WINDOW])
def test_a_ring_of_exponents_that_goes_round(window):
    draw, run = random.Random(window), Run(64.0, headroom=HeadroomRule(2, window))
    for _ in range(50 if window > 17 else 3 * window + 3):
        run.step(0.0, math.ldexp(draw.uniform(1, 2), draw.randint(-60, 10)))


@pytest.mark.parametrize(("tracker", "updates"), [(0, 0), (1, 1), (2**31 - 1, 2**40), (5, 2**62)])
def test_counts_are_written_and_nothing_beside(tracker, updates):
    trackers = torch.tensor([GUARD, 3, GUARD], dtype=torch.int32, device=DEVICE)
    counters = torch.arange(abi.COUNTERS, device=DEVICE) - 20
    want = counters.tolist()
    want[abi.UPDATES] = updates
    with launched("_write_counts_kernel"):
        launch_counts(trackers[1], counters, tracker, updates)
    assert (trackers.tolist(), counters.tolist()) == ([GUARD, tracker, GUARD], want)

"""The launch that judges a norm: NumPy's decisions, the bits of torch's ops, and nothing written beside."""

import math
import random

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, launched
from spike_rule import judged, series

from scaler_triton.kernels import abi
from scaler_triton.kernels.spike import launch_judge

GUARD = -7.0


class Judge:
    """A window with its counters and a status, every buffer guarded, moved by one launch a norm."""

    def __init__(self, sigma=3.0, window=6, skipped=0):
        self.window, empty = window, [0.0] * (abi.HEADER + window)
        empty[abi.LAST], empty[abi.SIGMA] = NAN, sigma
        self.memory = torch.tensor([GUARD, *empty, GUARD], dtype=torch.float64).to(DEVICE)
        self.counters = torch.tensor([-7, *[0] * abi.COUNTERS, -7]).to(DEVICE)
        self.counters[1 + abi.SKIPPED] = skipped

    def judge(self, norm, ranks=0, first=True, overflows=0.0, failures=0.0):
        """Return totals and status after one launch; whatever lies around what it may write must be as it was."""
        numbers = [GUARD, norm * norm, overflows, failures, 3.0, 3.0, GUARD]
        totals = torch.tensor(numbers, dtype=torch.float64).to(DEVICE)
        status = torch.full((2 + abi.STATUS,), GUARD).to(DEVICE)
        status[1] = 0.0
        with launched("_judge_kernel"):
            launch_judge(
                totals[1:-1], status[1:-1], self.memory[1:-1], self.counters[1:-1], self.window, ranks, first=first
            )
        kept = [totals[0], totals[1], *totals[3:], status[0], status[-1], *self.memory[[0, -1]]]
        assert torch.stack([each.double() for each in kept]).tolist() == pytest.approx(
            [GUARD, norm * norm, failures, 3.0, 3.0, GUARD, GUARD, GUARD, GUARD, GUARD], nan_ok=True
        )
        assert self.counters[[0, -1]].tolist() == [-7, -7]
        return totals[1:-1].tolist(), status[1:-1].tolist()

    def header(self, which):
        return self.memory[1 + which].item()


@pytest.mark.parametrize("window", [2, 3, 5, 8, 33])
def test_decisions_are_numpys(window):
    draw = random.Random(window)
    for _ in range(3):
        sigma, norms = draw.choice([0.5, 3.0, 6.0]), series(draw, 2 * window + 5)
        run = Judge(sigma, window)
        spikes = 0
        for norm, (skips, limit) in zip(norms, judged(norms, sigma, window), strict=True):
            totals, status = run.judge(norm)
            assert (totals[abi.OVERFLOWS], status[abi.FLAG]) == (float(skips), float(skips)), (norms, norm)
            if skips and math.isfinite(norm):
                spikes += 1
                assert run.header(abi.SPIKE_LIMIT) == pytest.approx(limit, rel=1e-12)
                assert run.header(abi.SPIKE_NORM) == pytest.approx(norm, rel=1e-15)
            assert run.header(abi.IS_SPIKE) == (skips and math.isfinite(norm))
        assert run.counters[1 + abi.SPIKES].item() == spikes


def test_sums_are_of_neighbours_in_their_order():
    """In another order, or with a fused multiply-add, the last bits are others: ranks must agree on all of them."""
    norms = [0.1, 1e16, 0.3, -0.0, 7.7, 1e16, 0.9]
    run = Judge(sigma=0.7, window=7)
    for norm in norms:
        run.memory[1 + abi.LAST] = norm  # to the bit: a square's root may be another number
        run.judge(1e30, first=True)
    pairs = [0.1 + 1e16, 0.3 + -0.0, 7.7 + 1e16, 0.9 + 0.0]
    mean = ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])) / 7
    squares = [(norm - mean) * (norm - mean) for norm in norms] + [0.0]
    pairs = [squares[i] + squares[i + 1] for i in range(0, 8, 2)]
    deviation = math.sqrt(((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])) / 6)
    assert run.header(abi.SPIKE_LIMIT) == mean + 0.7 * max(deviation, 1e-3 * mean)


def test_the_deviation_is_at_least_a_thousandth_of_the_mean():
    run = Judge(sigma=2.0, window=4)
    for _ in range(4):
        run.judge(5.0)
    assert run.judge(5.0 * 1.00199)[0][abi.OVERFLOWS] == 0.0
    run.judge(5.0, first=False)
    assert run.judge(5.0 * 1.00201)[0][abi.OVERFLOWS] == 1.0


@pytest.mark.parametrize(("window", "needed"), [(2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)])
def test_half_a_window_is_needed_and_at_least_two_norms(window, needed):
    run = Judge(window=window)
    flags = [run.judge(norm)[1][abi.FLAG] for norm in [1.0] * needed + [100.0]]
    assert flags == [0.0] * needed + [1.0]
    run = Judge(window=window)
    flags = [run.judge(norm)[1][abi.FLAG] for norm in [1.0] * (needed - 1) + [100.0]]
    assert flags == [0.0] * needed


def test_a_norm_enters_when_the_next_step_is_judged_and_is_replaced_until_then():
    run = Judge(sigma=3.0, window=4)
    for norm in (1.0, 1.0, 50.0):
        run.judge(norm)
    assert (run.header(abi.COUNT), run.counters[1 + abi.SPIKES].item()) == (2.0, 1)
    run.judge(60.0, first=False)
    assert (run.header(abi.COUNT), run.header(abi.LAST), run.counters[1 + abi.SPIKES].item()) == (2.0, 60.0, 1)
    run.judge(1.0, first=False)
    assert (run.header(abi.LAST), run.counters[1 + abi.SPIKES].item()) == (1.0, 0)
    run.judge(1.0)
    assert (run.header(abi.COUNT), run.memory[1 + abi.HEADER :].tolist()[:4]) == (3.0, [1.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("norm", [NAN, INF])
def test_a_norm_that_is_not_finite_skips_and_never_enters(norm):
    run = Judge(window=2)
    for each, flag in ((1.0, 0.0), (norm, 1.0), (1.0, 0.0), (norm, 1.0), (1.0, 0.0)):
        assert run.judge(each)[1][abi.FLAG] == flag
    assert (run.header(abi.COUNT), run.counters[1 + abi.SPIKES].item()) == (2.0, 0)


def test_the_last_spike_is_kept_with_its_generation():
    run = Judge(window=4, skipped=41)
    for norm in (2.0, 2.0, 9.0):
        run.judge(norm)
    run.counters[1 + abi.SKIPPED] = 42
    run.judge(2.0)
    assert (run.header(abi.SPIKE_NORM), run.header(abi.SPIKE_GENERATION)) == (9.0, 41.0)
    assert run.header(abi.SPIKE_LIMIT) == pytest.approx(2.006)


def test_the_status_is_that_of_the_ranks():
    run = Judge(window=2)
    assert run.judge(1.0)[1] == [0.0, GUARD, GUARD, GUARD]  # alone nothing is compared
    assert run.judge(1.0, ranks=3)[1] == [0.0, 0.0, 3.0, 0.0]
    assert run.judge(9.0, ranks=3)[1] == [1.0, 0.0, 3.0, 0.0]
    assert run.judge(NAN, ranks=2, overflows=2.0, failures=1.0)[1] == [1.0, 1.0, 3.0, 1.25]
    assert run.judge(NAN, ranks=2, overflows=2.0)[0][abi.OVERFLOWS] == 2.0

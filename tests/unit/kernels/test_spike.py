"""The launch that judges a norm: NumPy's decisions, the bits of torch's ops, and nothing written beside."""

import math
import random

import pytest
import torch
from helpers import assert_all_same, assert_same
from kernel_cases import DEVICE, INF, NAN, as_bits, launched
from spike_rule import judged, series

from scaler_triton.kernels import abi
from scaler_triton.kernels.spike import launch_judge, warps_of
from scaler_triton.spikes import Guard
from scaler_triton.update import Counters

GUARD = -7.0


class Judge:
    """A window with its counters and a status, every buffer guarded, moved by one launch a norm."""

    def __init__(self, sigma=3.0, window=2):
        self.window, empty = window, [0.0] * (abi.HEADER + window)
        empty[abi.LAST], empty[abi.SIGMA] = NAN, sigma
        self.memory = torch.tensor([GUARD, *empty, GUARD], dtype=torch.float64).to(DEVICE)
        self.counters = torch.tensor([int(GUARD), *[0] * abi.COUNTERS, int(GUARD)]).to(DEVICE)

    def judge(self, norm, ranks=0, overflows=0.0, failures=0.0):
        """Return totals and status after one launch; whatever lies around what it may write must be as it was."""
        numbers = [GUARD, norm * norm, overflows, failures, 3.0, 3.0, GUARD]
        totals = torch.tensor(numbers, dtype=torch.float64).to(DEVICE)
        status = torch.full((2 + abi.STATUS,), GUARD).to(DEVICE)
        status[1] = 0.0
        with launched("_judge_kernel"):
            arguments = totals[1:-1], status[1:-1], self.memory[1:-1], self.counters[1:-1], self.window, ranks
            launch_judge(*arguments, first=True)
        numbers[1 + abi.OVERFLOWS] = totals[1 + abi.OVERFLOWS]
        assert_same(totals, torch.tensor(numbers, dtype=torch.float64))
        assert [each[place].item() for each in (status, self.memory, self.counters) for place in (0, -1)] == [GUARD] * 6
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


def test_the_status_is_that_of_the_ranks():
    run = Judge()
    assert run.judge(1.0)[1] == [0.0, GUARD, GUARD, GUARD]  # alone nothing is compared
    assert run.judge(1.0, ranks=3)[1] == [0.0, 0.0, 3.0, 0.0]
    assert run.judge(9.0, ranks=3)[1] == [1.0, 0.0, 3.0, 0.0]
    assert run.judge(NAN, ranks=2, overflows=2.0, failures=1.0)[1] == [1.0, 1.0, 3.0, 1.25]
    assert run.judge(NAN, ranks=2, overflows=2.0)[0][abi.OVERFLOWS] == 2.0


SQUARES = [9.0, 1.5, 2.5, NAN, 16.0, 25.0, 2.5, INF, 3.5]
WARPS = {2: 1, 3: 1, 7: 1, 64: 1, 100: 1, 300: 2, 1000: 4, abi.MAX_WINDOW: 16}  # of windows by their lengths


@pytest.mark.parametrize("length", WARPS)
def test_the_kernel_has_the_bits_of_torchs_ops(length):
    """Also where several warps share a window: then the simulator sees what one of them reads and another writes."""
    assert warps_of(1 << (length - 1).bit_length()) == WARPS[length]
    draw = random.Random(length)
    ours, theirs = (Guard(1.0, length).window(DEVICE, "torch") for _ in range(2))
    ours_counted, theirs_counted = (Counters().on(DEVICE) for _ in range(2))
    ours_counted[abi.SKIPPED] = theirs_counted[abi.SKIPPED] = 41
    ours_status, theirs_status = (torch.zeros(abi.STATUS, device=DEVICE) for _ in range(2))
    drawn = [draw.uniform(1, 2) for _ in range(length - 2)]
    # None; without a deviation; too few for a limit; and some steps later the oldest is replaced.
    for norms in ([], [1.7] * length, drawn[: length // 2 - 1], drawn):
        ours.restore(norms)
        theirs.restore(norms)
        for square in SQUARES:
            first = square not in (16.0, 25.0)  # which replace NaN, and a spike
            totals = torch.tensor([square, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64, device=DEVICE)
            expected = totals.clone()
            with launched("_judge_kernel"):
                launch_judge(totals, ours_status.zero_(), ours.memory, ours_counted, length, 0, first=first)
            theirs._judge_by_ops(expected, theirs_status.zero_(), theirs_counted, first)
            assert_all_same([totals, ours_status], [expected, theirs_status])
            assert torch.equal(as_bits(ours.memory), as_bits(theirs.memory))
            assert torch.equal(ours_counted, theirs_counted)
    assert ours_counted[abi.SPIKES] > 2

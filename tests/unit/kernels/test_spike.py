"""The launch that judges a norm: the bits of the same without a kernel, and the status of ranks."""

import random

import pytest
import torch
from helpers import assert_all_same
from kernel_cases import DEVICE, INF, NAN, as_bits, launched

from scaler_triton.core.flag import Flag
from scaler_triton.core.update import Counters
from scaler_triton.guard.spikes import Guard
from scaler_triton.kernels import abi
from scaler_triton.kernels.spike import launch_judge, warps_of

GUARD = -7.0


def test_the_status_is_that_of_the_ranks():
    window, counters = Guard(3.0, 2).new_window(DEVICE, "torch"), Counters().on(DEVICE)
    for norm, ranks, found, failed, want in (
        (1.0, 0, 0.0, 0.0, [0.0, GUARD, GUARD, GUARD]),  # alone nothing is compared
        (1.0, 3, 0.0, 0.0, [0.0, 0.0, 3.0, 0.0]),
        (9.0, 3, 0.0, 0.0, [1.0, 0.0, 3.0, 0.0]),
        (NAN, 2, 2.0, 1.0, [1.0, 1.0, 3.0, 1.25]),
    ):
        totals = torch.tensor([norm * norm, found, failed, 3.0, 3.0], dtype=torch.float64, device=DEVICE)
        status = torch.tensor([GUARD, 0.0, *[GUARD] * abi.STATUS], device=DEVICE)
        launch_judge(totals, status[1:-1], window.memory, counters, 2, ranks, first=True)
        assert status.tolist() == [GUARD, *want, GUARD]
        assert totals[abi.OVERFLOWS].item() == max(found, want[0])


SQUARES = [9.0, 1.5, 2.5, NAN, 16.0, 25.0, 2.5, INF, 3.5]
WARPS = {2: 1, 3: 1, 7: 1, 64: 1, 100: 1, 300: 2, 1000: 4, abi.MAX_WINDOW: 16}  # of windows by their lengths


@pytest.mark.parametrize("length", WARPS)
def test_the_kernel_has_the_bits_of_numpys_or_torchs_ops(length):
    """Also where several warps share a window: then the simulator sees what one of them reads and another writes."""
    assert warps_of(1 << (length - 1).bit_length()) == WARPS[length]
    draw = random.Random(length)
    ours, theirs = (Guard(1.0, length).new_window(DEVICE, "torch") for _ in range(2))
    ours_counted, counters = Counters().on(DEVICE), Counters()
    theirs_counted = counters.on(DEVICE)
    ours_counted[abi.SKIPPED] = theirs_counted[abi.SKIPPED] = 41
    ours_status, flag = torch.zeros(abi.STATUS, device=DEVICE), Flag(torch.zeros(abi.STATUS, device=DEVICE))
    drawn = [draw.uniform(1, 2) for _ in range(length - 2)]
    # None; without a deviation; a limit of 0; too few for one; and some steps later the oldest is replaced.
    for norms in ([], [1.7] * length, [0.0] * length, drawn[: length // 2 - 1], drawn):
        ours.restore(norms)
        theirs.restore(norms)
        for square in SQUARES:
            first = square not in (16.0, 25.0)  # which replace NaN, and a spike
            totals = torch.tensor([square, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64, device=DEVICE)
            expected = totals.clone()
            with launched("_judge_kernel"):
                launch_judge(totals, ours_status.zero_(), ours.memory, ours_counted, length, 0, first=first)
            flag.clear()
            theirs.is_judged = not first
            theirs.judge(expected, flag, counters)
            assert_all_same([totals, ours_status], [expected, flag.status])
            assert torch.equal(as_bits(ours.memory), as_bits(theirs.memory))
            assert torch.equal(ours_counted, theirs_counted)
    assert ours_counted[abi.SPIKES] > 2

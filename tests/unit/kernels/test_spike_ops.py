"""The launch that judges a norm has the bits of torch's ops, from the first norm on and when its ring goes round."""

import random

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, as_bits, assert_same, launched

from scaler_triton.kernels import abi
from scaler_triton.kernels.spike import launch_judge, warps_of
from scaler_triton.spikes import Guard
from scaler_triton.update import Counters

SQUARES = [9.0, 1.5, 2.5, NAN, 16.0, 25.0, 2.5, INF, 3.5]


def totals_of(square):
    return torch.tensor([square, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64).to(DEVICE)


@pytest.mark.parametrize(
    ("length", "warps"), [(2, 1), (3, 1), (7, 1), (64, 1), (100, 1), (300, 2), (1000, 4), (abi.MAX_WINDOW, 16)]
)
def test_the_kernel_has_the_bits_of_torchs_ops(length, warps):
    """Also where several warps share a window: then the simulator sees what one of them reads and another writes."""
    assert warps_of(1 << (length - 1).bit_length()) == warps
    draw = random.Random(length)
    ours, theirs = (Guard(1.0, length).window(DEVICE, "torch") for _ in range(2))
    ours_counted, theirs_counted = (Counters().on(DEVICE) for _ in range(2))
    ours_status, theirs_status = (torch.zeros(abi.STATUS, device=DEVICE) for _ in range(2))
    drawn = [draw.uniform(1, 2) for _ in range(length - 2)]
    # None; without a deviation; too few for a limit; and some steps later the oldest is replaced.
    for norms in ([], [1.7] * length, drawn[: length // 2 - 1], drawn):
        ours.restore(norms)
        theirs.restore(norms)
        for square in SQUARES:
            first = square not in (16.0, 25.0)  # which replace NaN, and a spike
            totals, expected = totals_of(square), totals_of(square)
            with launched("_judge_kernel"):
                launch_judge(totals, ours_status.zero_(), ours.memory, ours_counted, length, 0, first=first)
            theirs._judge_by_ops(expected, theirs_status.zero_(), theirs_counted, first)
            assert_same(totals, expected)
            assert_same(ours_status, theirs_status)
            assert torch.equal(as_bits(ours.memory), as_bits(theirs.memory))
            assert torch.equal(ours_counted, theirs_counted)
    assert ours_counted[abi.SPIKES] > 2

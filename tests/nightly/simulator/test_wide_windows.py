"""Windows that several warps judge: the bits of torch's ops, and no warp reads what another one writes."""

import random

import pytest
import torch
from kernel_cases import DEVICE, SIMULATED, as_bits, assert_same

from scaler_triton.flag import FlagRows
from scaler_triton.kernels import abi
from scaler_triton.kernels.spike import launch_judge, warps_of
from scaler_triton.spikes import Guard
from scaler_triton.update import Counters

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(SIMULATED is None, reason="only the simulator runs several warps and watches every byte"),
]


@pytest.mark.parametrize(("length", "warps"), [(300, 2), (1000, 4), (abi.MAX_WINDOW, 16)])
def test_several_warps_judge_as_torchs_ops_do(length, warps):
    assert warps_of(1 << (length - 1).bit_length()) == warps
    draw = random.Random(length)
    ours, theirs = (Guard(2.0, length).window(DEVICE, "torch") for _ in range(2))
    flag, counted = FlagRows(DEVICE).flag(), Counters()
    status, counters = torch.zeros(abi.STATUS), torch.zeros(abi.COUNTERS, dtype=torch.int64)
    for held in (length // 2 - 2, length - 2):  # too few for a limit; and some steps later the oldest is overwritten
        norms = [draw.uniform(1, 2) for _ in range(held)]
        ours.restore(norms)
        theirs.restore(norms)
        for square in (1.5, 9.0, 2.5, float("nan"), 16.0, 2.5):
            first = square != 16.0  # which replaces NaN
            totals = torch.tensor([square, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
            launch_judge(totals, status.zero_(), ours.memory, counters, length, 0, first=first)
            expected = torch.tensor([square, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
            flag.clear()
            theirs.judge(expected, flag, counted, 0, first=first)
            assert_same(totals, expected)
            assert_same(status, flag.status)
            assert as_bits(ours.memory).equal(as_bits(theirs.memory))
            assert counters.tolist() == counted.read()
    assert counters[abi.SPIKES] > 2

"""What compiled kernels move, counted: a gradient's bytes once, and a few numbers for each program."""

import pytest
import torch
from kernel_cases import DTYPES, INF, SIMULATED, Guarded, make_table

from scaler_triton.kernels import abi
from scaler_triton.kernels.clip import launch_clip
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.measure import launch_measure
from scaler_triton.kernels.norm import launch_sum_of_squares
from scaler_triton.kernels.spike import launch_judge
from scaler_triton.kernels.table import PARTIALS_BLOCK
from scaler_triton.kernels.unscale import launch_check, launch_unscale

pytestmark = [pytest.mark.host_only, pytest.mark.skipif(SIMULATED is None, reason="only the simulator counts bytes")]

# A program finds its tensor and chunk (int32), the tensor's address and elements (int64).
MAP = 4 + 4 + 8 + 8
SCALE, FLAG, TOTALS, PARTIAL, WEIGHT, LARGEST = 4, 4, 8 + 8, 8, 8, 8


@pytest.fixture
def moved(simulated_kernels):
    """Bytes by kernel, of the launches since the test began or asked last."""

    def take():
        bytes_moved = {name: kernel.moved for (name, *_), kernel in simulated_kernels.items()}
        simulated_kernels.clear()
        return bytes_moved

    take()
    return take


def table_of(dtype, *, offset=0, last=2.0):
    """Two tensors, of two chunks and of one, and the bytes of both."""
    numels = DEFAULT.chunk_elements(dtype.itemsize) + 64, 640
    values = [torch.linspace(-2, 2, numel).to(dtype) for numel in numels]
    values[0][-1] = last
    return make_table([Guarded(value, offset) for value in values], dtype, DEFAULT), sum(numels) * dtype.itemsize


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_check_reads_once_and_unscaling_also_writes_once_unless_the_scale_is_one(moved, dtype, offset):
    table, size = table_of(dtype, offset=offset)
    launch_check(table, torch.zeros(()))
    assert moved() == {"_unscale_kernel": {"loaded": size + 3 * MAP, "stored": 0}}
    for scale, stored in ((1024.0, size), (1.0, 0)):
        launch_unscale(table, torch.tensor(scale), torch.zeros(()), inverse=False)
        assert moved() == {"_unscale_kernel": {"loaded": size + 3 * (MAP + SCALE), "stored": stored}}


def test_only_a_chunk_that_overflowed_is_read_again(moved):
    table, size = table_of(torch.float16, last=INF)
    launch_check(table, torch.zeros(()))
    again, generation = 64 * 2, 4
    assert moved() == {"_unscale_kernel": {"loaded": size + 3 * MAP + again + generation, "stored": FLAG}}


@pytest.mark.parametrize("last", [2.0, INF])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_measuring_reads_once_and_stores_nothing(moved, dtype, offset, last):
    """To the total it adds by atomics, which are not counted."""
    table, size = table_of(dtype, offset=offset, last=last)
    launch_measure(table, torch.zeros(abi.MEASURED_ROW, dtype=torch.float64))
    assert moved() == {"_measure_kernel": {"loaded": size + 3 * (MAP + LARGEST), "stored": 0}}


def clip(dtype, offset=0):
    """Clip two tensors; return the bytes of both."""
    table, size = table_of(dtype, offset=offset)
    scale, totals = torch.tensor(1024.0), torch.zeros(abi.TOTALS, dtype=torch.float64)
    launch_sum_of_squares(table, scale, torch.zeros(()), totals)
    launch_clip(table, scale, totals, 1e-3, torch.zeros(()))
    return size


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_reads_twice_and_writes_once(moved, dtype, offset):
    """12 bytes an fp32 element, where torch's unscaling, norm and clipping move 20."""
    size = clip(dtype, offset)
    assert moved() == {
        "_sum_squares_kernel": {"loaded": size + 3 * (MAP + WEIGHT), "stored": 3 * PARTIAL},
        "_finish_kernel": {"loaded": PARTIALS_BLOCK * PARTIAL + SCALE + FLAG, "stored": 5 * 8},
        "_clip_kernel": {"loaded": size + 3 * (MAP + SCALE + TOTALS), "stored": size + 4},
    }


@pytest.mark.parametrize("length", [100, 4096])
def test_a_judgement_reads_its_window_once_and_writes_one_norm_of_it(moved, length):
    window = torch.ones(abi.HEADER + length, dtype=torch.float64)
    window[abi.COUNT] = 5 * length
    status, counters = torch.zeros(abi.STATUS), torch.zeros(abi.COUNTERS, dtype=torch.int64)
    launch_judge(torch.ones(abi.TOTALS, dtype=torch.float64), status, window, counters, length, 0, first=True)
    numbers = 4 + 2 + 2  # of the header, the counters and the totals
    stored = 4 + 1  # the norm, the header's three numbers, the spikes
    assert moved() == {"_judge_kernel": {"loaded": 8 * (length - 1 + numbers), "stored": 8 * stored}}

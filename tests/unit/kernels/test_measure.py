"""What passes measure on their way: NumPy's numbers for every bit pattern, every pass, size and offset."""

import itertools

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, INF, NAN, SMALL, Guarded, finite_values, launched, make_table

from scaler_triton.kernels import abi
from scaler_triton.kernels.config import MEASURING
from scaler_triton.kernels.measure import launch_add_measured
from scaler_triton.kernels.norm import launch_sum_of_squares
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_check, launch_unscale

SCALE = torch.tensor(4.0)
EVERY_PASS = pytest.mark.parametrize("how", ["check", "unscale", "norm"])


def expected(values):
    """Largest, zeros, subnormals and elements of several tensors, by NumPy in fp64."""
    size = torch.cat([each.double().reshape(-1) for each in values]).abs().numpy()
    finite = size[size < INF]
    small = (size > 0) & (size < 2.0**-14)
    return [max(finite, default=0.0), float((size == 0).sum()), float(small.sum()), float(size.size)]


def measured(grads, how, config=SMALL, add_to=None):
    """What one pass over `grads` measures; it must do what it does without measuring, too."""
    table = make_table(grads, grads[0].tensor.dtype, config)
    total = torch.zeros(abi.MEASURED_ROW, dtype=torch.float64, device=DEVICE) if add_to is None else add_to
    kernels = ["_sum_squares_kernel", "_finish_kernel"] if how == "norm" else ["_unscale_kernel"]
    with launched(*kernels, "_add_measured_kernel"), cases.guarded_flag() as found_inf:
        if how == "check":
            launch_check(table, found_inf, measures=True)
        elif how == "unscale":
            launch_unscale(table, SCALE.to(DEVICE), found_inf, inverse=False, measures=True)
        else:
            totals = torch.empty(abi.TOTALS, dtype=torch.float64, device=DEVICE)
            launch_sum_of_squares(table, SCALE.to(DEVICE), found_inf, totals, measures=True)
            plain = torch.empty_like(totals)
        launch_add_measured(table, total)
    if how == "norm":
        launch_sum_of_squares(table, SCALE.to(DEVICE), torch.zeros((), device=DEVICE), plain)
        assert totals.tolist() == pytest.approx(plain.tolist(), rel=0, abs=0, nan_ok=True)
    want, flag = cases.expected_unscale([grad.values for grad in grads], cases.inverse_of(SCALE))
    assert found_inf.item() == flag.item()
    for grad, after in zip(grads, want, strict=True):
        grad.assert_holds(after if how == "unscale" else grad.values)
    assert total[abi.MEASURED_AT].item() == 0.0
    return total[: abi.MEASURED].tolist()


@EVERY_PASS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern(dtype, how):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    parts = [every, every[every.isfinite()], every[every.abs() < 2.0**-14], every[~every.isfinite()]]
    for values in parts:
        assert measured([Guarded(values.clone(), 3)], how, MEASURING) == expected([values])


@EVERY_PASS
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_and_offset(dtype, how):
    info = torch.finfo(dtype)
    specials = [0.0, -0.0, 2.0**-14, -(2.0**-14), 2.0**-15, info.tiny, info.tiny / 2, INF, -INF, NAN, 1.0]
    together = []
    for seed, (numel, offset) in enumerate(itertools.product(cases.edge_numels(dtype), cases.OFFSETS)):
        values = finite_values(numel, dtype, seed) * (1 if seed % 2 else 2.0**-20)
        for place, special in enumerate(specials[: numel // 2]):
            values[(7 * place + seed) % numel] = special
        together.append(Guarded(values, offset))
        if numel and seed % 5 == 0:  # each of these alone, too
            assert measured([Guarded(values, offset)], how) == expected([values])
    assert measured(together, how) == expected([grad.values for grad in together])


@EVERY_PASS
def test_several_passes_add_up_and_missing_gradients_count_nothing(how):
    first, second = finite_values(5000, torch.float32, 1), torch.zeros(33, dtype=torch.float16)
    total = torch.zeros(abi.MEASURED_ROW, dtype=torch.float64, device=DEVICE)
    measured([Guarded(first)], how, add_to=total)
    assert measured([Guarded(second, 1)], how, add_to=total) == expected([first, second.float()])
    table = make_table([Guarded(first), Guarded(first)], torch.float32)
    found_inf = torch.zeros((), device=DEVICE)
    launch_check(table, found_inf)  # another launch over the same table
    for addresses in ((table.grads[0].tensor.data_ptr(),) * 2, (0, table.grads[0].tensor.data_ptr())):
        table.set_addresses(addresses)  # what the first launch has left must not be seen by the second
        launch_check(table, found_inf, measures=True)
    total.zero_()
    launch_add_measured(table, total)
    assert total[: abi.MEASURED].tolist() == expected([first])


def test_more_chunks_than_one_block_adds():
    table = GradTable([1] * 2500, torch.float16, DEVICE)
    chunks = torch.rand(2500, abi.MEASURED, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chunks[:, abi.ZEROS :].mul_(1e4).floor_()  # counts
    table.measured.copy_(chunks.flatten())
    total = torch.tensor([0.5, 1.0, 2.0, 3.0, 7.0], dtype=torch.float64, device=DEVICE)
    with launched("_add_measured_kernel"):
        launch_add_measured(table, total)
    want = chunks.sum(0) + torch.tensor([0.0, 1.0, 2.0, 3.0])
    want[abi.LARGEST] = chunks[:, abi.LARGEST].max()
    assert total.tolist() == [*want.tolist(), 7.0]

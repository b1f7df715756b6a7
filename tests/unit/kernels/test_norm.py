"""The sum of squares and the check in one pass, against fp64, and what it leaves alone."""

import kernel_cases as cases
import pytest
import torch
from helpers import sum_of_squares
from kernel_cases import DEVICE, DTYPES, INF, NAN, SMALL, Guarded, assert_untouched, finite_values

from scaler_triton.kernels.config import DEFAULT, LaunchConfig
from scaler_triton.kernels.norm import launch_sum_of_squares
from scaler_triton.kernels.table import PARTIALS_BLOCK, GradTable

# A square is rounded once in fp32, the sum of a lane's squares once a step: 2^-24 each, for 4 steps. The rest is fp64.
TOLERANCE = 5 * 2.0**-24


def run(table, scale=1.0):
    """The sum and the flag, on the CPU, which stand in the totals; what lies beside those is not written."""
    out = torch.full((7,), NAN, dtype=torch.float64, device=DEVICE)
    factor = torch.tensor(scale)
    with (
        cases.launched(*["_sum_squares_kernel"][: table.n_chunks], "_finish_kernel"),
        cases.guarded_flag() as found_inf,
    ):
        launch_sum_of_squares(table, factor.to(DEVICE), found_inf, out[1:6])
    assert out[::6].isnan().all()
    assert out[2:6].tolist() == [found_inf.item(), 0.0, factor.item(), 1.0 / factor.item()]
    return out[1].cpu(), found_inf.cpu()


def moderate_values(numel, dtype, seed):
    """Finite values of every magnitude whose squares fp64 can hold, subnormals and zeros included."""
    values = finite_values(numel, dtype, seed)
    return values.clamp(-1e150, 1e150) if dtype == torch.float64 else values


def check_sum(grads, dtype, scale=1.0, config=SMALL):
    """The sum is right, nothing is flagged, and every byte is as it was."""
    table = cases.make_table(grads, dtype, config)
    total, found_inf = run(table, scale)
    inv_scale = cases.inverse_of(torch.tensor(scale)).item()
    want = sum_of_squares([grad.values for grad in grads]) * inv_scale * inv_scale
    assert total.item() == pytest.approx(want, rel=TOLERANCE, abs=0)
    assert found_inf == 0
    assert not table.bits.any()
    for grad in grads:
        assert_untouched(grad.buffer, grad.start)


@pytest.mark.parametrize("scale", [65536.0, 3.0, 1.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_right_whatever_the_shape(dtype, scale):
    check_sum(cases.every_shape(dtype, moderate_values), dtype, scale)


@pytest.mark.parametrize("magnitude", [1e38, 3e19, 1e19, 1e-10, 1e-15, 1e-19, 1e-23, 1e-30, 1e-38, 1e-40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_square_overflows_or_is_lost(dtype, magnitude):
    random = torch.randn(1200, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    for offset in cases.OFFSETS:
        check_sum([Guarded((random * magnitude).to(dtype), offset)], dtype, 2.0**16)


@pytest.mark.parametrize("value", [1.1, 0.7123, 3.3e-5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_whose_roundings_all_go_one_way(dtype, value):
    values = torch.full((3 * DEFAULT.chunk_elements(dtype.itemsize) + 5,), value, dtype=dtype)
    check_sum([Guarded(values, 1)], dtype, config=DEFAULT)


@pytest.mark.parametrize("config", [*cases.CONFIGS, LaunchConfig(1, 1, 1), LaunchConfig(2, 2, 3)])
def test_other_configurations_give_the_same(config):
    for dtype in DTYPES:
        chunk = config.chunk_elements(dtype.itemsize)
        check_sum([Guarded(moderate_values(chunk + 13, dtype, 0), 1)], dtype, 3.0, config)


@pytest.mark.parametrize("specials", [[NAN], [INF], [-INF], [NAN, INF]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_flagged_and_told_apart(dtype, specials):
    vector, chunk = 16 // dtype.itemsize, SMALL.chunk_elements(dtype.itemsize)
    numel = chunk + 2 * vector + 1
    for offset in (0, 3):
        for place in (0, vector, chunk - 1, chunk + vector, numel - 2):
            values = moderate_values(numel, dtype, place)
            values[place : place + len(specials)] = torch.tensor(specials, dtype=dtype)[: numel - place]
            grads = [Guarded(values, offset), Guarded(moderate_values(numel, dtype, 1), offset)]
            table = cases.make_table(grads, dtype)
            total, found_inf = run(table)
            assert found_inf == 1
            assert table.bits[:, 0].tolist() == [cases.expected_bits(values), 0]
            assert str(total.item()) == ("nan" if values.isnan().any() else "inf")


def test_huge_fp64_is_not_taken_for_infinite():
    table = cases.make_table([Guarded(torch.full((40,), 1e200, dtype=torch.float64), 1)], torch.float64)
    assert run(table) == (INF, 0)  # so is the sum
    assert table.bits[:, 0].tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_absent_tensors_which_count_nothing_every_time(dtype):
    grads = [Guarded(moderate_values(700, dtype, seed), seed) for seed in range(3)]
    table, values = cases.make_table(grads, dtype), [grad.values for grad in grads]
    for weights in (None, [0.5, 0.25, 1 / 3], [0.5, 0.25, 1.0], None):
        table.set_weights(weights)
        assert run(table)[0].item() == pytest.approx(sum_of_squares(values, weights), rel=TOLERANCE)
    grads[1].buffer.fill_(NAN)
    table.set_addresses((grads[0].tensor.data_ptr(), 0, grads[2].tensor.data_ptr()))
    for _ in range(2):
        total, found_inf = run(table)
        assert total.item() == pytest.approx(sum_of_squares([values[0], values[2]]), rel=TOLERANCE)
        assert found_inf == 0
        assert table.bits[:, 0].tolist() == [0, 0, 0]
    table.set_addresses((0, 0, 0))
    assert run(table)[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_are_bitwise_equal_wherever_the_tensors_lie(dtype):
    totals = []
    for _ in range(2):
        grads = [Guarded(moderate_values(900, dtype, seed), seed) for seed in range(4)]
        table = cases.make_table(grads, dtype)
        for _ in range(2):
            totals.append(run(table, 3.0)[0])
        # Equally far from a 16-byte boundary, but elsewhere.
        moved = [Guarded(grad.values, seed) for seed, grad in enumerate(grads)]
        table.set_addresses(tuple(grad.tensor.data_ptr() for grad in moved))
        totals.append(run(table, 3.0)[0])
    for total in totals[1:]:
        assert_untouched(total, totals[0])


@pytest.mark.parametrize("n_tensors", [PARTIALS_BLOCK, PARTIALS_BLOCK + 1])
def test_all_partial_sums_are_added(n_tensors):
    grad = Guarded(torch.tensor([3.0]))
    table = GradTable([1] * n_tensors, torch.float32, DEVICE, SMALL)
    table.set_addresses((0,) * (n_tensors - 2) + (grad.tensor.data_ptr(),) * 2)
    assert run(table)[0] == 18.0
    assert len(table.partials) == -(-n_tensors // PARTIALS_BLOCK) * PARTIALS_BLOCK


def test_a_raised_flag_is_left_raised():
    table = cases.make_table([Guarded(torch.ones(40))], torch.float32)
    flags = torch.tensor([5.0, 1.0, 7.0], device=DEVICE)
    totals = torch.full((7,), NAN, dtype=torch.float64, device=DEVICE)
    for each, sum_of_it in ((table, 40), (GradTable([], torch.float32, DEVICE), 0)):
        launch_sum_of_squares(each, torch.ones((), device=DEVICE), flags[1], totals[1:6])
        assert flags.tolist() == [5.0, 1.0, 7.0]
        assert totals[1:6].tolist() == [sum_of_it, 1, 0, 1, 1]
        assert totals[::6].isnan().all()


@pytest.mark.parametrize("numels", [[], [0], [0, 0]])
def test_no_elements_are_finished_without_a_pass_over_them(numels):
    assert run(GradTable(numels, torch.float16, DEVICE)) == (0, 0)


def test_a_tensor_past_int32_elements():
    long = cases.PastInt32()
    assert run(long.table) == (INF, 1)  # PastInt32 has an Inf near its end
    long.assert_holds(long.before)
    long.grad[-9000] = 0.0
    finite = long.before.where(long.before.isfinite(), torch.zeros(()))
    assert run(long.table)[0].item() == pytest.approx(sum_of_squares([finite]), rel=TOLERANCE)

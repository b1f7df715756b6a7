"""Unscale and clip in one pass, bit for bit against torch's two."""

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, INF, NAN, SMALL, Guarded, assert_same, assert_untouched, finite_values

from scaler_triton.kernels import abi
from scaler_triton.kernels.clip import launch_clip
from scaler_triton.kernels.config import DEFAULT

# Scale and max_norm, which is about the coefficient of a norm of 1; in fp64 a third is not the fp32 one.
FACTORS = [(65536.0, 0.3), (65536.0, 1.0), (3.0, 1 / 3), (1.0, 2.0**-20), (2.0**-24, 1e-30)]


def norm_of(squares):
    """torch's norm."""
    return torch.tensor(squares, dtype=torch.float64).sqrt().float()


def torchs(values, scale, max_norm, squares=1.0, flag=0.0):
    """What torch's unscale and torch's clipping make of copies, on the CPU."""
    grads, _ = cases.expected_unscale(values, cases.inverse_of(torch.tensor(scale)))
    torch._foreach_mul_(grads, torch.ones(()) if flag else (max_norm / (norm_of(squares) + 1e-6)).clamp(max=1.0))
    return grads


def run_clip(table, scale, max_norm, *, squares=1.0, flag=0.0):
    """Neighbours of what is read are NaN, and so is what only ranks ask for: who reads one shows it."""
    scales = torch.tensor([NAN, scale, NAN], device=DEVICE)
    totals = torch.tensor([NAN, squares, flag, *[NAN] * 4], dtype=torch.float64, device=DEVICE)
    norms, before = torch.full((3,), NAN, device=DEVICE), totals.cpu().clone()
    with cases.launched(*["_clip_kernel"][: table.n_chunks]):
        launch_clip(table, scales[1], totals[1:6], max_norm, norms[1])
    assert_same(scales, torch.tensor([NAN, scale, NAN]))
    assert_same(totals, before)
    assert_same(norms, torch.tensor([NAN, norm_of(squares).item() if table.n_chunks else NAN, NAN]))


def check_clip(grads, scale, max_norm, *, squares=1.0, flag=0.0, config=SMALL):
    """One launch over `grads` gives what torch's two steps give, and touches nothing else."""
    table = cases.make_table(grads, grads[0].tensor.dtype, config)
    run_clip(table, scale, max_norm, squares=squares, flag=flag)
    want = torchs([grad.values for grad in grads], scale, max_norm, squares, flag)
    for grad, want_grad in zip(grads, want, strict=True):
        grad.assert_holds(want_grad)
    assert not table.bits.any()


@pytest.mark.parametrize("max_norm", [0.0, 1e-45, 1e-6, 0.1, 1.0, 3.3, 1e30, 1e38, 1e300, INF])
def test_norm_and_coefficient_are_torchs_to_the_bit(max_norm):
    for squares in (0.0, 5e-324, 1e-300, 1e-14, 1e-12, 0.1, 1.0 / 3, 2.0, 1e10 / 7, 1e76, 1e77, 1e308, INF, NAN):
        check_clip([Guarded(torch.tensor([1.0, -3.0, 0.1]), 1)], 1.0, max_norm, squares=squares)


def settled(totals, ranks):
    """What a pass leaves in the status, and that it writes beside neither it nor the norm."""
    totals = torch.tensor(totals, dtype=torch.float64, device=DEVICE)
    out = torch.full((8,), NAN, device=DEVICE)
    norm, status, scale = out[7], out[1:5], torch.ones((), device=DEVICE)
    grads = [Guarded(torch.ones(2 * SMALL.chunk_elements(4)), 1), Guarded(torch.ones(3))]
    table = cases.make_table(grads, torch.float32)
    table.set_addresses((0, grads[1].tensor.data_ptr()))  # the program that settles has nothing to clip
    launch_clip(table, scale, totals, 0.5, norm, status, ranks)
    assert not torch.equal(grads[1].tensor.cpu(), grads[1].values) or totals[abi.OVERFLOWS] != 0
    assert out[[0, 5, 6]].isnan().all()
    assert not norm.isnan()
    return status.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 70_000])
def test_what_ranks_have_added_up_is_settled(ranks):
    for found, failed in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (ranks, ranks)):
        want = [float(found != 0), float(failed != 0), 8.0 * ranks, 0.0]
        assert settled([4.0, found, failed, 8.0 * ranks, 0.125 * ranks], ranks) == want


@pytest.mark.parametrize(("one", "other"), [(8.0, 8.00001), (8.0, 8.008), (8.0, 64.0), (2.0**-126, 2.0**127)])
def test_how_far_scales_lie_apart_is_worked_out_in_fp64(one, other):
    scales, inverses = one + other, 1 / one + 1 / other
    *_, total, excess = settled([4.0, 0.0, 0.0, scales, inverses], 2)
    assert total == torch.tensor(scales, dtype=torch.float64).float().item()
    want = torch.tensor(scales * inverses / 4 - 1, dtype=torch.float64).float().item()
    assert excess == pytest.approx(want, rel=1e-4)  # 2^-53 of 1 in 4e-13


@pytest.mark.parametrize("flag", [1.0, 4.0, NAN])
def test_after_an_overflow_gradients_are_only_unscaled(flag):
    for squares in (1.0, INF, NAN):
        check_clip([Guarded(finite_values(700, torch.float32, 0), 1)], 8.0, 1e-3, squares=squares, flag=flag)


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_torchs(dtype, factors):
    check_clip(cases.every_shape(dtype), *factors)


@pytest.mark.parametrize("max_norm", [0.3, 0.9999])
@pytest.mark.parametrize("scale", [65536.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_torchs(dtype, scale, max_norm):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    check_clip([Guarded(patterns, 3)], scale, max_norm, config=DEFAULT)


# Scale, max_norm and squares.
ODD = [(INF, 0.5, 1.0), (NAN, 0.5, 1.0), (2.0, 0.5, NAN), (2.0, INF, INF)]
ODD += [(2.0, 0.0, 1.0), (-2.0, 0.5, 1.0), (0.0, 2.0, 1.0)]


@pytest.mark.parametrize(("scale", "max_norm", "squares"), ODD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_that_no_healthy_step_has(dtype, scale, max_norm, squares):
    check_clip(cases.every_shape(dtype)[-8:], scale, max_norm, squares=squares)


@pytest.mark.parametrize("dtype", DTYPES)
def test_address_zero_is_skipped(dtype):
    grads = [Guarded(finite_values(700, dtype, seed), seed) for seed in range(3)]
    table = cases.make_table(grads, dtype)
    table.set_addresses((grads[0].tensor.data_ptr(), 0, grads[2].tensor.data_ptr()))
    run_clip(table, 4.0, 0.5)
    want = torchs([grads[0].values, grads[2].values], 4.0, 0.5)
    grads[0].assert_holds(want[0])
    grads[2].assert_holds(want[1])
    assert_untouched(grads[1].buffer, grads[1].start)


@pytest.mark.parametrize(("max_norm", "flag"), [(2.0, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_of_one_write_nothing(dtype, max_norm, flag):
    grad = Guarded(cases.with_a_signalling_nan(finite_values(700, dtype, seed=0)), 1)
    run_clip(cases.make_table([grad], dtype), 1.0, max_norm, flag=flag)
    assert_untouched(grad.buffer, grad.start)


@pytest.mark.parametrize("config", cases.CONFIGS)
def test_other_configurations_give_the_same(config):
    for dtype in DTYPES:
        grads = [Guarded(finite_values(config.chunk_elements(dtype.itemsize) + 13, dtype, 0), 1)]
        check_clip(grads, 3.0, 0.3, config=config)


def test_a_tensor_past_int32_elements():
    long = cases.PastInt32()
    run_clip(long.table, 3.0, 0.5)
    long.assert_holds(torchs([long.before], 3.0, 0.5)[0])

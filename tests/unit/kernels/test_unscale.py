"""Unscale and check in one pass, bit for bit against torch's own op; and the check that writes nothing."""

import math
import random

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, INF, NAN, SMALL, Guarded, assert_same, assert_untouched, finite_values

from scaler_triton.kernels.config import DEFAULT, LaunchConfig
from scaler_triton.kernels.unscale import launch_check, launch_unscale

SCALES = [65536.0, 1.0, 3.0, 1 / 3, 2.0**-24, 1e30]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
# Each configuration is compiled anew for a GPU; the interpreter takes any.
COMPILED = cases.NATIVE or (cases.SIMULATED is not None and not cases.THOROUGH)
SHAPES = [SMALL] if COMPILED else [SMALL, LaunchConfig(1, 1, 1), LaunchConfig(1, 2, 2), LaunchConfig(2, 1, 3)]


def run(start, table, *scale, **options):
    """The flag afterwards, on the CPU."""
    with cases.launched(*["_unscale_kernel"][: table.n_chunks]), cases.guarded_flag() as found_inf:
        start(table, *scale, found_inf, **options)
    return found_inf.cpu()


def run_unscale(table, scale, *, inverse=False):
    return run(launch_unscale, table, torch.tensor(scale, device=DEVICE), inverse=inverse)


def run_check(table):
    return run(launch_check, table)


def check_unscale(grads, scale, *, inverse=False, config=SMALL):
    """One launch over `grads` gives torch's gradients and flag, every tensor's bits, and touches nothing else."""
    table = cases.make_table(grads, grads[0].tensor.dtype, config)
    found_inf = run_unscale(table, scale, inverse=inverse)
    factor = torch.tensor(scale) if inverse else cases.inverse_of(torch.tensor(scale))
    want, want_found = cases.expected_unscale([grad.values for grad in grads], factor)
    for grad, want_grad in zip(grads, want, strict=True):
        grad.assert_holds(want_grad)
    assert_same(found_inf, want_found)
    assert table.bits[:, 0].tolist() == [cases.expected_bits(grad.values) for grad in grads]


def check_only(grads, config=SMALL):
    """One check gives the flag and every tensor's bits, and leaves every byte as it was."""
    table = cases.make_table(grads, grads[0].tensor.dtype, config)
    found_inf = run_check(table)
    bits = [cases.expected_bits(grad.values) for grad in grads]
    assert table.bits[:, 0].tolist() == bits
    assert found_inf == float(any(bits))
    for grad in grads:
        assert_untouched(grad.buffer, grad.start)


@pytest.mark.parametrize("inverse", [False, True], ids=["scale", "inverse"])
@pytest.mark.parametrize("scale", SCALES)
@EVERY_DTYPE
def test_finite_gradients_are_torchs(dtype, scale, inverse):
    check_unscale(cases.every_shape(dtype), scale, inverse=inverse)


@pytest.mark.parametrize("scale", [*SCALES, 2.0**-10, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_torchs(dtype, scale):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    check_unscale([Guarded(patterns, 3)], scale, config=DEFAULT)


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@EVERY_DTYPE
def test_a_nonfinite_element_is_seen_wherever_it_is_and_a_check_writes_nothing(dtype, special):
    vector, chunk = 16 // dtype.itemsize, SMALL.chunk_elements(dtype.itemsize)
    block, numel = SMALL.block_elements(dtype.itemsize), chunk + 2 * vector + 1
    grads = [Guarded(finite_values(numel, dtype, seed=0))]
    for offset in cases.OFFSETS:
        head = -offset % vector
        tail = head + (numel - head) // vector * vector
        for place in {0, max(head - 1, 0), head, block - 1, block, head + chunk - 1, head + chunk, tail - 1, tail}:
            values = finite_values(numel, dtype, seed=place)
            values[min(place, numel - 1)] = special
            grads.append(Guarded(values, offset))
    check_only(grads)
    check_unscale(grads, 3.0)


@EVERY_DTYPE
def test_an_edge_that_overflows_only_when_multiplied_is_not_flagged(dtype):
    # All warps load the few elements at a tensor's edges and one stores them: who loads late must not see
    # the product. Only a GPU can be late, so there it is tried often.
    values = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    for _ in range(cases.TRIES):
        grads = [Guarded(values, index % 5) for index in range(cases.MANY)]
        check_unscale(grads, 2.0**10, inverse=True, config=DEFAULT)


@EVERY_DTYPE
def test_address_zero_is_skipped(dtype):
    grads = [Guarded(finite_values(700, dtype, seed), seed) for seed in range(3)]
    grads[1].buffer.fill_(NAN)
    table = cases.make_table(grads, dtype)
    table.set_addresses((grads[0].tensor.data_ptr(), 0, grads[2].tensor.data_ptr()))
    assert run_check(table) == 0
    assert run_unscale(table, 4.0) == 0
    want, _ = cases.expected_unscale([grads[0].values, grads[2].values], torch.tensor(0.25))
    grads[0].assert_holds(want[0])
    grads[2].assert_holds(want[1])
    assert grads[1].buffer.isnan().all()
    assert table.bits[:, 0].tolist() == [0, 0, 0]


def test_flag_and_bits_are_sticky_until_cleared():
    bad, good = Guarded(torch.tensor([1.0, NAN])), Guarded(torch.tensor([1.0, 2.0]))
    table = cases.make_table([bad], torch.float32)
    scales, flags = (torch.tensor([NAN, number, NAN], device=DEVICE) for number in (2.0, 0.0))
    for element in (NAN, INF):
        bad.tensor[1] = element
        launch_unscale(table, scales[1], flags[1], inverse=False)
    table.set_addresses((good.tensor.data_ptr(),))
    launch_unscale(table, scales[1], flags[1], inverse=False)
    assert table.bits[:, 0].tolist() == [3]
    assert_same(flags, torch.tensor([NAN, 1.0, NAN]))
    assert_same(scales, torch.tensor([NAN, 2.0, NAN]))
    good.assert_holds(torch.tensor([0.5, 1.0]))


@EVERY_DTYPE
def test_an_inverse_of_one_writes_nothing(dtype):
    grad = Guarded(cases.with_a_signalling_nan(finite_values(700, dtype, seed=0)), 1)
    assert run_unscale(cases.make_table([grad], dtype), 1.0) == 1
    assert_untouched(grad.buffer, grad.start)


@pytest.mark.parametrize("config", cases.CONFIGS)
def test_other_configurations_give_the_same(config):
    for dtype in DTYPES:
        values = [finite_values(config.chunk_elements(dtype.itemsize) + 13, dtype, seed) for seed in range(2)]
        values[1][-3] = INF
        check_unscale([Guarded(each, offset) for offset, each in enumerate(values)], 3.0, config=config)


def test_a_tensor_past_int32_elements():
    long = cases.PastInt32()
    assert run_check(long.table) == 1
    long.assert_holds(long.before)
    long.table.bits.zero_()
    assert run_unscale(long.table, 3.0) == 1
    assert long.table.bits[:, 0].tolist() == [2]
    long.assert_holds(cases.expected_unscale([long.before], cases.inverse_of(torch.tensor(3.0)))[0][0])


@pytest.mark.parametrize("seed", range(150 if cases.NATIVE or cases.THOROUGH else 75))
def test_any_tensors_and_any_factors(seed):
    """Infinite, zero and NaN factors never come from a healthy scaler, but the op is public."""
    draw = random.Random(seed)
    dtype, config, values, offsets = draw.choice(DTYPES), draw.choice(SHAPES), [], []
    for _ in range(draw.randint(1, 5)):
        values.append(finite_values(draw.randint(0, 1300), dtype, seed=draw.randint(0, 1000)))
        offsets.append(draw.randint(0, 9))
        for _ in range(draw.randint(0, 3) if len(values[-1]) else 0):
            values[-1][draw.randrange(len(values[-1]))] = draw.choice([NAN, INF, -INF])
    scale = math.ldexp(draw.uniform(1, 2), draw.randint(-126, 125))
    factor = draw.choice([scale, -scale, 0.0, -0.0, INF, NAN, math.ldexp(1.0, draw.randint(-149, -127))])
    grads = list(map(Guarded, values, offsets))
    check_only(grads, config)
    check_unscale(grads, scale, config=config)
    check_unscale(list(map(Guarded, values, offsets)), factor, inverse=True, config=config)

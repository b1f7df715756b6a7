"""The check that reads every gradient and writes none."""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    INF,
    NAN,
    SMALL,
    Guarded,
    PastInt32,
    assert_untouched,
    expected_bits,
    finite_values,
    make_table,
    run_check,
)


def check_only(grads):
    """One launch gives the flag and every tensor's bits, and leaves every byte as it was."""
    table = make_table(grads, grads[0].tensor.dtype)
    found_inf = run_check(table)
    assert table.bits[:, 0].tolist() == [expected_bits(grad.values) for grad in grads]
    assert found_inf == float(any(expected_bits(grad.values) for grad in grads))
    for grad in grads:
        assert_untouched(grad.buffer, grad.start)


def shapes(dtype):
    vector, chunk = 16 // dtype.itemsize, SMALL.chunk_elements(dtype.itemsize)
    numels = (0, 1, vector - 1, vector, vector + 1, chunk - 1, chunk, chunk + 1, 1009)
    return [(numel, offset) for numel in numels for offset in (0, 1, 3, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_gradients_raise_no_flag(dtype):
    check_only([Guarded(finite_values(numel, dtype, 0), offset) for numel, offset in shapes(dtype)])


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_gradients_are_told_apart(dtype, special):
    grads = []
    for numel, offset in shapes(dtype):
        values = finite_values(numel, dtype, offset)
        values[-1:] = special
        grads += [Guarded(values, offset), Guarded(finite_values(numel, dtype, offset), offset)]
    check_only(grads)


@pytest.mark.parametrize("place", [0, 8, 40, -1])
@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_raises_the_flag(dtype, special, place):
    values = finite_values(50, dtype, seed=0)
    values[place] = special
    check_only([Guarded(values, 1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kinds_in_one_tensor(dtype):
    values = finite_values(1009, dtype, seed=0)
    values[3], values[1000] = NAN, -INF
    check_only([Guarded(values, 3)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_address_zero_is_skipped(dtype):
    good, gone = Guarded(finite_values(20, dtype, seed=0)), Guarded(torch.full((20,), NAN, dtype=dtype))
    table = make_table([good, gone], dtype)
    table.set_addresses([good.tensor.data_ptr(), 0])
    assert run_check(table) == 0
    assert table.bits[:, 0].tolist() == [0, 0]


def test_nothing_is_launched_for_no_elements():
    assert run_check(make_table([], torch.float32)) == 0


def test_a_tensor_past_int32_elements():
    long = PastInt32()
    assert run_check(long.table) == 1
    assert long.table.bits[:, 0].tolist() == [2]
    long.assert_holds(long.before)

"""What gradients hold: NumPy's numbers for every bit pattern, size and offset, in whatever order programs run."""

import itertools

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, INF, NAN, SMALL, Guarded, assert_untouched, finite_values, launched, make_table

from scaler_triton.kernels import abi
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.measure import launch_measure


def expected(values):
    """Largest, zeros, subnormals and elements of several tensors, by NumPy in fp64."""
    size = torch.cat([each.double().reshape(-1) for each in values]).abs().numpy()
    finite = size[size < INF]
    small = (size > 0) & (size < 2.0**-14)
    return [max(finite, default=0.0), float((size == 0).sum()), float(small.sum()), float(size.size)]


def new_total():
    """A cleared row; what lies beside its four numbers must not be written."""
    total = torch.full((abi.MEASURED + 2,), NAN, dtype=torch.float64, device=DEVICE)
    total[1:-1] = 0.0
    return total


def measure(table, total):
    """What a row holds after one launch over a table."""
    with launched(*["_measure_kernel"][: table.n_chunks]):
        launch_measure(table, total[1:-1])
    numbers = total.tolist()
    assert [number != number for number in numbers] == [True] + [False] * abi.MEASURED + [True]
    return numbers[1:-1]


def measured(grads, config=SMALL):
    """What one launch over gradients measures; it leaves every byte of them as it was."""
    found = measure(make_table(grads, grads[0].tensor.dtype, config), new_total())
    for grad in grads:
        assert_untouched(grad.buffer, grad.start)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    parts = [every, every[every.isfinite()], every[every.abs() < 2.0**-14], every[~every.isfinite()]]
    for values in parts:
        assert measured([Guarded(values.clone(), 3)], DEFAULT) == expected([values])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_and_offset(dtype):
    info = torch.finfo(dtype)
    specials = [0.0, -0.0, 2.0**-14, -(2.0**-14), 2.0**-15, info.tiny, info.tiny / 2, INF, -INF, NAN, 1.0]
    together = []
    for seed, (numel, offset) in enumerate(itertools.product(cases.edge_numels(dtype), cases.OFFSETS)):
        values = finite_values(numel, dtype, seed) * (1 if seed % 2 else 2.0**-20)
        for place, special in enumerate(specials[: numel // 2]):
            values[(7 * place + seed) % numel] = special
        together.append(Guarded(values, offset))
        if numel and seed % 5 == 0:  # each of these alone, too
            assert measured([Guarded(values, offset)]) == expected([values])
    assert measured(together) == expected([grad.values for grad in together])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_next_to_a_bound_are_on_their_side_of_it(dtype):
    bounds = torch.tensor([2.0**-14, torch.finfo(dtype).max, 0.0], dtype=dtype)
    bits = cases.as_bits(bounds)
    values = torch.cat([bits - (bits > 0).to(bits.dtype), bits, bits + 1]).view(dtype)
    for each in (values, -values):
        assert measured([Guarded(each, 1)]) == expected([each])


def test_several_passes_add_up_and_missing_gradients_count_nothing():
    first, second = finite_values(5000, torch.float32, 1), torch.zeros(33, dtype=torch.float16)
    total, held = new_total(), (Guarded(first), Guarded(second, 1))
    measure(make_table([held[0]], torch.float32), total)
    assert measure(make_table([held[1]], torch.float16), total) == expected([first, second.float()])
    table = make_table([held[0], Guarded(first)], torch.float32)
    table.set_addresses((0, held[0].tensor.data_ptr()))
    assert measure(table, new_total()) == expected([first])
    assert measure(make_table([], torch.float32), total) == expected([first, second.float()])


@pytest.mark.parametrize("known", [0.0, 1e3, 1e300])
def test_the_largest_stays_unless_there_is_a_larger_one(known):
    """Whether the largest is in the first chunk, the last, or both; and however large the one known before is."""
    values = torch.linspace(-1e4, 1e4, 3000)
    for each in (values, values.flip(0), values.abs()):
        total = new_total()
        total[1 + abi.LARGEST] = known
        assert measure(make_table([Guarded(each, 1)], torch.float32), total)[abi.LARGEST] == max(known, 1e4)


def test_many_programs_at_once_give_the_same_in_every_run():
    grads = [Guarded(finite_values(1000, torch.float16, seed) * 2.0**-seed, seed % 8) for seed in range(cases.MANY)]
    table, want = make_table(grads, torch.float16), expected([grad.values for grad in grads])
    assert [measure(table, new_total()) for _ in range(cases.TRIES)] == [want] * cases.TRIES


def test_a_tensor_past_int32_elements():
    long = cases.PastInt32()
    zeros = torch.zeros(7 + DEFAULT.chunk_elements(2), dtype=torch.float16)  # before and in the first chunk
    assert measure(long.table, new_total()) == expected([zeros, long.before])
    long.assert_holds(long.before)

"""Unscale and check in one pass, bit for bit against torch's own op; and the check that writes nothing."""

import pytest
import torch
from kernel_cases import (
    CONFIGS,
    DEVICE,
    DTYPES,
    INF,
    MANY,
    NAN,
    OFFSETS,
    SMALL,
    TRIES,
    Guarded,
    PastInt32,
    assert_same,
    assert_untouched,
    check_only,
    check_unscale,
    every_shape,
    expected_unscale,
    finite_values,
    inverse_of,
    launched,
    make_table,
    run_check,
    run_unscale,
    with_a_signalling_nan,
)
from triton.runtime.interpreter import InterpreterBuilder

from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.launch import INTERPRETED
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_unscale

SCALES = [65536.0, 1.0, 3.0, 1 / 3, 2.0**-24, 1e30]


def vector_of(dtype):
    return 16 // dtype.itemsize


@pytest.mark.parametrize("inverse", [False, True], ids=["scale", "inverse"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_gradients_are_torchs(dtype, scale, inverse):
    check_unscale(every_shape(dtype), torch.tensor(scale), inverse=inverse)


@pytest.mark.parametrize("scale", [*SCALES, 2.0**-10, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_torchs(dtype, scale):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    check_unscale([Guarded(patterns, 3)], torch.tensor(scale), inverse=False, config=DEFAULT)


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nonfinite_element_is_seen_wherever_it_is(dtype, special):
    vector, chunk = vector_of(dtype), SMALL.chunk_elements(dtype.itemsize)
    block, numel = SMALL.block_elements(dtype.itemsize), chunk + 2 * vector + 1
    grads = []
    for offset in OFFSETS:
        head = -offset % vector
        tail = head + (numel - head) // vector * vector
        for place in {0, max(head - 1, 0), head, block - 1, block, head + chunk - 1, head + chunk, tail - 1, tail}:
            values = finite_values(numel, dtype, seed=place)
            values[min(place, numel - 1)] = special
            grads.append(Guarded(values, offset))
    grads.append(Guarded(finite_values(numel, dtype, seed=0)))
    check_unscale(grads, torch.tensor(3.0), inverse=False)


@pytest.mark.parametrize("special", [None, NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_check_tells_what_is_not_finite_and_writes_nothing(dtype, special):
    grads = every_shape(dtype)
    if special is not None:
        bad = [grad.values.clone() for grad in grads]
        for values in bad:
            values[-1:] = special
        grads += [Guarded(values, index % 4) for index, values in enumerate(bad)]
    check_only(grads)


# Infinite, zero and NaN factors never come from a healthy scaler, but the op is public.
@pytest.mark.parametrize("inv_scale", [2.0**20, -2.0, 0.0, -0.0, INF, NAN, 2.0**-149, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flag_and_bits_are_of_the_input_and_not_of_the_product(dtype, inv_scale):
    chunk = SMALL.chunk_elements(dtype.itemsize)
    grads = [Guarded(finite_values(chunk + 9, dtype, seed), seed % 4) for seed in range(5)]
    check_unscale(grads, torch.tensor(inv_scale), inverse=True)  # nothing bad: the flag stays 0

    for seed, special in enumerate(([NAN], [INF], [-INF], [NAN, INF])):
        values = finite_values(chunk + 9, dtype, seed)
        values[:: len(values) // len(special)][: len(special)] = torch.tensor(special, dtype=dtype)
        grads.append(Guarded(values, seed))
    fresh = [Guarded(grad.values, index % 4) for index, grad in enumerate(grads)]
    check_unscale(fresh, torch.tensor(inv_scale), inverse=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_edge_that_overflows_only_when_multiplied_is_not_flagged(dtype):
    # All warps load the few elements at a tensor's edges and one stores them: who loads late must not see
    # the product. Only a GPU can be late, so there it is tried often.
    values = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    for _ in range(TRIES):
        grads = [Guarded(values, index % 5) for index in range(MANY)]
        check_unscale(grads, torch.tensor(2.0**10), inverse=True, config=DEFAULT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_address_zero_is_skipped(dtype):
    grads = [Guarded(finite_values(700, dtype, seed), seed) for seed in range(3)]
    grads[1].buffer.fill_(NAN)
    table = make_table(grads, dtype)
    table.set_addresses([grads[0].tensor.data_ptr(), 0, grads[2].tensor.data_ptr()])

    assert run_check(table) == 0
    assert run_unscale(table, torch.tensor(4.0), inverse=False) == 0

    want, _ = expected_unscale([grads[0].values, grads[2].values], torch.tensor(0.25))
    grads[0].assert_holds(want[0])
    grads[2].assert_holds(want[1])
    assert grads[1].buffer.isnan().all()
    assert table.bits[:, 0].tolist() == [0, 0, 0]


def test_flag_and_bits_are_sticky_until_cleared():
    bad, good = Guarded(torch.tensor([1.0, NAN])), Guarded(torch.tensor([1.0, 2.0]))
    table = make_table([bad], torch.float32)
    assert run_unscale(table, torch.tensor(2.0), inverse=True) == 1
    bad.tensor[1] = INF
    run_unscale(table, torch.tensor(2.0), inverse=True)
    assert table.bits[:, 0].tolist() == [3]
    table.set_addresses([good.tensor.data_ptr()])
    assert run_unscale(table, torch.tensor(2.0), inverse=True) == 0
    assert table.bits[:, 0].tolist() == [3]
    table.bits.zero_()
    assert table.bits[:, 0].tolist() == [0]


def test_a_raised_flag_is_left_raised_and_its_neighbours_alone():
    grads = [Guarded(torch.ones(40))]
    table = make_table(grads, torch.float32)
    flags = torch.tensor([5.0, 1.0, 7.0], device=DEVICE)
    scales = torch.tensor([NAN, 2.0, NAN], device=DEVICE)
    with launched("_unscale_kernel"):
        launch_unscale(table, scales[1], flags[1], inverse=False)
    assert flags.tolist() == [5.0, 1.0, 7.0]
    assert_same(scales, torch.tensor([NAN, 2.0, NAN]))
    grads[0].assert_holds(torch.full((40,), 0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_inverse_of_one_writes_nothing(dtype):
    values = with_a_signalling_nan(finite_values(700, dtype, seed=0))
    grad = Guarded(values, 1)
    assert run_unscale(make_table([grad], dtype), torch.tensor(1.0), inverse=False) == 1
    assert_untouched(grad.tensor, values)


@pytest.mark.parametrize("config", CONFIGS)
def test_other_configurations_give_the_same(config):
    for dtype in DTYPES:
        chunk = config.chunk_elements(dtype.itemsize)
        grads = [Guarded(finite_values(chunk + 13, dtype, seed), seed) for seed in range(2)]
        grads[1].start[-20] = grads[1].buffer[-20] = INF
        check_unscale(grads, torch.tensor(3.0), inverse=False, config=config)


def test_nothing_is_launched_for_no_elements():
    for numels in ([], [0], [0, 0]):
        table = GradTable(numels, torch.float16, DEVICE)
        assert table.n_chunks == 0
        assert run_unscale(table, torch.tensor(2.0), inverse=False) == 0
        assert run_check(table) == 0


def test_a_tensor_past_int32_elements():
    long = PastInt32()
    assert run_check(long.table) == 1
    long.assert_holds(long.before)
    long.table.bits.zero_()
    assert run_unscale(long.table, torch.tensor(3.0), inverse=False) == 1
    assert long.table.bits[:, 0].tolist() == [2]
    long.assert_holds(expected_unscale(long.before, inverse_of(torch.tensor(3.0)))[0])


def test_a_later_generation_replaces_the_mark_in_its_place():
    grad = Guarded(torch.tensor([NAN, 1.0]))
    table = make_table([grad], torch.float32)
    for generation, element, want in ((1, NAN, [0, 5, 0, 0]), (2, INF, [0, 5, 10, 0]), (5, INF, [0, 22, 10, 0])):
        table.generation = torch.tensor([generation], dtype=torch.int32, device=DEVICE)
        grad.tensor[0] = element
        assert run_check(table) == 1
        assert table.bits.tolist() == [want]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU traps a misaligned vector; the interpreter must be asked")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bodies_are_whole_aligned_vectors(dtype, monkeypatch):
    vector, block, seen = vector_of(dtype), SMALL.block_elements(dtype.itemsize), []

    def load(self, ptrs, mask, *args):
        if ptrs.data.size == block and mask.data.any():
            seen.append(int(mask.data.sum()))
            assert ptrs.data.flat[0] % 16 == 0
            assert mask.data.sum() % vector == 0
            assert mask.data[: mask.data.sum()].all()
        return original(self, ptrs, mask, *args)

    original = InterpreterBuilder.create_masked_load
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    grads = [Guarded(finite_values(numel, dtype, 0), offset) for offset in range(9) for numel in (30, 700)]
    check_unscale(grads, torch.tensor(2.0), inverse=False)
    # Everything but the edges, which are shorter than a vector each.
    assert sum(seen) > sum(grad.tensor.numel() - 2 * vector for grad in grads)

"""The torch path: adjacent gradients merged, checks that only read, the scale's arithmetic."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import assert_same
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scaler_triton.inverse import inverse
from scaler_triton.neighbours import Neighbours
from torch import Tensor

from scaler_triton import batch, neighbours, reference, reference_update

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def flag(value: float = 0.0) -> Tensor:
    return torch.tensor(value)


def bucket(sizes: list[int], gaps: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """Return a flat buffer and views of it in order, each followed by a gap."""
    flat = torch.arange(1, sum(sizes) + sum(gaps) + 1).to(dtype)
    views, offset = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        views.append(flat[offset : offset + size])
        offset += size + gap
    return flat, views


def test_neighbours_are_merged_into_one_tensor_and_gaps_are_not_touched() -> None:
    flat, views = bucket([3, 4, 2, 5], [0, 0, 1, 0])
    assert [t.numel() for t in Neighbours().merged(views)] == [9, 5]
    before = flat.clone()
    reference.unscale_(views, torch.tensor(2.0), flag())
    expected = before * 2
    expected[9] = before[9]
    assert_same(flat, expected)


def test_neighbours_that_come_later_are_found() -> None:
    apart = [torch.ones(10), torch.ones(20), torch.ones(3)]
    _, views = bucket([10, 20, 3], [0, 0, 0])
    known = Neighbours()
    assert known.merged(apart) is apart
    calls = next(count for count in range(1, 100) if len(known.merged(views)) == 1)
    assert 1 < calls <= 17  # not at once: looking costs something


def test_after_an_interrupted_search_nothing_beside_gradients_is_merged() -> None:
    memory = torch.ones(16)
    apart, together = ([memory[start : start + 4] for start in (0, 4, third)] for third in (12, 8))
    known = Neighbours()
    assert [t.numel() for t in known.merged(apart)] == [8, 4]

    def interrupted(tensors: Sequence[Tensor]) -> None:
        Neighbours._find(known, tensors)
        raise KeyboardInterrupt

    with mock.patch.object(known, "_find", interrupted), pytest.raises(KeyboardInterrupt):
        known.merged(together)
    assert [t.numel() for t in known.merged(apart)] == [8, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, 0, 1, 10, 19])
def test_large_and_small_ones_are_checked_each_in_its_way(dtype: torch.dtype, bad: int | None) -> None:
    numels = [reference._LARGE_BYTES // dtype.itemsize - index % 2 for index in range(20)]
    tensors = [torch.full((numel,), -0.0, dtype=dtype) for numel in numels]
    if bad is not None:
        tensors[bad][-1] = math.nan
    before = [tensor.clone() for tensor in tensors]
    found_inf = flag()
    reference.check_nonfinite(tensors, found_inf)
    assert found_inf.item() == float(bad is not None)
    for tensor, copy in zip(tensors, before, strict=True):
        assert_same(tensor, copy)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_ones_whose_squares_overflow_are_finite(dtype: torch.dtype, strided: bool, bad: bool) -> None:
    tensor = torch.full((600, 300), 0.9 * torch.finfo(dtype).max ** 0.75, dtype=dtype)
    tensor = tensor.t() if strided else tensor
    tensor[7, 5] = math.inf if bad else 1.0
    found_inf = flag()
    reference.check_nonfinite([tensor], found_inf)
    assert found_inf.item() == float(bad)


def test_neighbours_by_address_only_are_not_merged() -> None:
    left, right = torch.ones(4), torch.ones(4)
    with mock.patch.object(neighbours, "_same_span", wraps=neighbours._same_span) as same:
        assert len(Neighbours().merged([left, right, left[::2], right[1:].view(3, 1).t()])) == 4
    assert same.call_count <= 3


def test_neighbours_in_views_of_foreign_memory_are_not_merged() -> None:
    array = np.ones(10, dtype=np.float32)
    left, right = torch.from_numpy(array[:4]), torch.from_numpy(array)[4:]
    reference.unscale_([left, right], torch.tensor(3.0), flag())
    assert array.tolist() == [3.0] * 10


def test_neighbours_are_known_again_wherever_they_lie() -> None:
    known = Neighbours()
    for start in (0, 3):  # as FSDP1 makes a new flat gradient every step
        flat, views = bucket([start, 3, 4, 2, 5], [0, 0, 0, 1, 0])
        views = [views[3], views[1], views[4], views[2]]  # DDP's buckets are in another order
        with mock.patch.object(known, "_find", wraps=known._find) as find:
            assert sorted(t.numel() for t in known.merged(views)) == [5, 9]
        assert find.called == (start == 0)
        reference.unscale_(views, torch.tensor(2.0), flag(), known)
        assert flat[start] == 2 * (start + 1)
        assert flat[start + 9] == start + 10  # the gap


def test_neighbours_that_move_apart_are_merged_no_more() -> None:
    known = Neighbours()
    _, views = bucket([4, 4], [0, 0])
    assert len(known.merged(views)) == 1
    _, apart = bucket([4, 4], [1, 0])
    assert [t.data_ptr() for t in known.merged(apart)] == [t.data_ptr() for t in apart]
    assert len(known.merged(views)) == 1


def test_as_far_apart_as_before_but_not_in_one_storage() -> None:
    known = Neighbours()
    _, views = bucket([4, 4], [0, 0])
    assert len(known.merged(views)) == 1
    memory = np.arange(8, dtype=np.float32)
    strangers = [torch.from_numpy(memory[:4]), torch.from_numpy(memory[4:])]
    assert len(known.merged(strangers)) == 2
    reference.unscale_(strangers, torch.tensor(2.0), flag(), known)
    assert memory.tolist() == [2.0 * value for value in range(8)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from(DTYPES),
    st.randoms(),
)
@settings(max_examples=100, deadline=None)
def test_merged_or_not_torchs_op_does_the_same(pieces: list[tuple[int, int]], dtype: torch.dtype, rng: object) -> None:
    sizes, gaps = [p[0] for p in pieces], [p[1] for p in pieces]
    flat, views = bucket(sizes, gaps, dtype)
    rng.shuffle(views)  # type: ignore[attr-defined]
    same_flat = flat.clone()
    same_views = [same_flat[v.storage_offset() : v.storage_offset() + v.numel()] for v in views]
    ours, theirs = flag(), flag()
    reference.unscale_(views, torch.tensor(1 / 3), ours)
    torch._amp_foreach_non_finite_check_and_unscale_(same_views, theirs, torch.tensor(1 / 3))
    assert_same(flat, same_flat)
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(24).as_strided((4, 1, 6), (1, 77, 4)), True),
        (torch.ones(()), True),
        (torch.ones(0, 3).t(), True),
        (torch.ones(4, 6)[:, ::2], False),
        (torch.ones(3).expand(2, 3), False),
        (torch.ones(9).as_strided((3, 3), (2, 1)), False),
    ],
)
def test_dense_means_one_span_without_gaps_or_overlap(tensor: Tensor, dense: bool) -> None:
    assert batch.is_dense(tensor.shape, tensor.stride()) is dense


SIZES = [1, 100, 40_000, 300_000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_check_is_exact_wherever_the_bad_element_is(dtype: torch.dtype, size: int, value: float) -> None:
    for position in {0, size // 2, size - 1}:
        tensor = torch.ones(size, dtype=dtype)
        tensor[position] = value
        found = flag()
        reference.check_nonfinite([torch.ones(3, dtype=dtype), tensor], found)
        assert found.item() == float(not math.isfinite(value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sums_that_overflow_are_no_overflow(dtype: torch.dtype, size: int) -> None:
    tensor = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    found = flag()
    reference.check_nonfinite([tensor, -tensor[: size // 2]], found)
    assert found.item() == 0.0
    mixed = torch.full((size + 1,), math.inf, dtype=dtype)
    mixed[::2] = -math.inf
    reference.check_nonfinite([mixed], found)
    assert found.item() == 1.0


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_large_gradients_are_only_read() -> None:
    with mmap.mmap(-1, 4_000_000, prot=mmap.PROT_READ) as memory:  # a write would end the process
        tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.float32))
        found = flag()
        reference.check_nonfinite([tensor, tensor[10:150_000], tensor[5:500_000:3]], found)
        assert found.item() == 0.0
        del tensor


@pytest.mark.parametrize(("value", "flag"), [(1e300, 0.0), (-1e300, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_fp64_is_checked_in_double_where_torchs_op_sees_fp32(value: float, flag: float) -> None:
    """On a GPU it does."""
    tensors = [torch.zeros(0).double(), torch.tensor([1.0, value], dtype=torch.float64), torch.ones(3).double()]
    found_inf = torch.zeros(())
    reference._check_fp64(tensors, found_inf)
    assert found_inf.item() == flag


@pytest.mark.parametrize("scale", [3.0, 65536.0, 2.0**-24])
@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_bf16_where_torchs_op_has_none_is_rounded_once(scale: float, bad: float | None) -> None:
    """As GPUs take it without Triton; here on the CPU, beside the op that is there."""
    ours = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    ours = ours[ours.isfinite()].clone()
    if bad is not None:
        ours[7] = bad
    theirs, found, expected = ours.clone(), flag(), flag()
    inv_scale = inverse(torch.tensor(scale))
    reference._unscale_bf16_([ours[:100], ours[100:]], inv_scale, found)
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], expected, inv_scale)
    assert_same(ours, theirs)
    assert_same(found, expected)


def test_a_bf16_scalar_takes_a_scale_of_one_dimension() -> None:
    """As torch's op does: scales are assigned in either shape."""
    grad = torch.tensor(8.0, dtype=torch.bfloat16)
    reference._unscale_bf16_([grad], torch.tensor([0.25]), flag())
    assert_same(grad, torch.tensor(2.0, dtype=torch.bfloat16))


@given(
    st.floats(2.0**-100, 2.0**127, width=32),
    st.integers(0, 5),
    st.sampled_from([0.0, 1.0]),
    st.floats(1.0, 1e3),
    st.floats(1e-3, 1.0),
    st.integers(1, 6),
)
@example(2.0**127, 0, 0.0, 2 - 2.0**-24, 0.5, 1)  # the least product that rounds to infinity
@settings(max_examples=300, deadline=None)
def test_update_is_torchs_where_torch_is_right(
    scale: float, tracker: int, found: float, growth: float, backoff: float, interval: int
) -> None:
    if tracker >= interval:
        tracker = interval - 1
    results = []
    for update in (reference_update.update_scale_, torch._amp_update_scale_):
        state = (torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32))
        update(*state, flag(found), growth, backoff, interval)
        results.append(state)
    assert_same(results[0][0], results[1][0])
    assert results[0][1].item() == results[1][1].item()


def test_the_tracker_saturates() -> None:
    tracker = torch.tensor(2**31 - 1, dtype=torch.int32)
    reference_update.update_scale_(torch.tensor(2.0), tracker, flag(), 2.0, 0.5, 2**62)
    assert tracker.item() == 2**31 - 1


@pytest.mark.parametrize("gaps", [slice(0, 8, 4), slice(4, 12, 4)], ids=["before", "behind"])
def test_a_tensor_with_gaps_does_not_end_where_its_neighbour_starts(gaps: slice) -> None:
    buffer = torch.full((12,), 4.0)
    reference.unscale_([buffer[gaps], buffer[2:4]], torch.tensor(0.5), flag())
    want = torch.full((12,), 4.0)
    want[gaps] = want[2:4] = 2.0
    assert_same(buffer, want)


def test_a_tensor_with_gaps_among_neighbours_is_left_as_it_is() -> None:
    buffer, gaps = torch.full((8,), 4.0), torch.full((6,), 4.0)
    reference.unscale_([buffer[:3], buffer[3:], gaps[::2]], torch.tensor(0.5), torch.zeros(()))
    assert buffer.tolist() == [2.0] * 8
    assert gaps.tolist() == [2.0, 4.0] * 3

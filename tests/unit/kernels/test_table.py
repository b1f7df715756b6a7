"""The table: the chunk map, and addresses that reach the device once and only when they changed."""

from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, NATIVE, SMALL

from scaler_triton.kernels import table as table_module
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.table import KEPT, SPARE, GradTable


@pytest.mark.parametrize("numels", [[], [0], [1], [512], [513], [0, 1, 0, 1536, 511, 0], [5000, 0, 0, 1], [512] * 7])
def test_chunk_map(numels):
    table = GradTable(numels, torch.float16, DEVICE, SMALL)
    chunk = SMALL.chunk_elements(2)
    want = [(tensor, index) for tensor, numel in enumerate(numels) for index in range(-(-numel // chunk))]
    assert list(zip(table.chunk_tensors.tolist(), table.chunk_indices.tolist(), strict=True)) == want
    assert table.n_chunks == len(want)
    assert table.chunk_tensors.dtype == table.chunk_indices.dtype == table.bits.dtype == torch.int32
    assert table.numels.dtype == table.addresses.dtype == torch.int64
    assert table.numels.tolist() == numels
    assert table.bits[:, 0].tolist() == table.addresses.tolist() == [0] * len(numels)


def test_chunk_map_of_huge_tensors():
    # 2**33 elements: sums of elements, and of chunks times their size, do not fit int32.
    table = GradTable([2**33 + 1, 3, 2**33], torch.float16, DEVICE)
    chunks = 2**33 // DEFAULT.chunk_elements(2)
    assert table.n_chunks == 2 * chunks + 2
    assert table.chunk_indices[[0, chunks, chunks + 1, chunks + 2, -1]].tolist() == [0, chunks, 0, 0, chunks - 1]
    assert table.chunk_tensors[[0, chunks, chunks + 1, chunks + 2, -1]].tolist() == [0, 0, 1, 2, 2]


@pytest.fixture
def table():
    return GradTable([1, 1], torch.float32, DEVICE)


def test_lists_that_come_back_are_not_copied_again_and_the_oldest_gives_way(table):
    rows = {}
    for step in [1, 2, 1, 2, 3]:
        table.set_addresses((16 * step, 32 * step))
        assert rows.setdefault(step, table.addresses) is table.addresses
    assert {step: row.tolist() for step, row in rows.items()} == {step: [16 * step, 32 * step] for step in (1, 2, 3)}
    for step in range(4, 4 + KEPT):
        table.set_addresses((16 * step, 32 * step))
    assert rows[1].tolist() != [16, 32]
    table.set_addresses((16, 32))
    assert table.addresses.tolist() == [16, 32]


def test_rows_are_aligned_alike(table):
    odd = GradTable([1] * 3, torch.float32, DEVICE)
    for step in range(KEPT):
        odd.set_addresses((step, step, step))
        assert odd.addresses.data_ptr() % 16 == odd.numels.data_ptr() % 16 == 0


def test_after_an_interrupted_copy_nothing_is_taken_for_known(table):
    """It may have arrived or not: Ctrl-C in a notebook, whose next step has these addresses, or the ones before."""
    table.set_addresses((16, 32))
    row = mock.Mock(**{"copy_.side_effect": KeyboardInterrupt})
    table._unused.append(row)
    with pytest.raises(KeyboardInterrupt):
        table.set_addresses((48, 64))
    assert table.addresses.tolist() == [16, 32]
    assert table._unused.pop() is row
    table.set_addresses((48, 64))
    assert table.addresses.tolist() == [48, 64]


def test_a_captured_copy_has_a_row_and_a_buffer_for_good_and_a_third_one_none(table):
    """Later steps may write others before the replay, and a replay the old ones at any time."""
    table.set_addresses((16, 32))
    eager, spare = table.addresses, [*table._spare]
    table._is_capturing = lambda: True
    for addresses in ((16, 32), (48, 64)):
        table.set_addresses(addresses)
        assert table.addresses.tolist() == [*addresses]
        assert table.addresses is not eager
    with pytest.raises(RuntimeError, match="captured 2 times in a row: capture one step, then take one outside"):
        table.set_addresses((80, 96))
    assert table.captured == spare[::-1]  # nothing is allocated in a capture
    table._is_capturing = lambda: False
    for step in [1, *range(2 * KEPT)]:
        table.set_addresses((16 * step, 32 * step))
        assert len(table._spare) == SPARE
        assert table.addresses.tolist() == [16 * step, 32 * step]
    assert [[each.tolist() for each in pair] for pair in table.captured] == [[[16, 32]] * 2, [[48, 64]] * 2]
    assert len(table._known) + len(table._unused) == KEPT
    assert table_module._captured.pop() is table


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="pinned memory needs a GPU")
def test_many_steps_ahead_of_the_device_each_see_their_own_addresses():
    table, seen = GradTable([1] * 64, torch.float32, DEVICE), []
    torch.cuda._sleep(200_000_000)  # the host runs ahead
    for step in range(1, 21):
        table.set_addresses((16 * step,) * 64)
        seen.append(table.addresses.clone())
    assert [set(addresses.tolist()) for addresses in seen] == [{16 * step} for step in range(1, 21)]
    assert all(buffer.is_pinned() for _, buffer in table._spare)

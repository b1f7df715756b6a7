"""The table: the chunk map, and addresses that reach the device once and only when they changed."""

from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, NATIVE, SMALL

from scaler_triton.kernels import table as table_module
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.table import GradTable


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


def test_after_an_interrupted_copy_the_addresses_before_are_sent_again():
    """The copy has arrived, but nothing after it has run: Ctrl-C in a notebook, whose next step has the old ones."""
    table = GradTable([1, 1], torch.float32, DEVICE)
    table.set_addresses([16, 32])

    def send(addresses, out):
        out.copy_(torch.tensor(addresses))
        raise KeyboardInterrupt

    interrupted = mock.Mock(captured=(), is_capturing=lambda: False, send=send)
    with mock.patch.object(table, "_staging", interrupted), pytest.raises(KeyboardInterrupt):
        table.set_addresses([48, 64])
    table.set_addresses([16, 32])
    assert table.addresses.tolist() == [16, 32]


class LateEvent:
    """An event that passes when the test says so."""

    passed = True

    def query(self):
        return self.passed

    def record(self, stream):
        self.passed = False


@pytest.fixture
def staging(monkeypatch):
    """The staging of a GPU whose copies take as long as the test likes."""
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(table_module, "_pinned", lambda size: torch.full((size,), -1, dtype=torch.int64))
    made = table_module._Staging(2, torch.device("cuda"))
    made.captures = False
    made.is_capturing = lambda: made.captures
    return made


def test_a_buffer_is_overwritten_only_when_its_copy_has_passed(staging):
    out = torch.zeros(2, dtype=torch.int64)
    for step in range(5):  # the device has not begun to copy: every step needs a buffer of its own
        staging.send([step, step], out)
    assert [buffer.tolist() for buffer, *_ in staging._slots] == [[step, step] for step in range(5)]
    for *_, event in staging._slots:
        event.passed = True
    for step in range(5):
        staging.send([step, step], out)
    assert len(staging._slots) == 5
    assert out.tolist() == [4, 4]


def test_a_captured_copy_has_a_buffer_for_itself_and_for_good_and_a_third_one_none(staging):
    out, before = torch.zeros(2, dtype=torch.int64), staging._spare[-1]
    staging.captures = True
    staging.send([6, 6], out)
    staging.send([7, 7], out)
    with pytest.raises(RuntimeError, match="captured 2 times in a row: capture one step, then take one outside"):
        staging.send([8, 8], out)
    assert out.tolist() == [7, 7]
    staging.captures = False
    for step in range(5):
        staging.send([step, step], out)
    assert [buffer.tolist() for buffer in staging.captured] == [[6, 6], [7, 7]]
    assert staging.captured[0] is before  # nothing is allocated in a capture
    assert len(staging._spare) == staging.SPARE


def test_addresses_that_are_there_already_are_sent_in_a_capture_and_ever_after():
    """Later steps may write others before the replay, and a replay the old ones at any time."""
    table, sent = GradTable([1, 1], torch.float32, DEVICE), []
    table._staging = staging = mock.Mock(captured=[], is_capturing=lambda: False)
    staging.send = lambda values, out: sent.append(list(values))
    for _ in range(2):
        table.set_addresses([16, 32])
    assert sent == [[16, 32]]
    assert not table.is_in_a_graph
    staging.is_capturing = lambda: True
    table.set_addresses([16, 32])
    assert sent == [[16, 32]] * 2
    staging.is_capturing, staging.captured = lambda: False, [torch.zeros(2)]
    table.set_addresses([16, 32])
    assert sent == [[16, 32]] * 3
    assert table.is_in_a_graph
    assert table_module._captured.pop() is table


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="pinned memory needs a GPU")
def test_many_steps_ahead_of_the_device_each_see_their_own_addresses():
    table, seen = GradTable([1] * 64, torch.float32, DEVICE), []
    torch.cuda._sleep(200_000_000)  # the host runs ahead
    for step in range(1, 21):
        table.set_addresses([16 * step] * 64)
        seen.append(table.addresses.clone())
    assert [set(addresses.tolist()) for addresses in seen] == [{16 * step} for step in range(1, 21)]
    assert table._staging._slots[0][0].is_pinned()

"""`python -m scaler_triton audit` on files that somebody made to harm, or that broke."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from saving import Command, save, scaler_state

from scaler_triton.auditing import saved as saved_states


class Bomb:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def cyclic() -> list[Any]:
    """Lists in lists: 40 levels of a hundred, each level one object."""
    inner: list[Any] = []
    for _ in range(40):
        inner = [inner] * 100
    inner.append(inner)
    return inner


def compressed(path: Path) -> None:
    """Rewrite an archive so that it is larger in memory than on disk."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def unreadable(command: Command, text: str) -> None:
    """Rank 1's file is one line, and the exit status says that not all was read."""
    status, said = command()
    assert status == 2
    assert "\nrank 1: rank1.pt: " in said
    assert text in said
    assert "UNKNOWN" in said
    assert "weights_only" not in said


@pytest.fixture
def harmless(tmp_path: Path) -> Path:
    """Two ranks' states; gives the second's."""
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    return tmp_path / "rank1.pt"


def test_a_bomb_does_not_go_off(harmless: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = harmless.parent / "mark"
    torch.save({"scaler": scaler_state(), "x": Bomb(mark)}, harmless)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    unreadable(command, "rank1.pt: holds posix.mkdir, not only tensors and plain values")
    assert not mark.exists()
    torch.load(harmless, weights_only=False)  # it is one
    assert mark.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_bare_pickles_are_not_opened(harmless: Path, command: Command, legacy: bool) -> None:
    mark = harmless.parent / "mark"
    if legacy:
        torch.save(Bomb(mark), harmless, _use_new_zipfile_serialization=False)
    else:
        harmless.write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("random_states_0.pkl", ".metadata", "rank0.pkl", "random_states_rank0.pkl"):
        (harmless.parent / name).write_bytes(pickle.dumps(Bomb(mark)))
    unreadable(command, "not a zip archive")
    assert not mark.exists()


def test_broken_files_are_one_line_each(harmless: Path, command: Command) -> None:
    whole = harmless.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"PK\x05\x06" + bytes(18), os.urandom(1000)):
        harmless.write_bytes(data)
        unreadable(command, "rank1.pt: ")
    harmless.write_bytes(whole[:100] + bytes(100) + whole[200:])
    assert command()[0] in (0, 2)


def test_a_compressed_archive_is_refused(harmless: Path, command: Command) -> None:
    torch.save({"x": torch.zeros(10**6)}, harmless)
    compressed(harmless)
    assert harmless.stat().st_size < 10**5
    unreadable(command, "its archive is compressed")


def test_too_large_a_structure_is_refused(harmless: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from scaler_triton.auditing import saved as saved_states

    monkeypatch.setattr(saved_states, "STRUCTURE_LIMIT", 1000)
    torch.save(["x" * 2000], harmless)
    unreadable(command, "; the limit is 1000")
    renamed = harmless.with_suffix(".zip")  # which torch reads just the same
    with zipfile.ZipFile(harmless) as archive, zipfile.ZipFile(renamed, "w") as copy:
        for record in archive.infolist():
            copy.writestr(record.filename.replace("data.pkl", "DATA.PKL"), archive.read(record))
    renamed.replace(harmless)
    assert torch.load(harmless, weights_only=True) == ["x" * 2000]
    unreadable(command, "; the limit is 1000")


@pytest.mark.parametrize("field", ["scale", "_growth_tracker"])
@pytest.mark.parametrize("value", ["4", None, True, [4.0], torch.ones(2), b"\x80"])
def test_a_state_is_numbers(harmless: Path, command: Command, field: str, value: Any) -> None:
    torch.save({"scaler": scaler_state() | {field: value}}, harmless)
    unreadable(command, f"rank1.pt: {field} must be a number, got {type(value).__name__}")


def test_a_step_is_a_number(harmless: Path, command: Command) -> None:
    torch.save({"state": {0: {"step": "many"}}, "param_groups": []}, harmless)
    unreadable(command, "step must be a number, got str")


def test_lists_within_themselves_end(harmless: Path, command: Command) -> None:
    torch.save([cyclic(), scaler_state(8.0)], harmless)
    torch.save([[], scaler_state()], harmless.with_name("rank0.pt"))
    assert command()[0] == 1


def test_names_cannot_write_to_the_terminal(tmp_path: Path, command: Command) -> None:
    key = "\x1b[2J" * 100
    save(tmp_path, {f"\x1b[1m_rank{r}.pt": {key: scaler_state(), "b": scaler_state()} for r in range(2)})
    status, text = command()
    assert status == 0
    assert "\x1b" not in text


def test_large_tensors_are_no_large_structure(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {f"rank{rank}.pt": {"scaler": scaler_state(), "w": torch.ones(10_000)} for rank in range(2)})
    monkeypatch.setattr(saved_states, "STRUCTURE_LIMIT", 4_000)
    assert command()[0] == 0


def test_states_that_were_saved_on_a_gpu_are_read_without_one(tmp_path: Path, command: Command) -> None:
    with mock.patch.object(torch.serialization, "location_tag", return_value="cuda:7"):
        save(tmp_path, {f"rank{rank}.pt": scaler_state(torch.tensor(4.0)) for rank in range(2)})
    assert command()[0] == 0


def test_what_torch_says_while_it_reads_is_silenced_and_later_heard(
    harmless: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, seen = logging.getLogger("torch.distributed.device_mesh"), []
    monkeypatch.setattr(log, "level", logging.WARNING)

    def noisy(*args: Any, **options: Any) -> Any:
        seen.append(log.isEnabledFor(logging.ERROR))
        warnings.warn("of torch's", FutureWarning, stacklevel=1)
        return load(*args, **options)

    load = torch.load
    with mock.patch.object(torch, "load", noisy):
        assert command()[0] == 0
    assert seen == [False, False]
    assert log.level == logging.WARNING


def test_torchs_advice_to_load_unsafely_is_not_passed_on(harmless: Path, command: Command) -> None:
    torch.save({"x": pytest.raises}, harmless)
    unreadable(command, "holds ")

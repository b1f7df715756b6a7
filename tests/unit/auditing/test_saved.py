"""`python -m scaler_triton audit`: what ranks have saved, also in files that are broken or were made to do harm."""

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stepped

from scaler_triton import cli
from scaler_triton.auditing import saved
from scaler_triton.text import one_line

Says = Callable[..., str]


@pytest.fixture
def says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Says:
    """Runs `audit` on the test's folder: it ends with this status and says these texts. Gives its only output."""

    def run(status: int, *texts: str, words: Sequence[str] = ()) -> str:
        assert cli.main(["audit", str(tmp_path), *words]) == status
        out, err = capsys.readouterr()
        assert not (out and err)
        assert "Traceback" not in out + err
        for text in texts:
            assert text in out + err
        return out + err

    return run


def scaler_state(scale: float = 4.0) -> dict[str, Any]:
    return torch.amp.GradScaler("cpu", init_scale=scale).state_dict()


def save(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / name)


def adamw(steps: int) -> dict[str, Any]:
    return stepped("AdamW", steps).state_dict()


@pytest.mark.parametrize("name", ["rank{}.pt", "rank-{}/scaler.pt", "mp_rank_0{}_model.pt", "r_rank{}.pth.tar"])
def test_saved_states_that_agree_and_that_split(tmp_path: Path, says: Says, name: str) -> None:
    save(tmp_path, {name.format(rank): scaler_state() for rank in range(3)})
    (tmp_path / "rank7.pt").mkdir()  # not a file
    (tmp_path / "rank8.txt").write_text("a note")
    text = says(0, "\nAGREE: every rank holds the same scale, tracker.\n")
    assert name.replace("{}", "*").replace("_0*", "_*") in text.splitlines()[0]
    save(tmp_path, {name.format(1): scaler_state(8.0)})
    says(1, "\n  scale: 4 on ranks 0, 2; 8 on rank 1\n")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"grad_scaler": inner},
        lambda inner: {"state": {"x": [1, (2, inner)]}, "step": 3},
        lambda inner: [{"rng": torch.get_rng_state()}, inner],
        lambda inner: [{"state": "running", "param_groups": 2}, inner],  # not an optimizer's
    ],
)
def test_a_scaler_is_found_wherever_it_is(tmp_path: Path, says: Says, wrap: Callable[[Any], Any]) -> None:
    save(tmp_path, {f"rank{rank}.pt": wrap(scaler_state(2.0**rank)) for rank in range(2)})
    says(1, "scale: 1 on rank 0; 2 on rank 1\n")


def test_optimizers_that_stepped_apart(tmp_path: Path, says: Says) -> None:
    save(tmp_path, {f"optimizer_{rank}.bin": {"opt": adamw(2 + rank)} for rank in range(2)})
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    assert says(1, "\n  steps: 2 on rank 0; 3 on rank 1").count("tracker") == 1
    counted = {"state": {0: torch.ones(2), 1: None}, "param_groups": [{"step": 2}]}  # by the group
    save(tmp_path, {f"optimizer_{rank}.bin": counted for rank in range(2)})
    says(0)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("**/ckpt-{rank}.pt", "epoch_1/ckpt-{}.pt"),
        ("*{rank}.pt", "state_{}.pt"),  # no star takes one of the rank's digits
        ("*{rank}*.pt", "state_{}.pt"),
        ("part_0{rank}.pt", "part_0{}.pt"),
        ("{rank}/part{rank}_{rank}.pt", "x/part{}_3.pt"),
    ],
)
def test_a_pattern_says_where_the_rank_is(tmp_path: Path, says: Says, pattern: str, name: str) -> None:
    save(tmp_path, {name.format(rank): scaler_state(4.0 + (rank == 11)) for rank in range(12)})
    text = says(1, "  scale: 4 on ranks 0-10; 5 on rank 11\n", words=["--pattern", pattern])
    assert text.startswith(f"{name.replace('{}', '*')} in {one_line(tmp_path)}; 12 ranks\n")
    assert says(2, "--pattern must be", words=["--pattern", "/etc/*"]).count("\n") == 1
    says(2, "matches state-{rank}.pt.\n", words=["--pattern", "state-{rank}.pt"])


@pytest.mark.parametrize(
    "names",
    [
        ["scaler.pt", "optimizer.pt"],  # one rank's, for all
        ["optimizer.bin", "optimizer_0.bin", "optimizer_1.bin"],  # Accelerate's second and third optimizer
        ["optimizer_1.bin", "optimizer_2.bin"],
        ["checkpoint_0.pt", "checkpoint_1.pt"],  # epochs
        ["rank0.pt"],
        [],
    ],
)
def test_numbers_that_are_not_ranks_raise_no_alarm(tmp_path: Path, says: Says, names: list[str]) -> None:
    save(tmp_path, {name: scaler_state(2.0**number) for number, name in enumerate(names)})
    text = says(2, "NOTHING TO COMPARE", "call scaler_triton.audit(optimizer, scaler, model) in the running job")
    assert text.startswith("rank*.pt in " if "rank0.pt" in names else "no states of ranks in ")
    assert ("--pattern 'model-{rank}-of-4.pt'" in text) is bool(names and "rank0.pt" not in names)


def test_files_that_say_nothing_and_missing_ranks(tmp_path: Path, says: Says) -> None:
    save(tmp_path, {f"step-8/__{rank}_0.distcp": scaler_state(2.0**rank) for rank in range(2)})
    says(2, "one value of each number", "perhaps the scale of one rank and the tracker of another")
    save(tmp_path, {f"rng_rank{rank}.pt": {"rng": torch.get_rng_state()} for rank in range(2)})
    save(tmp_path, {f"tensor_rank{rank}.pt": torch.ones(3) for rank in range(2)})
    says(2, "no states of ranks")
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in (0, 3)})
    says(0, "There is no state of rank 1-2.\n")


def test_weights_are_compared_if_they_are_copies(tmp_path: Path, says: Says) -> None:
    for rank, bias in enumerate((0.0, 0.0, 1e-45)):
        model = {"up.weight": torch.ones(2, 3), "up.bias": torch.tensor([0.0, bias]), "down.weight": torch.ones(3)}
        save(tmp_path, {f"rank{rank}.pt": {"model": model, "opt": adamw(2)}})
    says(0, "AGREE: every rank holds the same steps.", "\nNot compared: 3 saved tensors (if they should be equal on")
    text = says(1, "\n  replicated parameters: 1 of 3 differ: rank*.pt model.up.bias\n", words=["--replicated"])
    assert "\n    rank*.pt model.up.bias: ranks 0-1 | rank 2\n" in text
    assert "Not compared" not in text


class Bomb:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def harmless(tmp_path: Path) -> Path:
    """Two ranks' states; gives the second's."""
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    return tmp_path / "rank1.pt"


def unreadable(says: Says, text: str, *words: str) -> None:
    """Rank 1's file is one line, and the exit status says that not all was read."""
    assert "weights_only" not in says(2, "UNKNOWN", "\nrank 1: rank1.pt: ", text, words=words)


def test_a_bomb_does_not_go_off(harmless: Path, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = harmless.parent / "mark"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    harmless.write_bytes(pickle.dumps(Bomb(mark)))
    unreadable(says, "not a zip archive")
    torch.save(Bomb(mark), harmless, _use_new_zipfile_serialization=False)
    unreadable(says, "not a zip archive")
    torch.save({"scaler": scaler_state(), "x": Bomb(mark)}, harmless)
    for name in ("random_states_0.pkl", ".metadata", "rank0.pkl"):
        (harmless.parent / name).write_bytes(pickle.dumps(Bomb(mark)))
    unreadable(says, "rank1.pt: holds posix.mkdir, not only tensors and plain values")
    assert not mark.exists()
    torch.load(harmless, weights_only=False)  # it is one
    assert mark.exists()


def test_broken_files_are_one_line_each(harmless: Path, says: Says) -> None:
    whole = harmless.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"PK\x05\x06" + bytes(18), os.urandom(1000)):
        harmless.write_bytes(data)
        unreadable(says, "rank1.pt: ")
    harmless.write_bytes(whole[:100] + bytes(100) + whole[200:])
    assert cli.main(["audit", str(harmless.parent)]) in (0, 2)
    harmless.with_name("optim_rank1.pt").write_bytes(b"no archive")
    says(2, "optim_rank1.pt: not a zip archive")


def rewritten(path: Path, method: int) -> None:
    """Write an archive anew, with a name for its structure that torch reads just the same."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name.replace("data.pkl", "DATA.PKL"), data)


def test_what_is_larger_in_memory_than_on_disk_is_refused(
    harmless: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": torch.zeros(10**6)}, harmless)
    rewritten(harmless, zipfile.ZIP_DEFLATED)
    unreadable(says, "its archive is compressed")
    monkeypatch.setattr(saved, "STRUCTURE_LIMIT", 4000)
    torch.save(["x" * 5000], harmless)
    unreadable(says, "; the limit is 4000")
    rewritten(harmless, zipfile.ZIP_STORED)
    unreadable(says, "; the limit is 4000")
    torch.save(scaler_state() | {"w": torch.ones(10_000)}, harmless)  # not a large structure
    says(0)
    for shape in ((2**40,), (2**20, 2**20)):
        torch.save({"huge": torch.ones(()).expand(shape)}, harmless)
        unreadable(says, "its tensors are larger than the file", "--replicated")


@pytest.mark.parametrize("field", ["scale", "_growth_tracker"])
@pytest.mark.parametrize("value", ["4", None, True, [4.0], torch.ones(2), b"\x80"])
def test_a_state_is_numbers(harmless: Path, says: Says, field: str, value: Any) -> None:
    torch.save({"scaler": scaler_state() | {field: value}}, harmless)
    unreadable(says, f"rank1.pt: {field} must be a number, got {type(value).__name__}")
    torch.save({"state": {0: {"step": value}}, "param_groups": []}, harmless)
    unreadable(says, f"step must be a number, got {type(value).__name__}")


def test_names_cannot_write_to_the_terminal(tmp_path: Path, says: Says) -> None:
    state = {"\x1b[2J" * 100: scaler_state(), "b": scaler_state()}
    save(tmp_path, {f"\x1b[1m_rank{rank}.pt": state for rank in range(2)})
    assert "\x1b" not in says(0)

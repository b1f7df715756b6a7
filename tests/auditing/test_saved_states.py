"""`python -m scaler_triton audit`: what ranks have saved, and files that somebody made to harm."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stepped

from scaler_triton import cli
from scaler_triton.words import one_line


def scaler_state(scale: Any = 4.0, tracker: Any = 1) -> dict[str, Any]:
    rest = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    return {"scale": scale, **rest, "_growth_tracker": tracker}


def save(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / name)


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `audit` on the folder and gives its status and its only output."""

    def run(*words: str) -> tuple[int, str]:
        status = cli.main(["audit", str(tmp_path), *words])
        said = capsys.readouterr()
        assert not (said.out and said.err)
        assert "Traceback" not in said.out + said.err
        return status, said.out or said.err

    return run


@pytest.mark.parametrize(
    "name",
    ["rank{}.pt", "scaler_rank_{}.pth", "scaler_{}.pt", "optim-{}.bin", "rank-{}/scaler.pt", "mp_rank_0{}_model.pt"],
)
def test_saved_states_that_agree_and_that_split(tmp_path: Path, command: Command, name: str) -> None:
    save(tmp_path, {name.format(rank): scaler_state() for rank in range(3)})
    status, text = command()
    assert (status, text.endswith("\nAGREE: every rank holds the same scale, tracker.\n")) == (0, True)
    assert name.replace("{}", "*").replace("_0*", "_*") in text.splitlines()[0]
    save(tmp_path, {name.format(1): scaler_state(8.0)})
    status, text = command()
    assert (status, "SPLIT" in text) == (1, True)
    assert "\n  scale: 4 on ranks 0, 2; 8 on rank 1\n" in text + "\n"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"scaler": inner},
        lambda inner: {"grad_scaler": inner},
        lambda inner: {"state": {"x": [1, (2, inner)]}, "step": 3},
        lambda inner: [{"rng": torch.get_rng_state()}, inner],
        lambda inner: [{"state": "running", "param_groups": 2}, inner],  # no optimizer's
    ],
)
def test_a_scaler_is_found_wherever_it_is(tmp_path: Path, command: Command, wrap: Callable[[Any], Any]) -> None:
    save(tmp_path, {f"rank{rank}.pt": wrap(scaler_state(2.0**rank)) for rank in range(2)})
    status, text = command()
    assert (status, "scale: 1 on rank 0; 2 on rank 1" in text) == (1, True)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_optimizers_that_stepped_apart(tmp_path: Path, command: Command, name: str) -> None:
    states = {f"optimizer_{rank}.bin": {"opt": stepped(name, 2 + rank).state_dict()} for rank in range(2)}
    save(tmp_path, states | {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    status, text = command()
    assert (status, "\n  steps: 2 on rank 0; 3 on rank 1" in text) == (1, True)
    assert text.count("tracker") == 1


def test_steps_that_a_group_counts_are_found(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"rank{rank}.pt": {"state": {}, "param_groups": [{"step": 2 + rank}]} for rank in range(2)})
    status, text = command()
    assert (status, "\n  steps: 2 on rank 0; 3 on rank 1" in text) == (1, True)


def test_two_scalers_are_told_apart(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"rank{r}.pt": {"g": scaler_state(), "d": scaler_state(2.0**r)} for r in range(2)})
    status, text = command()
    assert (status, "\n  rank*.pt d scale: 1 on rank 0; 2 on rank 1\n" in text) == (1, True)


def test_the_torchs_scale_that_went_to_inf_is_shown(tmp_path: Path, command: Command) -> None:
    tensors = scaler_state(torch.tensor(float("inf")), torch.tensor(3))
    save(tmp_path, {"rank0.pt": tensors, "rank1.pt": scaler_state(float("inf"), 3)})
    assert command()[0] == 0


def test_a_pattern_says_where_the_rank_is(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"epoch_1/ckpt-{rank}.pt": scaler_state(2.0**rank) for rank in range(2)})
    assert command()[0] == 2
    status, text = command("--pattern", "**/ckpt-{rank}.pt")
    assert (status, text.startswith(f"epoch_1/ckpt-*.pt in {one_line(tmp_path)}; 2 ranks\n")) == (1, True)
    assert command("--pattern", "*/ckpt-*.pt")[0] == 2


@pytest.mark.parametrize("pattern", ["*{rank}.pt", "*{rank}*.pt", "*_{rank}*", "state_*{rank}.pt", "**/*{rank}.pt"])
def test_a_star_beside_the_rank_takes_no_digit_of_it(tmp_path: Path, command: Command, pattern: str) -> None:
    save(tmp_path, {f"state_{rank}.pt": scaler_state(4.0 + (rank == 11)) for rank in range(12)})
    status, text = command("--pattern", pattern)
    assert (status, "  scale: 4 on ranks 0-10; 5 on rank 11\n" in text) == (1, True)


def test_a_pattern_chooses_the_files(tmp_path: Path, command: Command) -> None:
    save(
        tmp_path,
        {f"{step}/rank{rank}.pt": scaler_state(2.0 ** (rank * step)) for rank in range(2) for step in range(2)},
    )
    assert command()[0] == 1
    assert command("--pattern", "0/*")[0] == 0
    assert command("--pattern", "{rank}/rank0.pt")[0] == 0


@pytest.mark.parametrize(
    "names",
    [
        ["scaler.pt", "optimizer.pt"],  # one rank's, for all
        ["optimizer.bin", "optimizer_1.bin"],  # Accelerate's second optimizer
        ["optimizer.bin", "optimizer_0.bin", "optimizer_1.bin"],
        ["optimizer_1.bin", "optimizer_2.bin"],
        ["checkpoint_0.pt", "checkpoint_1.pt"],  # epochs
        ["rank0.pt"],
        ["frank_0.pt", "frank_1.pt"],
        [],
    ],
)
def test_numbers_that_are_no_ranks_raise_no_alarm(tmp_path: Path, command: Command, names: list[str]) -> None:
    save(tmp_path, {name: scaler_state(2.0**number) for number, name in enumerate(names)})
    status, text = command()
    assert status == 2
    assert "NOTHING TO COMPARE" in text
    assert text.startswith("rank*.pt in " if "rank0.pt" in names else "no states of ranks in ")
    assert "call scaler_triton.audit(optimizer, scaler, model) in the running job" in text
    assert ("--pattern 'model-{rank}-of-4.pt'" in text) != ("rank0.pt" in names)


@pytest.mark.parametrize("words", [[], ["--pattern", "__{rank}_0.distcp"]])
def test_a_distributed_checkpoint_is_said_to_hold_one_copy(tmp_path: Path, command: Command, words: list[str]) -> None:
    save(tmp_path, {f"step-8/__{rank}_0.distcp": scaler_state(2.0**rank) for rank in range(2)})
    status, text = command(*words)
    assert (status, "keeps one copy of what all ranks hold alike" in text) == (2, True)
    assert "model-{rank}-of-4" not in text


def test_states_without_scaler_and_optimizer_say_nothing(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"model_rank{rank}.pt": {"w": torch.ones(3)} for rank in range(2)})
    save(tmp_path, {f"tensor_rank{rank}.pt": torch.ones(3) for rank in range(2)})
    status, text = command()
    assert (status, "no states of ranks" in text) == (2, True)


def test_a_missing_rank_is_named(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in (0, 3)})
    status, text = command()
    assert (status, text.endswith("There is no state of rank 1-2.\n")) == (0, True)


@pytest.mark.parametrize("words", [["--pattern", ""], ["--pattern", "/etc/*"]])
def test_a_pattern_that_is_none_is_refused(command: Command, words: list[str]) -> None:
    status, text = command(*words)
    assert (status, text.count("\n")) == (2, 1)
    assert "--pattern must be" in text


def test_a_folder_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name, why in (("none", "No such file or directory"), ("file", "Not a directory")):
        assert cli.main(["audit", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith(f"CHECKPOINT_DIR must be a folder, got {tmp_path / name}: {why}\n")


def test_a_folder_that_cannot_be_read_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)  # root may read anything
    status, text = command()
    assert (status, text.endswith(": Permission denied\n"), text.count("\n")) == (2, True, 1)


# Files that somebody made to harm, or that broke.


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
    from scaler_triton.auditing import saved_states

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


def test_torchs_advice_to_load_unsafely_is_not_passed_on(harmless: Path, command: Command) -> None:
    torch.save({"x": pytest.raises}, harmless)
    unreadable(command, "holds ")

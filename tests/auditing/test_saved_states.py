"""`python -m scaler_triton audit`: what ranks have saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stepped
from saving import Command, save, scaler_state

from scaler_triton import cli
from scaler_triton.auditing.saved import DEPTH
from scaler_triton.text import one_line


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


def test_places_are_named_by_number_too_and_others_are_not(tmp_path: Path, command: Command) -> None:
    nested = {7: scaler_state(2.0), (1, 2): scaler_state(8.0)}
    save(tmp_path, {f"rank{rank}.pt": {"states": nested} for rank in range(2)})
    head = next(line for line in command()[1].splitlines() if line.startswith("rank "))
    assert "rank*.pt states.7 scale" in head
    assert "rank*.pt states.? scale" in head


def test_a_scaler_is_looked_for_so_deep_and_no_deeper(tmp_path: Path, command: Command) -> None:
    """In a file that somebody made to harm, each place's name could be as long as the file."""
    nested: Any = scaler_state()
    for depth in range(DEPTH + 2):
        save(tmp_path, {f"rank{rank}.pt": nested for rank in range(2)})
        assert (command()[0], depth) == (0 if depth <= DEPTH else 2, depth)
        nested = [nested]


def test_folders_and_other_files_are_no_states(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    (tmp_path / "rank2.pt").mkdir()
    (tmp_path / "rank3.txt").write_text("a note")
    status, text = command("--pattern", "*")
    assert (status, text.splitlines()[0].endswith("; 2 ranks")) == (0, True)


def test_every_file_of_a_rank_that_cannot_be_read_is_named(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"scaler_rank{rank}.pt": scaler_state() for rank in range(2)})
    for name in ("optim", "model"):
        (tmp_path / f"{name}_rank1.pt").write_bytes(b"no archive")
    status, text = command()
    assert (status, "UNKNOWN" in text) == (2, True)
    assert "\nrank 1: model_rank1.pt: not a zip archive" in text
    assert "; optim_rank1.pt: not a zip archive" in text


def test_states_of_parameters_that_count_nothing_have_no_steps(tmp_path: Path, command: Command) -> None:
    group = {"params": [0, 1, 2, 3]}
    state = {0: {"step": 3}, 1: torch.ones(2), 2: None, 3: {"momentum": torch.ones(2)}}
    save(tmp_path, {f"rank{rank}.pt": {"state": state, "param_groups": [group]} for rank in range(2)})
    status, text = command()
    assert (status, text.endswith("\nAGREE: every rank holds the same steps.\n")) == (0, True)


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


@pytest.mark.parametrize(
    ("pattern", "name"), [("part_0{rank}.pt", "part_0{}.pt"), ("{rank}/part{rank}_{rank}.pt", "x/part{}_3.pt")]
)
def test_what_else_is_in_a_pattern_stands_for_itself(tmp_path: Path, command: Command, pattern: str, name: str) -> None:
    save(tmp_path, {name.format(rank): scaler_state(4.0 + rank) for rank in range(2)})
    status, text = command("--pattern", pattern)
    assert (status, "  scale: 4 on rank 0; 5 on rank 1\n" in text) == (1, True)


def test_a_pattern_that_no_file_matches_is_shown(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {"rank0.pt": scaler_state()})
    status, text = command("--pattern", "state-{rank}.pt")
    kinds = ".pt, .pth, .bin, .ckpt, .pt.tar, .pth.tar"
    assert (status, f"\nNo file of torch.save ({kinds}) matches state-{{rank}}.pt.\n" in text) == (2, True)


@pytest.mark.parametrize(
    ("name", "words"),
    [("ckpt_rank{}.pth.tar", []), ("scaler_{}.pt.tar", []), ("last-{}.pth.tar", ["--pattern", "last-{rank}.pth.tar"])],
)
def test_files_that_are_called_tar_are_read(tmp_path: Path, command: Command, name: str, words: list[str]) -> None:
    """As those of timm and of torch's ImageNet example."""
    save(tmp_path, {name.format(rank): {"amp_scaler": scaler_state(2.0**rank)} for rank in range(2)})
    status, text = command(*words)
    assert (status, "  scale: 1 on rank 0; 2 on rank 1\n" in text) == (1, True)


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
    save(tmp_path, {f"rng_rank{rank}.pt": {"rng": torch.get_rng_state()} for rank in range(2)})
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


def test_a_folder_that_cannot_be_read_is_said_to_be(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)  # root may read anything
    status, text = command()
    assert (status, text.endswith(": Permission denied\n"), text.count("\n")) == (2, True, 1)

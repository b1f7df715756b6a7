"""`python -m scaler_triton audit --replicated`: tensors that every rank should have saved alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stepped
from saving import Command, save, scaler_state

ASK = "(if they should be equal on all ranks, as under DDP, compare them with --replicated)."


def saved(folder: Path, *models: dict[str, Any], **more: Any) -> None:
    save(folder, {f"rank{rank}.pt": {"model": model, **more} for rank, model in enumerate(models)})


def weights(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"up.weight": torch.ones(2, 3), "up.bias": torch.zeros(3), "down.weight": torch.ones(3)} | changed


def test_weights_that_differ_are_a_split_if_they_are_copies(tmp_path: Path, command: Command) -> None:
    saved(
        tmp_path, weights(), weights(), weights(**{"up.bias": torch.tensor([0.0, 1e-45, 0.0])}), scaler=scaler_state()
    )
    status, text = command()
    assert (status, "AGREE: every rank holds the same scale, tracker." in text) == (0, True)
    assert f"\nNot compared: 3 saved tensors {ASK}" in text
    status, text = command("--replicated")
    assert status == 1
    assert "\n  replicated parameters: 1 of 3 differ: rank*.pt model.up.bias\n" in text
    assert "\n    rank*.pt model.up.bias: ranks 0-1 | rank 2\n" in text
    assert "Not compared" not in text


def test_weights_that_are_equal_agree(tmp_path: Path, command: Command) -> None:
    saved(tmp_path, weights(), weights(), opt=stepped("AdamW", 2).state_dict())
    status, text = command("--replicated")
    assert (status, "AGREE: every rank holds the same steps, 3 replicated parameters." in text) == (0, True)


def test_without_a_scaler_only_copies_can_be_compared(tmp_path: Path, command: Command) -> None:
    saved(tmp_path, weights(), weights())
    status, text = command()
    assert (status, "NOTHING TO COMPARE" in text, f"Not compared: 3 saved tensors {ASK}" in text) == (2, True, True)
    assert command("--replicated")[0] == 0


def test_what_ranks_may_hold_apart_is_left_out(tmp_path: Path, command: Command) -> None:
    with_more = [
        weights(running_mean=torch.full((3,), rank), rng=torch.full((3,), rank, dtype=torch.uint8))
        for rank in (0.0, 1.0)
    ]
    saved(tmp_path, *with_more, moments=stepped("AdamW", 2).state_dict())
    status, text = command("--replicated")
    assert (status, "3 replicated parameters." in text) == (0, True)
    assert "\nNot compared: 1 running statistic (BatchNorm's differ between ranks)." in text


def test_names_that_are_equal_once_cut_are_two(tmp_path: Path, command: Command) -> None:
    long = "layer." * 50
    saved(tmp_path, *({long + "a": torch.ones(2), long + "b": torch.full((2,), float(rank))} for rank in range(2)))
    status, text = command("--replicated")
    assert (status, "replicated parameters: 1 of 2 differ: " in text, " #2" in text) == (1, True, True)


def test_tied_weights_are_read_once_and_compared_under_each_name(tmp_path: Path, command: Command) -> None:
    for rank in range(2):
        weight = torch.full((1000,), float(rank))
        save(tmp_path, {f"rank{rank}.pt": {f"layer{number}": weight[:] for number in range(20)}})
    status, text = command("--replicated")
    assert (status, "20 of 20 differ" in text) == (1, True)


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20)])
def test_a_tensor_that_claims_to_be_larger_than_its_file_is_not_read(
    tmp_path: Path, command: Command, shape: tuple[int, ...]
) -> None:
    saved(tmp_path, weights(), weights(huge=torch.ones(()).expand(shape)))
    status, text = command("--replicated")
    assert (status, "\nrank 1: rank1.pt: ValueError: its tensors are larger than the file" in text) == (2, True)


def test_tensors_without_bits_are_counted(tmp_path: Path, command: Command) -> None:
    others = {"meta": torch.ones(3, device="meta"), "sparse": torch.eye(3).to_sparse()}
    saved(tmp_path, weights(**others), weights(**others))
    status, text = command("--replicated")
    assert (status, "3 replicated parameters." in text) == (0, True)
    assert "\nNot compared: 2 saved tensors (on meta, sparse, a shard, or of a class of its own)." in text

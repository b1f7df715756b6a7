"""What the demo shows: the checks, the table, the plot, failed ranks, and where they run."""

from copy import deepcopy
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from matplotlib.image import imread

from scaler_triton.demo.show import TOLERANCE, judge, place, save_plot, steps_table
from scaler_triton.demo.train import Config, Trace

CONFIG = Config("ours", "fsdp2", "adamw", 6)
SCALES, SKIPPED = [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0], [False, True, False, True, True, False]
LOSSES, START, END = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5], np.zeros(4, np.float32), np.ones(4, np.float32)
TRACE = Trace(True, LOSSES, SCALES, SKIPPED, (3,), START, END)
SPLIT = replace(TRACE, scales=[8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0], skipped=[False] * 3 + [True] + [False] * 2)


def moved(by: float) -> Any:
    """Return the parameters at the end, one of them moved."""
    return np.array([1 + by, 1, 1, 1], np.float32)


@pytest.mark.parametrize(
    ("on", "change", "said"),
    [
        ([1], {"enabled": False}, "the scaler is disabled on rank 1"),
        ([1], {"scales": [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 2.0]}, "split after step 6; at the end: 1, 2"),
        ([0, 1], {"scales": [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 2.0]}, "no other; scales do NOT match a single process"),
        ([1], {"step_counts": (2,)}, "optimizer step counts differ: 3, 2"),
        ([0, 1], {"step_counts": (2, 3)}, "optimizer step counts differ: 2/3, 2/3"),
        ([0, 1], {"skipped": [False] * 3 + [True] * 2 + [False]}, "wrongly skipped or wrongly taken: step 2"),
        ([0], {"skipped": [False, True] * 3}, "wrongly skipped or wrongly taken: steps 5, 6"),
        ([1], {"end": moved(4 * TOLERANCE)}, "gathered parameters do NOT match"),
        ([0], {"end": moved(nan)}, "gathered parameters do NOT match"),
        ([1], {"end": moved(nan)}, "gathered parameters do NOT match"),
        ([0, 1], {"losses": [4.0] * 5 + [3.9]}, "the loss did NOT fall"),
        ([0], {"losses": [4.0] * 5 + [nan]}, "the loss did NOT fall"),
    ],
)
def test_a_bad_run_fails(on: list[int], change: dict[str, Any], said: str) -> None:
    ranks = [replace(deepcopy(TRACE), **(change if rank in on else {})) for rank in range(2)]
    assert any(said in text for ok, text in judge(ranks, TRACE) if not ok)


def test_a_good_run_passes_and_rounding_is_measured() -> None:
    rounded = replace(TRACE, end=moved(TOLERANCE / 4))
    for ranks, said in (([TRACE], "bitwise"), ([TRACE, TRACE], "bitwise"), ([TRACE, rounded], "relative distance")):
        checks = judge(ranks, TRACE)
        assert all(ok for ok, _ in checks)
        assert any(said in text for _, text in checks)


def test_a_short_table_has_every_step_and_names_the_bad_shards_and_split_ranks() -> None:
    rows = [line.split() for line in steps_table(CONFIG, [TRACE, TRACE]).splitlines()[2:]]
    assert [row[0] for row in rows] == list("123456")
    assert [rows[1], rows[3]] == [["2", "3.500", "8", "yes", "1"], ["4", "2.500", "4", "yes", "0"]]
    rows_of_split = steps_table(CONFIG, [TRACE, SPLIT]).splitlines()[2:]
    assert "rank 0 ONLY" in rows_of_split[1]
    assert "4 / 8" in rows_of_split[2]


@pytest.mark.parametrize("ranks", [[TRACE], [TRACE, SPLIT]], ids=["one", "split"])
def test_the_plot_can_be_drawn(ranks: list[Trace], tmp_path: Path) -> None:
    save_plot(CONFIG, ranks, "title", tmp_path / "plot.png")
    pixels = imread(tmp_path / "plot.png")
    assert pixels.size > 400 * 800
    assert pixels.std() > 0.01


@pytest.mark.parametrize(
    ("gpus", "mode", "where", "note"),
    [
        (0, "fsdp2", ("cpu", 2), "no GPU: on the CPU, over gloo"),
        (1, "fsdp2", ("cuda", 2), "2 ranks share the one GPU, over nccl"),
        (1, "single", ("cuda", 1), "1 of 1 GPUs"),
        (4, "ddp", ("cuda", 2), "2 of 4 GPUs, over nccl"),
    ],
)
def test_where_ranks_run(gpus: int, mode: str, where: tuple[str, int], note: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config, said = place(replace(CONFIG, mode=mode))
    assert ((config.device_type, config.ranks), said) == (where, note)

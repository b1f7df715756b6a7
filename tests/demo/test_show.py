"""The demo from the command line to the exit status, and what it says when a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")
pytest.importorskip("tqdm")

from matplotlib.image import imread

from scaler_triton.demo import show as showing
from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.plot import save_plot
from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankTimeout
from scaler_triton.demo.table import steps_table
from scaler_triton.demo.trace import Trace

ROOT = Path(__file__).parents[2]
CONFIG = DemoConfig("ours", "fsdp2", "adamw", 6)
TRACE = Trace(
    True,
    [4.0, 3.5, 3.0, 2.5, 2.0, 1.5],
    [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0],
    [False, True, False, True, True, False],
    (3,),
)
SPLIT = replace(TRACE, scales=[8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0], skipped=[False] * 3 + [True] + [False] * 2)


def run_demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the demo as a user without a GPU does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", "scaler_triton", "demo", "--out", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder, env=environment)


def assert_is_picture(path: Path) -> None:
    pixels = imread(path)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 800
    assert pixels.std() > 0.01


@pytest.mark.distributed
@pytest.mark.slow
def test_our_demo_succeeds_in_under_a_minute(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run_demo(tmp_path)
    seconds = time.monotonic() - begin
    crowded = os.getloadavg()[0] / (os.cpu_count() or 1)  # others may use the machine, too
    assert seconds < 60 * min(max(crowded, 1.0), 2.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: every check holds" in done.stdout
    assert "FAILED" not in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if " yes " in line] == ["10", "25", "39"]
    assert "48/48" in done.stderr
    assert_is_picture(tmp_path / "demo.png")


@pytest.mark.distributed
@pytest.mark.slow
def test_torchs_split_is_reported_and_fails(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "6", "--scaler", "torch", "--fsdp1", "--optimizer", "adamw-fused")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the scales of the ranks split after step 2" in done.stdout
    assert "rank 1 ONLY" in done.stdout
    assert "FAILED: 4 of 6 checks" in done.stdout
    assert_is_picture(tmp_path / "demo.png")


def test_a_rank_that_raises_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [RankResult(0, value=TRACE), RankResult(1, error="RuntimeError: broken")]
    monkeypatch.setattr(showing, "train_ranks", lambda config, placement: results)
    assert showing.show("torch", "fsdp1", "adamw", 6, tmp_path / "demo.png") == 1
    said = capsys.readouterr().err
    assert "rank 0: came to its end" in said
    assert "rank 1: RuntimeError: broken" in said


def test_a_hang_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(*_: object, **__: object) -> None:
        raise RankTimeout("late", [RankResult(rank, error="RankTimeout: no answer") for rank in range(2)])

    monkeypatch.setattr(showing.RankPool, "run", hang)
    assert showing.show("torch", "fsdp1", "adamw", 6, tmp_path / "demo.png") == 1
    assert "rank 1: RankTimeout: no answer" in capsys.readouterr().err


def test_a_short_table_has_every_step_and_names_the_bad_shards() -> None:
    rows = [line.split() for line in steps_table(CONFIG, [TRACE, TRACE]).splitlines()[2:]]
    assert [row[0] for row in rows] == list("123456")
    assert rows[1] == ["2", "3.500", "8", "yes", "1"]
    assert rows[3] == ["4", "2.500", "4", "yes", "0"]


def test_a_long_table_has_the_steps_in_which_something_happens() -> None:
    config = replace(CONFIG, steps=100)
    losses, scales, skipped = [1.0] * 100, [8.0] * 101, [step in config.bad_shards for step in range(100)]
    scales[70:] = [16.0] * 31
    rows = steps_table(config, [Trace(True, losses, scales, skipped)]).splitlines()[2:]
    assert [int(row.split()[0]) for row in rows] == [1, 21, 51, 71, 81, 100]


def test_a_table_of_a_split_shows_both_ranks() -> None:
    rows = steps_table(CONFIG, [TRACE, SPLIT]).splitlines()[2:]
    assert "rank 0 ONLY" in rows[1]
    assert "4 / 8" in rows[2]


@pytest.mark.parametrize("ranks", [[TRACE], [TRACE, TRACE], [TRACE, SPLIT]], ids=["one", "two", "split"])
def test_the_plot_can_be_drawn(ranks: list[Trace], tmp_path: Path) -> None:
    save_plot(CONFIG, ranks, "title", tmp_path / "plot.png")
    assert_is_picture(tmp_path / "plot.png")

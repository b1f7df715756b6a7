"""The checks that the demo shows: which runs pass them."""

import io
from copy import deepcopy
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest

from scaler_triton.demo import show
from scaler_triton.demo.launch import Answer
from scaler_triton.demo.show import TOLERANCE, judge
from scaler_triton.demo.train import Config, Trace

SCALES, SKIPPED = [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0], [False, True, False, True, True, False]
LOSSES, START, END = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5], np.zeros(4, np.float32), np.ones(4, np.float32)
TRACE = Trace(True, LOSSES, SCALES, SKIPPED, (3,), START, END)


def moved(by: float) -> Any:
    """Return the parameters at the end, one of them moved."""
    return np.array([1 + by, 1, 1, 1], np.float32)


@pytest.mark.parametrize(
    ("on", "change", "said"),
    [
        ([1], {"enabled": False}, "the scaler is disabled on rank 1"),
        ([1], {"scales": [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 2.0]}, "step 6; after the last update: 1, 2"),
        ([0, 1], {"scales": [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 2.0]}, "skipped; scales do NOT match a single process"),
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


# Two scalers side by side.

# Step 2 is bad on rank 0, step 4 on rank 1, step 5 on rank 0.
CONFIG = Config("both", "fsdp1", "adamw-fused", 6)
OURS = [replace(TRACE, scales=[8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0])] * 2
TORCHS = [
    replace(TRACE, scales=[8.0, 8.0, 4.0, 8.0, 8.0, 4.0, 8.0], skipped=[False, True, False, False, True, False]),
    replace(TRACE, scales=[8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0], skipped=[False] * 3 + [True] + [False] * 2),
]


def finished(traces: list[Trace]) -> list[Answer]:
    return [Answer(rank, trace) for rank, trace in enumerate(traces)]


def test_a_row_shows_both_scalers() -> None:
    assert show.steps_table(CONFIG, {"torch": TORCHS, "ours": OURS}).splitlines()[1:] == [
        "step  inf on   loss  scale  skipped       loss  scale  skipped",
        "----  ------  -----  -----  -----------  -----  -----  -------",
        "   1          4.000      8               4.000      8",
        "   2  rank 1  3.500      8  rank 0 ONLY  3.500      8  yes",
        "   3          3.000  4 / 8               3.000      4",
        "   4  rank 0  2.500      8  rank 1 ONLY  2.500      4  yes",
        "   5  rank 1  2.000  8 / 4  rank 0 ONLY  2.000      2  yes",
        "   6          1.500      4               1.500      1",
    ]
    over = show.steps_table(CONFIG, {"torch": TORCHS, "ours": OURS}).splitlines()[0]
    assert over.index("torch ") == 14
    assert over.index("scaler_triton ") == 41


@pytest.mark.parametrize(
    ("torchs", "ours", "status", "last"),
    [
        (finished(TORCHS), finished(OURS), 0, "OK: every check holds with ours; with torch's scaler 2 of 6 fail"),
        (finished(OURS), finished(OURS), 0, "OK: every check holds, with ours and with torch's scaler"),
        (finished(OURS), finished(TORCHS), 1, "FAILED: 2 of 6 checks with ours"),
        (
            [Answer(0, error="RuntimeError: no"), Answer(1, error="RuntimeError: no")],
            finished(OURS),
            0,
            "OK: every check holds with ours; with torch's scaler the training did not finish",
        ),
        (finished(TORCHS), [Answer(0, error="RuntimeError: no"), Answer(1)], 1, None),
    ],
)
def test_the_verdict_is_about_ours_and_says_what_torchs_did(
    torchs: Any, ours: Any, status: int, last: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(show, "place", lambda config: (config, "here"))
    runs = {"torch": torchs, "ours": ours}

    def run_ranks(fn: Any, config: Config, *, ranks: int, heard: Any, **_: Any) -> list[Answer]:
        said = capsys.readouterr().err
        assert said.endswith(f"starting {'one process' if ranks == 1 else 'two ranks'} ...\n")
        assert "%" not in said
        return [Answer(0, OURS[0])] if ranks == 1 else runs[config.scaler]

    monkeypatch.setattr(show, "run_ranks", run_ranks)
    assert show.show("both", "fsdp1", "adamw-fused", 6, None) == status
    said = capsys.readouterr()
    if last is None:
        assert "rank 0: RuntimeError: no\nrank 1: finished\n" in said.err
    else:
        assert said.out.splitlines()[-1] == last
        assert "no plot: pip install matplotlib" in said.out
        unseen = "The loss does not show it: 1.50 with torch's scaler, 1.50 with ours."
        assert (unseen in said.out) == (torchs == finished(TORCHS) and ours == finished(OURS))


def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    for name, value in {"COLUMNS": "72", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    ours = [replace(trace, why="The last skip, and why it was one. " * 4) for trace in OURS]
    runs = {"torch": finished(TORCHS), "ours": finished(ours)}
    monkeypatch.setattr(show, "run_ranks", lambda fn, config, **_: runs.get(config.scaler, finished(OURS[:1])))
    monkeypatch.setattr("sys.stdout", screen)
    assert show.show("both", "fsdp1", "adamw-fused", 6, None) == 0
    assert "ShardedGradScaler of torch" in screen.getvalue()
    assert max(map(len, screen.getvalue().splitlines())) <= 72

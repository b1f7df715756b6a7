"""Turns and their numbers: rotations, ratios, medians of runs, CSVs; and the check that both scalers agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perf.measure import Context, Subject, WrongResult
from perf.rows import Machine, Place, pooled, read_csv, write_csv
from perf.subjects import Gradients, require_equal
from scaler_triton import GradScaler

MACHINE = Machine("card", "2.13", "3.7", "3.11", "abc", "2025-01-01")
PLACE = Place("host", "alone", "10 x 64")
QUICK = Context("cpu", quick=True)


def test_only_the_run_is_timed_and_the_first_turns_do_not_count() -> None:
    seen: list[str] = []
    subject = Subject(lambda: seen.append("run"), lambda: seen.append("before"), lambda: seen.append("after"))
    times = QUICK.interleaved({"a": subject}, 0.0, clock=lambda run: float(run() is None))
    assert seen[:6] == ["before", "run", "after"] * 2
    assert len(times["a"]) == seen.count("run") - 4


def test_ratios_are_medians_over_rounds() -> None:
    rows = PLACE.times("step", {"torch": [1.0, 100.0, 2.0], "ours": [0.5, 50.0, 4.0], "copy": [1.0, 1.0, 1.0]})
    found = {row.subject: (row.p50, row.unit) for row in rows}
    assert found["ours"] == (4e6, "us")
    assert found["ours / torch"] == (0.5, "ratio")
    assert set(found) == {"torch", "ours", "copy", "ours / torch", "copy / ours", "copy / torch"}


def test_a_csv_gives_back_the_medians_of_runs(tmp_path: Path) -> None:
    rows = pooled(row for count in (1.0, 9.0, 3.0) for row in PLACE.counts("calls", {"ours": count}))
    assert [(row.p50, row.samples) for row in rows] == [(3.0, 3)]
    write_csv(tmp_path / "new" / "host.csv", rows, MACHINE)
    assert read_csv(tmp_path / "new" / "host.csv") == [(row, MACHINE) for row in rows]


def test_one_wrong_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, right = Gradients([3, 5]), GradScaler.update

    def update(self: Any) -> None:
        gradients.parameters[1].grad.view(torch.int32)[0] ^= 1
        right(self)

    monkeypatch.setattr(GradScaler, "update", update)
    with pytest.raises(WrongResult, match="some list: another gradient 1 than torch's"):
        require_equal("some list", gradients.parameters, "cpu")


def test_an_overflow_that_is_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaler_triton.torch_ops.check", lambda *arguments: None)
    with pytest.raises(WrongResult, match="some list, an infinity: another state than torch's"):
        require_equal("some list", Gradients([3, 5]).parameters, "cpu", fused=True)

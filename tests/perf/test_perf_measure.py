"""Timing in turn, statistics, CSV: what every bench relies on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf import shapes
from perf.context import Context
from perf.machine import Machine, here
from perf.measure import Effort, Subject, interleaved
from perf.rows import Entry, bandwidth_rows, merged, pooled, read_csv, row, time_rows, write_csv

MACHINE = Machine("card", "1.2", "2.13", "3.7", "3.11", "abc", "2025-01-01")


def test_subjects_take_turns_and_another_one_begins_each_round() -> None:
    calls: list[str] = []

    def noting(name: str) -> Subject:
        return Subject(lambda: calls.append(name), lambda: calls.append("("), lambda: calls.append(")"))

    times = interleaved({"a": noting("a"), "b": noting("b")}, Effort(0.0, least=3), warmup=1)
    assert "".join(calls) == "(a)(b)" + "(a)(b)(b)(a)" + "(a)(b)(b)(a)"  # each begins as often as the others
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 2), (3600.0, 7)])
def test_rounds_stay_between_least_and_most(seconds: float, rounds: int) -> None:
    times = interleaved({"a": Subject(lambda: None)}, Effort(seconds, least=2, most=7))
    assert len(times["a"]) == rounds


def test_only_run_is_timed() -> None:
    clock: list[Any] = []
    subject = Subject(lambda: clock.append("run"), lambda: clock.append("before"), lambda: clock.append("after"))

    def timing(run: Any) -> float:
        clock.append("start")
        run()
        clock.append("stop")
        return 1.0

    interleaved({"a": subject}, Effort(0.0, least=1), clock=timing, warmup=0)
    assert clock == ["before", "start", "run", "stop", "after"]


def test_spread() -> None:
    found = row("b", "c", "m", "ours", "us", list(range(101)))
    assert (found.samples, found.p20, found.p50, found.p80, found.p90) == (101, 20, 50, 80, 90)


def test_ratios_are_of_the_same_rounds() -> None:
    drifting = {"torch": [1e-6, 10e-6, 100e-6] * 2, "ours": [2e-6, 20e-6, 200e-6] * 2, "none": [1e-6] * 6}
    rows = {found.subject: found for found in time_rows("b", "c", "m", drifting)}
    assert set(rows) == {"torch", "ours", "none", "ours / torch", "ours / none", "torch / none"}
    assert rows["torch"].p50 == pytest.approx(10.0)
    found = rows["ours / torch"]
    assert (found.samples, found.p20, found.p80) == (2, pytest.approx(2.0), pytest.approx(2.0))


def test_who_begins_may_be_quicker_and_the_ratio_is_the_same() -> None:
    times = {"torch": [1.0, 3.0] * 9, "ours": [3.0, 1.0] * 9}
    found = next(row for row in time_rows("b", "c", "m", times) if row.unit == "ratio")
    assert (found.p20, found.p50, found.p90) == (1.0, 1.0, 1.0)


def test_fewer_rounds_than_subjects_make_one_ratio() -> None:
    found = next(row for row in time_rows("b", "c", "m", {"torch": [2.0], "ours": [3.0]}) if row.unit == "ratio")
    assert (found.samples, found.p50) == (1, 1.5)


def test_bandwidth() -> None:
    (found,) = bandwidth_rows("b", "c", {"ours": 10**9}, {"ours": [0.5]})
    assert (found.p50, found.unit) == (2.0, "GB/s")


def test_csv_comes_back_as_it_was_written(tmp_path: Path) -> None:
    entries = [
        Entry(found, MACHINE) for found in time_rows("b", 'a "case", plain', "m", {"torch": [1e-6], "ours": [3e-6]})
    ]
    path = tmp_path / "new" / "card.csv"
    write_csv(path, entries)
    assert read_csv(path) == entries
    assert path.read_text().splitlines()[0].endswith("device,driver,torch,triton,python,commit,date")


def test_no_csv_is_no_entries(tmp_path: Path) -> None:
    assert read_csv(tmp_path / "none.csv") == []


def test_a_run_replaces_only_its_own_benches() -> None:
    old = [Entry(row(bench, "old", "m", "ours", "us", [1.0]), MACHINE) for bench in ("cpu", "host")]
    new = [Entry(row("cpu", "new", "m", "ours", "us", [1.0]), MACHINE)]
    assert {(e.row.bench, e.row.case) for e in merged(old, new, ["cpu"])} == {("cpu", "new"), ("host", "old")}


def test_of_several_runs_the_median_counts() -> None:
    runs = [row("host", case, "m", "ours", "us", [number]) for number in (3.0, 1.0, 2.0) for case in ("a", "b")]
    runs.append(row("host", "only once", "m", "ours", "us", [7.0, 7.0]))
    assert [(each.case, each.samples, each.p20, each.p90) for each in pooled(runs)] == [
        ("a", 3, 2.0, 2.0),
        ("b", 3, 2.0, 2.0),
        ("only once", 2, 7.0, 7.0),
    ]


def test_here_names_no_machine() -> None:
    import platform

    found = here()
    assert platform.node() not in found.device
    assert found.torch
    assert found.date


def test_models_have_their_sizes() -> None:
    assert (len(shapes.gpt2()), sum(shapes.gpt2())) == (148, 124_439_808)
    assert (len(shapes.llama()), sum(shapes.llama())) == (291, 8_030_261_248)
    assert sum(shapes.llama(8)) * 8 == sum(shapes.llama())
    assert (len(shapes.vit_large()), sum(shapes.vit_large())) == (296, 304_326_632)


def test_what_is_left_out_is_kept() -> None:
    context = Context(quick=True, gpu=False)
    context.leave_out("copies", "needs a GPU")
    assert context.left_out == ["copies: needs a GPU"]
    assert context.effort(100.0, 100).most < 10


def test_a_copy_of_the_tree_without_git_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    monkeypatch.setenv("PATH", "")
    assert here().commit == "abc1234"

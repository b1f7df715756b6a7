"""Goals, tables and pages: what is said of the rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from perf import __main__ as command
from perf import pages
from perf.goals import ABSENT, Goal, answers
from perf.rows import Entry, Machine, Place, Row, write_csv

MACHINE = Machine("cpu-9-cores", "2.13", "3.7", "3.11", "abc", "2025-01-01")
FASTER = Goal("is it faster", "host", "alone", "[ab]", "step", 0.5, why="it rains")


def entries(*rows: Row) -> list[Entry]:
    return [(row, MACHINE) for row in rows]


def times(case: str, torch: float, ours: float, like: Goal = FASTER, part: str = "") -> list[Row]:
    return Place(like.question, part or like.part, case).times(like.metric, {"torch": [torch], "ours": [ours]})


def test_the_worst_case_that_matches_answers() -> None:
    rows = [*times("a", 1.0, 0.4), *times("b", 1.0, 0.6), *times("c", 1.0, 9.0), *times("a", 1.0, 9.0, part="not")]
    (answer,) = answers(entries(*rows), [FASTER])
    assert (answer.best.case, answer.row.case, answer.row.p50, answer.met) == ("a", "b", 0.6, "no")


def test_of_a_lower_limit_the_lowest_answers() -> None:
    goal = Goal("share", "passes", ".*", ".*", "unscale", 0.95, "copy / ours", at_least=True)
    shares = {"a": 1.0, "b": 0.96}
    rows = [Place("passes", "", case).row("unscale", "copy / ours", "ratio", [share]) for case, share in shares.items()]
    (answer,) = answers(entries(*rows), [goal])
    assert (answer.row.p50, answer.met) == (0.96, "yes")


def test_what_another_machine_must_answer_is_not_measured() -> None:
    elsewhere = replace(FASTER, devices="(?!cpu).*")
    assert [a.met for a in answers(entries(*times("a", 1.0, 0.4)), [FASTER, elsewhere])] == ["yes", ABSENT]
    assert [answer.met for answer in answers([], [FASTER])] == [ABSENT]
    assert not FASTER.is_met_by(float("nan"))


def test_pages_are_written_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    names = ("gains", "goals", "missed", "host", "costs")
    page.write_text("".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in names))
    monkeypatch.setattr(pages, "README", page)
    monkeypatch.setattr(pages, "FRONT", page)
    write_csv(tmp_path / "results/cpu-9-cores/host.csv", times("a", 4e-3, 1e-3), MACHINE)
    for block in pages.blocks(["host"], tmp_path / "results"):
        pages.put(*block)
    assert "old" not in page.read_text()
    assert "0.25 (4 ms → 1 ms)" in page.read_text()


@pytest.mark.parametrize(("page", "name", "text"), pages.blocks([*command.QUESTIONS])[:-1])
def test_the_page_says_what_the_csvs_say(page: Path, name: str, text: str) -> None:
    assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in page.read_text()


def test_what_version_01_measured_is_kept_apart() -> None:
    assert pages.OLD not in {machine.device for _, machine in pages.entries_in(pages.RESULTS)}

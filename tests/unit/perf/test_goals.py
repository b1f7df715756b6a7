"""Goals, tables and pages: what is said of the rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from perf import __main__ as command
from perf import pages
from perf.goals import ABSENT, HEADLINES, Goal, answers
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


def test_misses_are_listed_by_name_with_their_cause() -> None:
    absent = replace(FASTER, text="on a card", devices="card")
    assert pages.missed(answers(entries(*times("a", 1.0, 0.75)), [FASTER, absent])).splitlines() == [
        "- is it faster (a, cpu-9-cores): 0.75, the goal is <= 0.5. It rains.",
        "- Not measured on this version: on a card.",
    ]
    assert pages.missed(answers(entries(*times("a", 1.0, 0.25)), [FASTER])) == "Nothing."


def test_tables_show_ratio_times_and_the_share_of_a_copy() -> None:
    shares = Place("host", "alone", "b").times("step", {"ours": [2e-6], "copy": [1e-6]})
    text = pages.part_table([*times("a", 4e-3, 1e-3), *shares])
    assert "| a  | 0.25 (4 ms → 1 ms)      |" in text
    assert "| b  | ours 2 us, 0.50 of copy |" in text
    assert "Alone, cpu-9-cores, torch 2.13, triton 3.7, 2025-01-01:" in pages.question_tables(entries(*shares), "host")
    assert pages.question_tables([], "host") == "Not measured on this version."


def test_gains_and_losses_are_told_apart() -> None:
    loop, ops = HEADLINES[0], HEADLINES[-1]
    rows = [*times("1, plain", 1, 0.5, loop), *times("2, plain", 1, 0.75, loop), *times("1 x 64", 1, 4, ops)]
    assert pages.gains(answers(entries(*rows), HEADLINES)).splitlines() == [
        f"- **Less**: {loop.text} 0.50 to 0.75 (cpu-9-cores).",
        f"- **As much, or more**: {ops.text} 4.00 (cpu-9-cores).",
        "- On a GPU: not measured on this version.",
    ]


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

"""Goals, tables, plot and README: what is told of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import headlines, readme
from perf.goals import GOALS, UNKNOWN, Cause, Goal, answers
from perf.machine import Machine
from perf.plot import save_plot
from perf.rows import Entry, Row, read_csv, row, time_rows, write_csv
from perf.table import answers_table, cases_table, spread

MACHINE = Machine("card", "1.2", "2.13", "3.7", "3.11", "abc", "2025-01-01")
FASTER = Goal("is it faster", "cpu", r"[ab]", "unscale", 0.5, because=Cause("it rains", "an umbrella"))


def entries(*rows: Row) -> list[Entry]:
    return [Entry(found, MACHINE) for found in rows]


def times(case: str, torch: float, ours: float, bench: str = "cpu", metric: str = "unscale") -> list[Row]:
    return time_rows(bench, case, metric, {"torch": [torch] * 4, "ours": [ours] * 4})


def test_the_worst_case_answers() -> None:
    (answer,) = answers(entries(*times("a", 1.0, 0.4), *times("b", 1.0, 0.6), *times("c", 1.0, 9.0)), [FASTER])
    assert (answer.value, answer.met, answer.device) == (pytest.approx(0.6), "no", "card")


def test_a_lower_limit_takes_the_lowest() -> None:
    goal = Goal("share", "u", r".*", "device", 0.95, "copy / ours", at_least=True)
    rows = [row("u", case, "device", "copy / ours", "ratio", [share]) for case, share in (("a", 0.99), ("b", 0.96))]
    (answer,) = answers(entries(*rows), [goal])
    assert (answer.value, answer.met) == (0.96, "yes")


def test_nothing_measured_is_neither_yes_nor_no() -> None:
    (answer,) = answers([], [FASTER])
    assert (answer.value, answer.met) == (None, "not measured")


def test_no_number_is_no_success() -> None:
    assert not FASTER.is_met_by(float("nan"))


def test_table_keeps_what_is_lost_and_what_is_missing() -> None:
    missing = Goal("on a card", "u", r".*", "device", 0.5)
    text = answers_table(answers(entries(*times("a", 1e-3, 2e-3)), [FASTER, missing]))
    lost, absent = text.splitlines()[2:]
    assert lost.split()[-2:] == ["0.5", "no"]
    assert "1 ms" in lost
    assert "2.000" in lost
    assert absent.endswith("not measured")
    assert "needs a GPU" in absent


def test_cases_table_shows_every_subject() -> None:
    rows = [*times("a", 1e-3, 2e-3), row("launches", "b", "copies", "ours - none", "count", [2.0])]
    text = cases_table(rows)
    assert "2.000 (2.000-2.000)" in text
    assert "1 ms (1-1)" in text
    assert "ours - none" in text


def test_spread_of_a_step_tells_p90_too() -> None:
    assert spread(row("step", "a", "step", "ours", "us", [900.0, 1100.0, 2000.0, 3000.0])) == (
        "1.55 ms (1.02-2.4, p90 2.7)"
    )


def test_facts_without_a_goal(tmp_path: Path) -> None:
    assert "on a GPU: not measured" in readme.blocks(tmp_path)[0][2]
    counted = [("10", 1.5), ("50", 0.9), ("100", 0.5)]
    rows = [
        found
        for n, ours in counted
        for found in times(f"{n} plain, new addresses, cuda", 1.0, ours, "host", "scale + unscale_ + step + update")
    ]
    again = row("step", "GPT-2, fused AdamW", "addresses repeated", "share", "ratio", [0.75])
    write_csv(tmp_path / "card.csv", entries(*rows, again))
    text = readme.blocks(tmp_path)[0][2]
    assert "under `zero_grad()`: 75% (GPT-2, fused AdamW)\n" in text
    assert "no more than torch's from 50 gradients on (cuda path)" in text
    assert "not measured" not in text.partition("Without a goal:")[2]


def test_every_goal_has_a_question_of_its_own() -> None:
    assert len({goal.question for goal in GOALS}) == len(GOALS)


def all_kinds() -> list[Entry]:
    """Return rows for every panel of the plot."""
    host = [times(f"{n} plain, same addresses, cuda", n * 1e-6, n * 5e-7, "host", "unscale_") for n in (10, 100)]
    step = time_rows("step", "GPT-2, plain AdamW", "step", {"none": [1.0], "torch": [1.1], "ours": [1.01]})
    return entries(*(found for rows in host for found in rows), *step, *times("2000 x 64 fp32", 1.0, 2.0))


@pytest.mark.parametrize("rows", [all_kinds(), entries(*times("2000 x 64 fp32", 1.0, 2.0))], ids=["all", "few"])
def test_plot_is_the_same_for_the_same_rows(tmp_path: Path, rows: list[Entry]) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "new" / "second.svg"
    save_plot(rows, first)
    save_plot(rows, second)
    assert first.read_text() == second.read_text()
    assert first.read_text().startswith("<?xml")


def test_pages_tell_of_misses_and_causes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "answers", lambda found: answers(found, [FASTER]))
    write_csv(tmp_path / "card.csv", entries(*times("a", 1.0, 0.75)))
    pages = tmp_path / "README.md", tmp_path / "FRONT.md"
    monkeypatch.setattr(readme, "README", pages[0])
    monkeypatch.setattr(readme, "FRONT", pages[1])
    pages[0].write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    pages[1].write_text("before\n<!-- costs -->\n<!-- /costs -->\nafter\n")
    readme.rewrite(tmp_path)
    text = pages[0].read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "- It rains. Tried: an umbrella.\n  - is it faster (a, card): 0.750, the goal is <= 0.5\n" in text
    assert readme.current(pages[1], "costs").count("\n") == 1  # nothing of what is shown there was measured


def test_the_front_page_shows_what_was_measured_and_what_is_lost() -> None:
    shown = [goal for goal in GOALS if goal.question in headlines.LABELS]
    assert len(shown) == len(headlines.LABELS)
    assert all(goal.subject in ("ours / torch", "ours / none") for goal in shown)
    table = headlines.costs(answers(entries(*times("500 DTensor, stub", 4.0, 1.0, "host", "unscale_"))))
    assert table.count("\n") == 2
    assert "| 500 parameters under FSDP2: `unscale_`, host time |" in table
    assert "| 0.250          | card, GPU path on a stub driver |" in table


@pytest.mark.parametrize(("page", "name", "text"), readme.blocks())
def test_pages_say_what_the_csvs_say(page: Path, name: str, text: str) -> None:
    assert readme.current(page, name) == text


def test_whatever_was_missed_has_a_cause() -> None:
    found = answers(entry for path in readme.RESULTS.glob("*.csv") for entry in read_csv(path))
    missed = [answer.goal for answer in found if answer.met == "no"]
    assert [goal.question for goal in missed if goal.because is UNKNOWN] == []

"""Goals, tables and pages: what is said of the rows."""

from pathlib import Path

import pytest

from perf import __main__ as command
from perf import pages
from perf.goals import Goal, answers
from perf.rows import Entry, Machine, Place, Row

MACHINE = Machine("cpu-9-cores", "2.13", "3.7", "3.11", "abc", "2025-01-01")
FASTER = Goal("is it faster", "host", "alone", "[ab]", "step", 0.5, why="it rains")


def entries(*rows: Row) -> list[Entry]:
    return [(row, MACHINE) for row in rows]


def times(case: str, torch: float, ours: float, part: str = FASTER.part) -> list[Row]:
    return Place(FASTER.question, part, case).times(FASTER.metric, {"torch": [torch], "ours": [ours]})


def test_the_worst_case_that_matches_answers() -> None:
    rows = [*times("a", 1.0, 0.4), *times("b", 1.0, 0.6), *times("c", 1.0, 9.0), *times("a", 1.0, 9.0, part="not")]
    (answer,) = answers(entries(*rows), [FASTER])
    assert (answer.best.case, answer.row.case, answer.row.p50, answer.met) == ("a", "b", 0.6, "no")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0995, "a tenth"),
        (0.217, "at most a quarter"),
        (0.3333, "a third"),
        (0.338, "at most half"),
        (0.91, "as long"),
        (1.004, "as long"),
        (1.43, "up to 1.5 times as long"),
        (2.0, "up to 2 times as long"),
    ],
)
def test_words_never_say_less_than_the_figure_beside_them(share: float, words: str) -> None:
    assert pages.in_words(share) == words


@pytest.mark.parametrize(("page", "name", "text"), pages.blocks([*command.QUESTIONS]))
def test_the_page_says_what_the_csvs_say(page: Path, name: str, text: str) -> None:
    assert f"<!-- {name} -->\n{text}\n<!-- /{name} -->" in page.read_text()

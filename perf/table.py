"""What was measured as tables: one line a goal, and one line a case below."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from perf.goals import Answer
from perf.rows import FARTHER, Row

SUBJECTS = ("none", "torch", "ours", "copy")
COMPARISONS = ("ours / torch", "ours / none", "copy / ours", "ours / dispatch", "ours - none", FARTHER)
ANSWER_HEAD = ("question", "worst case", "on", "none", "torch", "ours", "ratio", "goal", "met")


def answers_table(answers: Sequence[Answer], style: str = "simple") -> str:
    """Return the budget's table.

    Args:
        answers: one line each.
        style: tabulate's name of it.
    """
    lines = [_answer_line(answer) for answer in answers]
    return str(tabulate(lines, ANSWER_HEAD, tablefmt=style, disable_numparse=True))


def cases_table(rows: Iterable[Row]) -> str:
    """Return a bench's table: every case and metric with all its subjects and comparisons."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.case, row.metric), {})[row.subject] = row
    known = (*SUBJECTS, *COMPARISONS)
    others = {name: None for case in cases.values() for name in case if name not in known and "/" not in name}
    columns = [name for name in (*known, *others) if any(name in case for case in cases.values())]
    lines = [[*key, *(spread(case[name]) if name in case else "" for name in columns)] for key, case in cases.items()]
    return str(tabulate(lines, ["case", "metric", *columns], disable_numparse=True))


def number(row: Row) -> str:
    """Return a row's median with its unit."""
    return _text(row.p50, row.unit)


def spread(row: Row) -> str:
    """Return a row's median, and p20 and p80 where there are several samples; of whole steps p90, too."""
    if row.samples < 2:
        return number(row)
    low, high, late = (_text(value, row.unit, row.p50).split(" ")[0] for value in (row.p20, row.p80, row.p90))
    tail = f", p90 {late}" if row.metric == "step" and row.unit == "us" else ""
    return f"{number(row)} ({low}-{high}{tail})"


def _answer_line(answer: Answer) -> list[str]:
    goal, rows = answer.goal, answer.rows
    if not rows:
        return [goal.question, goal.needs, "", "", "", "", "", goal.text(), answer.met]
    numbers = [number(rows[name]) if name in rows else "" for name in ("none", "torch", "ours")]
    ratio = number(rows[goal.subject]) if goal.subject != "ours" else ""
    case = next(iter(rows.values())).case
    return [goal.question, case, answer.device, *numbers, ratio, goal.text(), answer.met]


def _text(value: float, unit: str, median: float | None = None) -> str:
    """Return a value with its unit, or with the one that the median has."""
    if unit == "us":
        in_ms = (value if median is None else median) >= 1e3
        return f"{value / 1e3:.3g} ms" if in_ms else f"{value:.3g} us"
    return {"ratio": f"{value:.3f}", "count": f"{value:g}"}.get(unit, f"{value:.4g} {unit}")

"""Tables of what was measured, and the pages that show them: written from the CSVs, never by hand."""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tabulate import tabulate

from perf.goals import ABSENT, FIRST, HEADLINES, Answer, answers
from perf.rows import ROOT, Entry, Row, read_csv

RESULTS, OLD = ROOT / "perf/results", "version-0.1"  # what other code has measured
README, FRONT = ROOT / "perf/README.md", ROOT / "README.md"
WORDS = {
    0.1: "a tenth",
    0.2: "a fifth",
    0.25: "a quarter",
    0.33: "a third",
    0.5: "half",
    0.67: "two thirds",
    0.75: "three quarters",
    0.9: "nine tenths",
}


def entries_in(results: Path) -> list[Entry]:
    """Return the lines of all machines' CSVs."""
    return [each for path in sorted(results.glob("*/*.csv")) if path.parent.name != OLD for each in read_csv(path)]


table = partial(tabulate, tablefmt="github", disable_numparse=True)


def part_table(rows: Sequence[Row]) -> str:
    """Return one part's table: a line a case, a column a metric."""
    cells: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        cells.setdefault(row.case, {}).setdefault(row.metric, {})[row.subject] = row
    metrics = list(dict.fromkeys(row.metric for row in rows))
    lines = [[case, *(_cell(of.get(metric, {})) for metric in metrics)] for case, of in cells.items()]
    return table(lines, ["", *metrics])


def _cell(rows: dict[str, Row]) -> str:
    """Return the ratio, then torch's and our number, then the share of a copy or of the read rate."""
    names = [name for name in ("torch", "ours") if name in rows]
    both = " → ".join(_number(rows[name]) for name in names)
    ratio = f"{rows['ours / torch'].p50:.2f} ({both})" if "ours / torch" in rows else ""
    texts = [ratio or (f"{names[0]} {both}" if len(names) == 1 else both)]
    texts += [f"{rows[f'{name} / ours'].p50:.2f} of {name}" for name in ("copy", "read") if f"{name} / ours" in rows]
    return ", ".join(texts)


def _number(row: Row) -> str:
    if row.unit == "us":
        return f"{row.p50 / 1e3:.3g} ms" if row.p50 >= 1e3 else f"{row.p50:.3g} us"
    return f"{row.p50:g}" if row.unit == "count" else f"{row.p50:.3g}{'' if row.unit == 'ratio' else f' {row.unit}'}"


def question_tables(entries: Sequence[Entry], question: str) -> str:
    """Return a question's tables, machine by machine."""
    parts: dict[str, list[Row]] = {}
    for row, machine in entries:
        if row.question == question:
            place = f"{machine.device}, torch {machine.torch}, triton {machine.triton}, {machine.date}"
            parts.setdefault(_sentence(f"{row.part}, {place}:"), []).append(row)
    return "\n\n".join(f"{title}\n\n{part_table(rows)}" for title, rows in parts.items()) or _sentence(ABSENT)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text[-1] in ':.' else '.'}"


def goals_table(found: Sequence[Answer]) -> str:
    """Return each goal with its worst case."""
    numbers = [[a.row.case, a.machine.device, _number(a.row)] if a.row else [""] * 3 for a in found]
    lines = [[a.goal.text, *three, a.goal.limit_text, a.met] for a, three in zip(found, numbers, strict=True)]
    return table(lines, ("goal", "worst case", "machine", "ours", "limit", "met"))


def missed(found: Sequence[Answer]) -> str:
    """Return a line for each goal that is missed, and one for those that nobody has measured."""
    lines = []
    for answer in found:
        goal, _, row, machine = answer
        if answer.met == "no":
            why, place = f" {_sentence(goal.why)}" if goal.why else "", f"{row.case}, {machine.device}"
            lines.append(f"- {goal.text} ({place}): {_number(row)}, the goal is {goal.limit_text}.{why}")
    absent = [answer.goal.text for answer in found if answer.row is None]
    lines += [_sentence(f"- {_sentence(ABSENT)[:-1]}: {'; '.join(absent)}")] if absent else []
    return "\n".join(lines) or "Nothing."


def _range(*rows: Row) -> str:
    return " to ".join(dict.fromkeys(f"{row.p50:.2f}" for row in rows))


def in_words(share: float) -> str:
    """Return a share of torch's time as people say it, never less than it is."""
    share = round(share, 2)
    if share in WORDS:
        return WORDS[share]
    if share > 1:
        return f"up to {math.ceil(round(share * 100) / 10) / 10:g} times as long"
    return next((f"at most {words}" for limit, words in WORDS.items() if share < limit), "as long")


def headline_table(found: Sequence[Answer]) -> str:
    """Return a line for each headline, a column for each machine: its best case and its worst, and that in words."""
    cells: dict[str, dict[str, str]] = {}
    for goal, best, worst, machine in found:
        if worst:
            cells.setdefault(goal.text, {})[machine.device] = f"{_range(best, worst)}, {in_words(worst.p50)}"
    machines = sorted({machine for of in cells.values() for machine in of})
    lines = [[text, *(of.get(machine, "") for machine in machines)] for text, of in cells.items()]
    return table(lines, ("host time, as a share of torch's", *machines))


def blocks(questions: Sequence[str], results: Path = RESULTS) -> list[tuple[Path, str, str]]:
    """Return the page, the name and the text of everything that is written from the CSVs."""
    entries = entries_in(results)
    found, headlines = answers(entries), answers(entries, HEADLINES)
    return [
        (README, "costs", headline_table(headlines)),
        (README, "goals", goals_table(found)),
        (README, "missed", missed(found)),
        *((README, question, question_tables(entries, question)) for question in questions),
        (FRONT, "costs", headline_table([answer for answer in headlines if answer.goal.text in FIRST])),
    ]


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between a page's marks of that name."""
    marked = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    written, count = marked.subn(lambda marks: f"{marks[1]}{text}\n{marks[2]}", page.read_text())
    if not count:
        raise ValueError(f"{page} has no marks for {name}")
    page.write_text(written)

"""Tables of what was measured, and the pages that show them: written from the CSVs, never by hand."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from perf.goals import ABSENT, HEADLINES, Answer, answers
from perf.rows import ROOT, Entry, Row, read_csv

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
OLD = "version-0.1"  # what other code has measured
README, FRONT = FOLDER / "README.md", ROOT / "README.md"
EVEN = 0.05  # so near to torch's time counts as equal


def entries_in(results: Path) -> list[Entry]:
    """Return the lines of all machines' CSVs."""
    paths = sorted(path for path in results.glob("*/*.csv") if path.parent.name != OLD)
    return [entry for path in paths for entry in read_csv(path)]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return str(tabulate(lines, head, tablefmt="github", disable_numparse=True))


def part_table(rows: Sequence[Row]) -> str:
    """Return one part's table: a line a case, a column a metric."""
    cells: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        cells.setdefault(row.case, {}).setdefault(row.metric, {})[row.subject] = row
    metrics = list(dict.fromkeys(row.metric for row in rows))
    lines = [[case, *(_cell(of.get(metric, {})) for metric in metrics)] for case, of in cells.items()]
    return table(["", *metrics], lines)


def _cell(rows: dict[str, Row]) -> str:
    """Return the ratio, then torch's and our number, then the share of a copy or of the read rate."""
    names = [name for name in ("torch", "ours") if name in rows]
    both = " → ".join(_number(rows[name]) for name in names)
    texts = [f"{names[0]} {both}" if len(names) == 1 else both]
    if "ours / torch" in rows:
        texts = [f"{rows['ours / torch'].p50:.2f} ({both})"]
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
    lines = []
    for goal, _, row, machine in found:
        limit, met = f"{'>=' if goal.at_least else '<='} {goal.limit:g}", Answer(goal, None, row).met
        measured = [row.case, machine.device, _number(row)] if row and machine else [""] * 3
        lines.append([goal.text, *measured, limit, met])
    return table(("goal", "worst case", "machine", "ours", "limit", "met"), lines)


def missed(found: Sequence[Answer]) -> str:
    """Return a line for each goal that is missed, and one for those that nobody has measured."""
    lines = []
    for answer in found:
        goal, _, row, machine = answer
        if answer.met == "no" and row and machine:
            limit = f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}"
            why = f" {_sentence(goal.why)}" if goal.why else ""
            lines.append(f"- {goal.text} ({row.case}, {machine.device}): {_number(row)}, the goal is {limit}.{why}")
    absent = [answer.goal.text for answer in found if answer.row is None]
    lines += [_sentence(f"- {_sentence(ABSENT)[:-1]}: {'; '.join(absent)}")] if absent else []
    return "\n".join(lines) or "Nothing."


def gains(found: Sequence[Answer]) -> str:
    """Return what costs less than with torch's scaler, as much, and more."""
    kinds: dict[str, list[str]] = {"Less": [], "As much": [], "More": [], "Less or more, by size": []}
    measured = [answer for answer in found if answer.best and answer.row and answer.machine]
    for goal, best, worst, machine in measured:
        kind = "Less" if worst.p50 < 1 - EVEN else "As much" if worst.p50 <= 1 + EVEN else "More"
        kind = "Less or more, by size" if kind != "Less" and best.p50 < 1 - EVEN else kind
        kinds[kind].append(f"{goal.text} {_range(best, worst)} ({machine.device})")
    lines = [f"- **{kind}**: {'; '.join(texts)}." for kind, texts in kinds.items() if texts]
    on_gpu = any(not answer.machine.device.startswith("cpu") for answer in measured)
    return "\n".join(lines + ([] if on_gpu else [f"- On a GPU: {ABSENT}."]))


def _range(best: Row, worst: Row) -> str:
    return " to ".join(dict.fromkeys((f"{best.p50:.2f}", f"{worst.p50:.2f}")))


def blocks(questions: Sequence[str], results: Path = RESULTS) -> list[tuple[Path, str, str]]:
    """Return the page, the name and the text of everything that is written from the CSVs."""
    entries = entries_in(results)
    found, headlines = answers(entries), answers(entries, HEADLINES)
    front = [[a.goal.text, _range(a.best, a.row), a.machine.device] for a in headlines if a.best and a.row and a.machine]
    return [
        (README, "gains", gains(headlines)),
        (README, "goals", goals_table(found)),
        (README, "missed", missed(found)),
        *((README, question, question_tables(entries, question)) for question in questions),
        (FRONT, "costs", table(("host time, ours / torch", "best to worst case", "measured on"), front)),
    ]


def rewrite(questions: Sequence[str], results: Path = RESULTS) -> None:
    """Bring the pages up to date."""
    for page, name, text in blocks(questions, results):
        put(page, name, text)


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between a page's marks of that name."""
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not end:
        raise ValueError(f"{page} has no marks for {name}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")

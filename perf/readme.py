"""What the pages tell of results: written from the CSVs, never by hand."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from perf.goals import EVEN, Answer, Cause, answers
from perf.headlines import costs
from perf.machine import Machine
from perf.rows import Entry, read_csv
from perf.table import answers_table, number

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README, FRONT = FOLDER / "README.md", FOLDER.parent / "README.md"


def rewrite(results: Path = RESULTS) -> None:
    """Bring this folder's page and the front page up to date."""
    for page, name, text in blocks(results):
        put(page, name, text)


def blocks(results: Path = RESULTS) -> list[tuple[Path, str, str]]:
    """Return the page, the name and the text of everything that is written from the CSVs."""
    entries = [entry for path in sorted(results.glob("*.csv")) for entry in read_csv(path)]
    found = answers(entries)
    return [(README, "results", _results(entries, found)), (FRONT, "costs", costs(found))]


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between a page's marks of that name."""
    begin, end = _marks(name)
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def current(page: Path, name: str) -> str:
    """Return what stands there now."""
    begin, end = _marks(name)
    return page.read_text().partition(begin)[2].partition(end)[0].strip()


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def _results(entries: Sequence[Entry], found: Sequence[Answer]) -> str:
    """Return each goal's worst case, the misses, and where it was measured."""
    parts = [answers_table(found, "github"), "\n\n".join(_place(entries, device) for device in _devices(entries))]
    missed = [answer for answer in found if answer.met == "no"]
    if missed:
        causes = dict.fromkeys(answer.goal.because for answer in missed)
        parts.append("Missed:\n\n" + "\n".join(_missed_by(cause, missed) for cause in causes))
    parts.append("Without a goal:\n\n" + "\n".join([*_repeats(entries), *_crossovers(entries)]))
    return "\n\n".join(part for part in parts if part)


def _repeats(entries: Iterable[Entry]) -> list[str]:
    """Return how often gradients lie where they lay in the step before; none has to be copied to the GPU then."""
    rows = [entry.row for entry in entries if entry.row.metric == "addresses repeated"]
    told = [f"{row.p50:.0%} ({row.case})" for row in rows]
    if all(row.case.count("cpu") for row in rows):
        told.append("on a GPU: not measured")
    return [f"- gradients at the address of the step before, under `zero_grad()`: {', '.join(told)}"]


def _crossovers(entries: Iterable[Entry]) -> Iterator[str]:
    """Yield from how many plain gradients on a step costs the host no more than with torch's scaler."""
    ratios: dict[str, dict[int, float]] = {}
    for row in (entry.row for entry in entries):
        counted = re.fullmatch(r"(\d+) plain, new addresses, (\w+)", row.case)
        if counted and (row.metric, row.subject) == ("scale + unscale_ + step + update", "ours / torch"):
            ratios.setdefault(counted[2], {})[int(counted[1])] = row.p50
    for path, found in ratios.items():
        lost = [count for count, ratio in found.items() if ratio > EVEN]
        won = [count for count in found if count > max(lost, default=0)]
        yield f"- a step costs the host no more than torch's from {min(won, default='no')} gradients on ({path} path)"
    if "cuda" not in ratios:
        yield "- the same on a GPU, whose launches count there: not measured"


def _missed_by(cause: Cause, missed: Sequence[Answer]) -> str:
    """Return a cause, what was tried against it, and which goals it makes us miss, by how much."""
    why = cause.why[0].upper() + cause.why[1:]
    goals = [_miss(answer) for answer in missed if answer.goal.because == cause]
    return "\n".join([f"- {why}. Tried: {cause.tried}.", *goals])


def _miss(answer: Answer) -> str:
    assert answer.value is not None
    goal, row = answer.goal, answer.rows[answer.goal.subject]
    return f"  - {goal.question} ({row.case}, {answer.device}): {number(row)}, the goal is {goal.text()}"


def _devices(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.machine.device for entry in entries))


def _place(entries: Sequence[Entry], device: str) -> str:
    machines: list[Machine] = [entry.machine for entry in entries if entry.machine.device == device]
    newest = max(machines, key=lambda machine: machine.date)
    driver = f", driver {newest.driver}" if newest.driver else ""
    versions = f"torch {newest.torch}, triton {newest.triton}, Python {newest.python}"
    return f"Measured on {device}{driver}: {versions}, {newest.date}.\n\n![{device}](results/{device}.svg)"

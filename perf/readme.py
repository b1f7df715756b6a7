"""The README's results: written from the CSVs, never by hand."""

from collections.abc import Sequence
from pathlib import Path

from perf.goals import Answer, answers
from perf.machine import Machine
from perf.rows import Entry, read_csv
from perf.table import answers_table, number

FOLDER = Path(__file__).parent
README, RESULTS = FOLDER / "README.md", FOLDER / "results"
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def block(results: Path = RESULTS) -> str:
    """Return what belongs between the marks: each goal's worst case, the misses, and where it was measured."""
    entries = [entry for path in sorted(results.glob("*.csv")) for entry in read_csv(path)]
    found = answers(entries)
    missed = [_miss(answer) for answer in found if answer.met == "no"]
    parts = [answers_table(found, "github"), "\n\n".join(_place(entries, device) for device in _devices(entries))]
    if missed:
        parts.append("Missed:\n\n" + "\n".join(missed))
    return "\n\n".join(part for part in parts if part)


def current(text: str) -> str:
    """Return what stands between the marks of a README now."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def rewrite(readme: Path = README, results: Path = RESULTS) -> None:
    """Put the results of the CSVs into a README."""
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n{block(results)}\n{END}{after}")


def _miss(answer: Answer) -> str:
    """Return by how much a goal is missed, and why."""
    assert answer.value is not None
    goal, row = answer.goal, answer.rows[answer.goal.subject]
    where = f"{row.case}, {answer.device}"
    return f"- {goal.question} ({where}): {number(row)}, the goal is {goal.text()}. Cause: {goal.because}."


def _devices(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.machine.device for entry in entries))


def _place(entries: Sequence[Entry], device: str) -> str:
    machines: list[Machine] = [entry.machine for entry in entries if entry.machine.device == device]
    newest = max(machines, key=lambda machine: machine.date)
    driver = f", driver {newest.driver}" if newest.driver else ""
    versions = f"torch {newest.torch}, triton {newest.triton}, Python {newest.python}"
    return f"Measured on {device}{driver}: {versions}, {newest.date}.\n\n![{device}](results/{device}.svg)"

"""What was measured, one row a number: its spread, its place in the CSV, and the machine it belongs to."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perf.machine import Machine

RATIOS = (
    ("ours", "torch"),
    ("ours", "none"),
    ("torch", "none"),
    ("copy", "ours"),
    ("copy", "torch"),
    ("ours", "dispatch"),
)
FARTHER = "ours - none over torch - none"


@dataclass(frozen=True)
class Row:
    """One number of one case.

    Args:
        bench, case, metric: what was asked.
        subject: whose number it is: "none", "torch", "ours", "copy", "dispatch" (Triton's), or a comparison such as
            "ours / torch".
        unit: "us", "ms", "GB/s", "ratio", "count".
        samples: how many p20 to p90 were taken from.
    """

    bench: str
    case: str
    metric: str
    subject: str
    unit: str
    samples: int
    p20: float
    p50: float
    p80: float
    p90: float


class Entry(NamedTuple):
    """A row, and where and when it was measured."""

    row: Row
    machine: Machine


def row(bench: str, case: str, metric: str, subject: str, unit: str, values: Sequence[float]) -> Row:
    """Return the row of some values."""
    p20, p50, p80, p90 = (float(p) for p in np.percentile(values, (20, 50, 80, 90)))
    return Row(bench, case, metric, subject, unit, len(values), p20, p50, p80, p90)


def time_rows(bench: str, case: str, metric: str, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the rows of interleaved times in seconds: each subject's in us, and ratios of fair rounds."""
    rows = [row(bench, case, metric, name, "us", np.multiply(values, 1e6)) for name, values in times.items()]
    pairs = [(over, under) for over, under in RATIOS if over in times and under in times]
    sums = {name: _sums(values, len(times)) for name, values in times.items()}
    ratios = {f"{over} / {under}": np.divide(sums[over], sums[under]) for over, under in pairs}
    return rows + [row(bench, case, metric, name, "ratio", values) for name, values in ratios.items()]


def _sums(values: Sequence[float], size: int) -> np.ndarray:
    """Return the sums of every `size` values; what is left over at the end is left out, if it is not all."""
    size = min(size, len(values))
    return np.reshape(values[: len(values) // size * size], (-1, size)).sum(axis=1)


def pooled(rows: Iterable[Row]) -> list[Row]:
    """Return each number once that several runs measured: the medians of its percentiles, and all samples."""
    measured: dict[tuple[str, ...], list[Row]] = {}
    for each in rows:
        measured.setdefault((each.bench, each.case, each.metric, each.subject, each.unit), []).append(each)
    return [_pooled(key, of_one) for key, of_one in measured.items()]


def _pooled(key: tuple[str, ...], rows: Sequence[Row]) -> Row:
    percentiles = np.median([(each.p20, each.p50, each.p80, each.p90) for each in rows], axis=0)
    return Row(*key, sum(each.samples for each in rows), *map(float, percentiles))


def bandwidth_rows(
    bench: str, case: str, n_bytes: Mapping[str, int], times: Mapping[str, Sequence[float]]
) -> list[Row]:
    """Return what each subject moved in GB/s, for the bytes that it has to read and write."""
    speeds = {name: n_bytes[name] * 1e-9 / np.asarray(values) for name, values in times.items()}
    return [row(bench, case, "bandwidth", name, "GB/s", values) for name, values in speeds.items()]


def write_csv(path: Path, entries: Iterable[Entry]) -> None:
    """Write entries as a CSV, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for kind in (Row, Machine) for field in fields(kind)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for entry in entries:
            writer.writerow(_texts(entry))


def read_csv(path: Path) -> list[Entry]:
    """Return the entries of a CSV; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_entry(line) for line in csv.DictReader(file)]


def merged(old: Iterable[Entry], new: Sequence[Entry], benches: Iterable[str]) -> list[Entry]:
    """Return `new`, and of `old` the rows of benches that were not run again."""
    again = set(benches)
    return sorted([entry for entry in old if entry.row.bench not in again] + list(new), key=lambda e: e.row.bench)


def _texts(entry: Entry) -> dict[str, object]:
    numbers = {name: f"{value:.6g}" for name, value in asdict(entry.row).items() if isinstance(value, float)}
    return {**asdict(entry.row), **numbers, **asdict(entry.machine)}


def _entry(line: Mapping[str, str]) -> Entry:
    values = {field.name: field.type(line[field.name]) for field in fields(Row)}
    return Entry(Row(**values), Machine(**{field.name: line[field.name] for field in fields(Machine)}))

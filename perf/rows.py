"""What was measured, one row a number: its spread, its place in the CSV, and the machine it belongs to."""

import csv
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
RATIOS = (("ours", "torch"), ("copy", "ours"), ("copy", "torch"), ("read", "ours"))


@dataclass(frozen=True)
class Row:
    """One number.

    Args:
        question, part, case, metric: what was asked: a part of a question has one table.
        subject: whose number it is: "none", "torch", "ours", "copy", "read", or a ratio such as "ours / torch".
        unit: "us", "ms", "ratio" or "count".
        samples: how many p20, p50 and p80 were taken from.
    """

    question: str
    part: str
    case: str
    metric: str
    subject: str
    unit: str
    samples: int
    p20: float
    p50: float
    p80: float

    @property
    def place(self) -> "Place":
        """Where it stands in the tables."""
        return Place(self.question, self.part, self.case)


@dataclass(frozen=True)
class Machine:
    """Where, when and with what a number was measured."""

    device: str
    driver: str
    torch: str
    triton: str
    python: str
    commit: str
    date: str


class Entry(NamedTuple):
    """A row and its machine: a line of a CSV."""

    row: Row
    machine: Machine


class Place(NamedTuple):
    """A row's place in the tables."""

    question: str
    part: str
    case: str

    def row(self, metric: str, subject: str, unit: str, values: Sequence[float]) -> Row:
        """Return the row of some values."""
        p20, p50, p80 = (float(p) for p in np.percentile(values, (20, 50, 80)))
        return Row(*self, metric, subject, unit, len(values), p20, p50, p80)

    def times(self, metric: str, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """Return the rows of interleaved times in seconds: each subject's in us, and the ratios of rounds."""
        rows = [self.row(metric, name, "us", np.multiply(values, 1e6)) for name, values in times.items()]
        pairs = [(over, under) for over, under in RATIOS if over in times and under in times]
        sums = {name: _sums(values, len(times)) for name, values in times.items()}
        return rows + [self.row(metric, f"{a} / {b}", "ratio", np.divide(sums[a], sums[b])) for a, b in pairs]

    def counts(self, metric: str, counts: Mapping[str, float]) -> list[Row]:
        """Return the rows of what was counted, by subject."""
        return [self.row(metric, name, "count", [count]) for name, count in counts.items()]


def _sums(values: Sequence[float], size: int) -> np.ndarray:
    """Return the sums of every `size` rounds, in which each subject was first once; of all values if there are fewer."""
    size = min(size, len(values))
    return np.reshape(values[: len(values) // size * size], (-1, size)).sum(axis=1)


def pooled(rows: Iterable[Row]) -> list[Row]:
    """Return each number once that several runs measured: the medians of its percentiles, and all samples."""
    measured: dict[tuple[str, ...], list[Row]] = {}
    for each in rows:
        measured.setdefault((*each.place, each.metric, each.subject, each.unit), []).append(each)
    return [
        Row(*key, sum(each.samples for each in same), *np.median([(e.p20, e.p50, e.p80) for e in same], axis=0).tolist())
        for key, same in measured.items()
    ]


def write_csv(path: Path, rows: Iterable[Row], machine: Machine) -> None:
    """Write a machine's rows as a CSV, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for kind in (Row, Machine) for field in fields(kind)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            numbers = {name: f"{value:.6g}" for name, value in asdict(row).items() if isinstance(value, float)}
            writer.writerow({**asdict(row), **numbers, **asdict(machine)})


def read_csv(path: Path) -> list[Entry]:
    """Return the lines of a CSV."""
    with path.open(newline="") as file:
        return [
            Entry(
                Row(**{field.name: field.type(line[field.name]) for field in fields(Row)}),
                Machine(**{field.name: line[field.name] for field in fields(Machine)}),
            )
            for line in csv.DictReader(file)
        ]


def here() -> Machine:
    """Return what this process runs on; the device is named for a folder."""
    commit = _output("git", "rev-parse", "--short", "HEAD")
    changed = commit and _output("git", "status", "--porcelain", "--", "scaler_triton", "kernels")
    if torch.cuda.is_available():
        device = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    else:
        device = f"cpu-{len(os.sched_getaffinity(0))}-cores"
    return Machine(
        device=device,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        torch=torch.__version__,
        triton=_triton(),
        python=platform.python_version(),
        commit=f"{commit}+changes" if changed else commit or os.environ.get("COMMIT", ""),
        date=datetime.date.today().isoformat(),
    )


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails, as git in a copy of the tree."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

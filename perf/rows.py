"""What was measured, one row a number: its spread, its place in the CSV, and the machine it belongs to."""

import csv
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
RATIOS = (("ours", "torch"), ("copy", "ours"), ("copy", "torch"), ("read", "ours"))


class Place(NamedTuple):
    """A row's place in the tables: a part of a question has one table, a case a line."""

    question: str
    part: str
    case: str

    def row(self, metric: str, subject: str, unit: str, values: Sequence[float]) -> "Row":
        """Return the row of some values."""
        p20, p50, p80 = (float(p) for p in np.percentile(values, (20, 50, 80)))
        return Row(*self, metric, subject, unit, len(values), p20, p50, p80)

    def times(self, metric: str, times: Mapping[str, Sequence[float]]) -> list["Row"]:
        """Return the rows of interleaved times in seconds: each subject's in us, and the ratios of rounds."""
        ratios = {f"{a} / {b}": np.divide(times[a], times[b]) for a, b in RATIOS if a in times and b in times}
        rows = [self.row(metric, name, "us", np.multiply(values, 1e6)) for name, values in times.items()]
        return rows + [self.row(metric, name, "ratio", values) for name, values in ratios.items()]

    def counts(self, metric: str, counts: Mapping[str, float]) -> list["Row"]:
        """Return the rows of what was counted, by subject."""
        return [self.row(metric, name, "count", [count]) for name, count in counts.items()]


class Row(NamedTuple):
    """One number, of "none", "torch", "ours", "copy" or "read", or a ratio such as "ours / torch"."""

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


class Machine(NamedTuple):
    """Where, when and with what a number was measured."""

    device: str
    torch: str
    triton: str
    python: str
    commit: str
    date: str


Entry = tuple[Row, Machine]  # a line of a CSV
FIELDS = (*Row._fields, *Machine._fields)


def pooled(rows: Iterable[Row]) -> list[Row]:
    """Return each number once that several runs measured: the medians of its percentiles, and all samples."""
    measured: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        measured.setdefault(row[:6], []).append(row)
    return [
        Row(*key, sum(row.samples for row in same), *np.median([row[7:] for row in same], axis=0).tolist())
        for key, same in measured.items()
    ]


def write_csv(path: Path, rows: Iterable[Row], machine: Machine) -> None:
    """Write a machine's rows as a CSV, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows([*row[:7], *(f"{value:.6g}" for value in row[7:]), *machine] for row in rows)


def read_csv(path: Path) -> list[Entry]:
    """Return the lines of a CSV; ValueError if it has other columns."""
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    if tuple(head) != FIELDS:
        raise ValueError(f"{path} has other columns: {head}")
    return [(Row(*line[:6], int(line[6]), *map(float, line[7:10])), Machine(*line[10:])) for line in lines]


def here() -> Machine:
    """Return what this process runs on; the device is named for a folder."""
    device = f"cpu-{len(os.sched_getaffinity(0))}-cores"
    if torch.cuda.is_available():
        device = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    triton = version("triton") if find_spec("triton") else ""
    command, commit = ["git", "describe", "--always", "--dirty"], os.environ.get("COMMIT", "")
    with suppress(OSError, subprocess.CalledProcessError):  # as in a copy of the tree, which has no git
        commit = subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    return Machine(device, torch.__version__, triton, platform.python_version(), commit, str(datetime.date.today()))

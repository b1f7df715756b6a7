"""`python -m scaler_triton tune`: finds the quickest launch configurations for this GPU and keeps them.

Each pass runs over scratch, in three element sizes and two workloads: one large span, and 2000 tensors of mixed size.
Every candidate is checked against torch first, then timed. For each workload the quickest replaces the default, if it
is quicker beyond noise: in every one of its rounds, than the default in any of its own; and by more than 1 % in the
median. Norm and clip get one together, by the sum of their times, as clipping makes both over one table. Other results
are figures for people, which the file keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scaler_triton import __version__
from scaler_triton.cli.console import complain, driver_version, missing_packages, new_bar
from scaler_triton.text import error_line, one_line, table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scaler_triton.kernels.config import Key, LaunchConfig

HELP = "find the quickest launch configurations for the current GPU, on scratch, and keep them for later runs"

# Every candidate is timed once per round, so that a GPU that heats up slows all of them.
ROUNDS = 5
# In each round so many launches are timed, one behind the other, after some that are not; the median counts.
LAUNCHES, WARM_UP = 50, 5
MARGIN = 0.01
# How often a pass moves the bytes of its gradients.
MOVES = {"unscale": 2, "check": 1, "norm": 1, "clip": 2}
# Passes that a step makes one behind the other: with one configuration, for both, they share a table.
TOGETHER = dict.fromkeys(("norm", "clip"), ("norm", "clip"))
GAP = 512  # bytes, as torch's allocator aligns tensors
HEAD = ["pass", "bytes", "workload", "default", "GB/s", "chosen", "GB/s", "quicker", "of a copy", "dropped"]

Timer = Callable[[Callable[[], None]], float]  # milliseconds of a launch
Workloads = Callable[[int], Mapping[str, Sequence[int]]]  # elements of each tensor, for elements of so many bytes


class Figures(NamedTuple):
    """What was measured of one candidate: milliseconds of each round, or why it was dropped."""

    key: Key
    config: LaunchConfig
    ms: list[float]
    gb: float  # 10^9 bytes that one launch moves
    copy_gbps: float  # what torch's copy of the same tensors reached, bytes read and written
    problem: str = ""

    @property
    def gbps(self) -> float:
        """The bandwidth of the median round."""
        return self.gb / statistics.median(self.ms) * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the tuner's arguments."""
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write GPU.json there, to be shipped; default: the user's cache"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, show what was found, write the file and return the exit status."""
    if refusal := why_not():
        return complain(refusal)
    import torch

    from scaler_triton.kernels import config

    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    path = arguments.out / config.file_name(gpu) if arguments.out else config.user_file(gpu)
    if path is None:
        return complain("there is no home folder for the file: name a folder with --out")
    try:  # before minutes of measuring
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied", str(path.parent))
    except OSError as error:
        return complain(f"cannot write to {error.filename}: {error.strerror}")
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    with torch.cuda.device(device):
        return tune(device, gpu, path, gpu_workloads(l2_bytes), gpu_timer(l2_bytes))


def why_not() -> str:
    """Return what keeps this process from tuning, in words; empty if nothing does."""
    if missing := missing_packages(["torch", "triton"]):
        return f"tune needs {', '.join(missing)}"
    import torch

    from scaler_triton.kernels.launch import INTERPRETED

    if INTERPRETED:
        return "tune does nothing under TRITON_INTERPRET=1: an interpreter's time is not a GPU's"
    return "" if torch.cuda.is_available() else "tune needs a GPU, and there is none here"


def tune(device: torch.device, gpu: str, path: Path, workloads: Workloads, timer: Timer) -> int:
    """Measure, show what was found, write the file and return the exit status."""
    from scaler_triton.kernels import config

    passes = len(config.ITEMSIZES) * len(config.WORKLOADS) * len(config.MODES)
    total = passes * len(config.CANDIDATES) * (1 + ROUNDS)
    try:
        with new_bar(f"tuning {gpu}", total) as bar:
            figures = list(measure(device, workloads, timer, bar))
    except RuntimeError as error:
        return complain(f"tune failed, and nothing is written: {one_line(error)}", 1)
    chosen = choose(figures)
    print(f"\n{report(figures, chosen)}\n")
    try:
        write(path, gpu, chosen, provenance=provenance(device), measured=[record(each) for each in figures])
    except OSError as error:
        return complain(f"cannot write {path}: {error.strerror}", 1)
    config.read.cache_clear()
    print(f"written: {path}")
    return 0


def measure(device: torch.device, workloads: Workloads, timer: Timer, bar: Any) -> Iterator[Figures]:
    """Check and time every candidate in every pass, element size and workload.

    Raises: RuntimeError if the default itself is wrong: then there is nothing to compare with.
    """
    import torch

    from scaler_triton.kernels.config import CANDIDATES, DEFAULT, ITEMSIZES, MODES

    dtypes = {2: torch.float16, 4: torch.float32, 8: torch.float64}
    for itemsize in ITEMSIZES:
        for workload, numels in workloads(itemsize).items():
            scratch = Scratch(numels, dtypes[itemsize], device)
            copy_ms = statistics.median(timer(scratch.copy) for _ in range(ROUNDS))
            for mode in MODES:
                bar.set_postfix_str(f"{mode}, {itemsize} bytes, {workload}", refresh=False)
                problems = {}
                for each in CANDIDATES:
                    problems[each] = scratch.problem(mode, each)
                    bar.update()
                if problems[DEFAULT]:
                    raise RuntimeError(f"the default fails in {mode} of {itemsize} bytes: {problems[DEFAULT]}")
                launches = {each: scratch.launch_of(mode, each) for each in CANDIDATES if not problems[each]}
                rounds: dict[LaunchConfig, list[float]] = {each: [] for each in CANDIDATES}
                for each in ROUNDS * CANDIDATES:
                    if each in launches:
                        rounds[each].append(timer(launches[each]))
                    bar.update()
                for each in CANDIDATES:
                    moved, copied = MOVES[mode] * scratch.gb, 2 * scratch.gb_with_gaps / copy_ms * 1e3
                    yield Figures((mode, itemsize, workload), each, rounds[each], moved, copied, problems[each])


def choose(figures: Sequence[Figures]) -> dict[Key, LaunchConfig]:
    """Return the quickest configuration for each pass, element size and workload; the default unless beyond noise."""
    from scaler_triton.kernels.config import DEFAULT

    found, chosen = {(each.key, each.config): each.ms for each in figures}, {}
    for key in dict.fromkeys(each.key for each in figures):
        passes = [(mode, *key[1:]) for mode in TOGETHER.get(key[0], [key[0]])]
        configs = dict.fromkeys(each.config for each in figures if each.key == key)
        rounds = {each: list(map(sum, zip(*(found[one, each] for one in passes), strict=False))) for each in configs}
        medians = {each: statistics.median(ms) for each, ms in rounds.items() if ms}
        limit, least = medians[DEFAULT] / (1 + MARGIN), min(rounds[DEFAULT])
        better = [each for each, median in medians.items() if median < limit and max(rounds[each]) < least]
        chosen[key] = min(better, key=medians.__getitem__, default=DEFAULT)
    return chosen


def report(figures: Sequence[Figures], chosen: Mapping[Key, LaunchConfig]) -> str:
    """Return a table of what was chosen beside the default, and in words what comes of it."""
    from scaler_triton.kernels.config import DEFAULT

    found = {(each.key, each.config): each for each in figures}
    rows = [HEAD]
    for key, best in chosen.items():
        before, after = found[key, DEFAULT], found[key, best]
        n_dropped = sum(bool(each.problem) for each in figures if each.key == key)
        quicker = f"{after.gbps / before.gbps - 1:.1%}" if best != DEFAULT else "-"
        cells = [str(DEFAULT), f"{before.gbps:.0f}", str(best), f"{after.gbps:.0f}", quicker]
        rows.append([*map(str, key), *cells, f"{after.gbps / after.copy_gbps:.0%}", str(n_dropped)])
    problems = dict.fromkeys(
        f"dropped: {each.config} in {each.key[0]}: {each.problem}" for each in figures if each.problem
    )
    changed = sum(best != DEFAULT for best in chosen.values())
    rule = f"quicker in each of {ROUNDS} rounds, and by more than {MARGIN:.0%} in the median"
    summary = f"{changed} of {len(chosen)} defaults replaced, each by what was {rule}."
    return "\n".join([*table(rows, "<><" + ">" * 7), *map(one_line, problems), "", summary])


def write(path: Path, gpu: str, chosen: Mapping[Key, LaunchConfig], **figures: Any) -> None:
    """Write a file as `kernels/config.py` reads it, with one line an entry, at once: nobody sees half of it."""
    configs = [
        {"mode": mode, "itemsize": itemsize, "workload": workload, "config": list(astuple(best))}
        for (mode, itemsize, workload), best in chosen.items()
    ]
    parts = []
    for name, value in {"gpu": gpu, "configs": configs, **figures}.items():
        lines = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(name)}: " + (f"[\n  {lines}\n ]" if lines else json.dumps(value)))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def provenance(device: torch.device) -> dict[str, Any]:
    """Return where and when the figures were taken."""
    import torch
    import triton

    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scaler_triton": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": driver_version(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["memory_bytes"], facts["l2_bytes"] = properties.total_memory, properties.L2_cache_size
        facts["multiprocessors"] = properties.multi_processor_count
    return facts


def record(figures: Figures) -> dict[str, Any]:
    """Return a candidate's figures as they are written: four digits are more than repeat."""
    mode, itemsize, workload = figures.key
    entry = {"mode": mode, "itemsize": itemsize, "workload": workload, "config": list(astuple(figures.config))}
    if figures.problem:
        return {**entry, "problem": figures.problem[:1000]}
    return {**entry, "ms": [float(f"{ms:.4g}") for ms in figures.ms], "copy_gbps": round(figures.copy_gbps)}


def gpu_workloads(l2_bytes: int) -> Workloads:
    """Return one span four times as large as the L2 cache, and 2000 tensors from 16 to 262,144 elements."""
    span_bytes = max(4 * l2_bytes, 64 * 2**20)
    draw = random.Random(0)  # noqa: S311
    mixed = [int(2 ** draw.uniform(4, 18)) for _ in range(2000)]
    return lambda itemsize: {"span": [span_bytes // itemsize], "mixed": mixed}


def gpu_timer(l2_bytes: int) -> Timer:
    """Return a timer of launches on the current GPU whose L2 cache is cold."""
    import torch

    junk = torch.zeros(l2_bytes, dtype=torch.int32, device="cuda")  # four times the cache

    def timer(launch: Callable[[], None]) -> float:
        events = []
        for _ in range(WARM_UP + LAUNCHES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            junk.sum()  # read, not written: a check would have to write dirty lines back, of which it makes none
            begin.record()
            launch()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        ms: float = statistics.median(begin.elapsed_time(end) for begin, end in events[WARM_UP:])
        return ms

    return timer


class Scratch:
    """One workload's tensors, with NaN between them, so that reads and writes past a tensor are detected.

    Args:
        numels: elements of each tensor, at least one.
    """

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        import torch

        self.numels, self.dtype, self.device = list(numels), dtype, device
        gap, self.starts, end = GAP // dtype.itemsize, [], 0
        for numel in numels:
            self.starts.append((end // gap + 1) * gap)
            end = self.starts[-1] + numel
        self.original = torch.full((end + gap,), float("nan"), dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(0)
        for view in self.views(self.original):
            view.copy_(torch.randn(view.shape, generator=generator, device=device, dtype=torch.float32))
        self.buffer, self.spare = self.original.clone(), self.original.clone()
        self.gb, self.gb_with_gaps = sum(numels) * dtype.itemsize / 1e9, self.original.nbytes / 1e9
        self.scale, self.flag, self.norm = torch.zeros(3, device=device)
        self.totals = torch.zeros(5, dtype=torch.float64, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in one of the buffers."""
        return [buffer[start : start + numel] for start, numel in zip(self.starts, self.numels, strict=True)]

    def copy(self) -> None:
        """Copy the buffer, to measure the device's bandwidth."""
        self.spare.copy_(self.buffer)

    def launch_of(self, mode: str, config: LaunchConfig, scale: float = -1.0) -> Callable[[], None]:
        """Return a repeatable launch on the buffer, put back first: with a scale of -1 nothing underflows in time."""
        from scaler_triton.kernels.clip import launch_clip
        from scaler_triton.kernels.norm import launch_sum_of_squares
        from scaler_triton.kernels.table import GradTable
        from scaler_triton.kernels.unscale import launch_check, launch_unscale

        self.buffer.copy_(self.original)
        self.scale.fill_(scale)
        self.flag.zero_()
        self.totals.fill_(1.0)
        self.totals[1] = 0
        grads = GradTable(self.numels, self.dtype, self.device, config)
        grads.set_addresses(tuple(view.data_ptr() for view in self.views(self.buffer)))
        return {
            "unscale": lambda: launch_unscale(grads, self.scale, self.flag, inverse=False),
            "check": lambda: launch_check(grads, self.flag),
            "norm": lambda: launch_sum_of_squares(grads, self.scale, self.flag, self.totals),
            "clip": lambda: launch_clip(grads, self.scale, self.totals, 2.0, self.norm),
        }[mode]

    def problem(self, mode: str, config: LaunchConfig) -> str:
        """Return how a launch differs from torch, in words; whatever a compiler or a driver raises is a problem."""
        try:
            return self._problem(mode, config)
        except Exception as error:
            return error_line(error)

    def _problem(self, mode: str, config: LaunchConfig) -> str:
        import torch

        launch = self.launch_of(mode, config, 3.0)  # a third: every product is rounded
        launch()
        wanted = self.original.clone()
        if MOVES[mode] == 2:  # the coefficient of a norm of 1 and a bound of 2 is 1
            wide = torch.promote_types(self.dtype, torch.float32)
            inverse = self.scale.double().reciprocal().float().to(wide)
            for view in self.views(wanted):
                view.copy_(view.to(wide) * inverse)
        if not torch.equal(self.buffer.nan_to_num(7.0), wanted.nan_to_num(7.0)):
            return "wrong values"
        if mode == "norm":
            squares = sum((view.double() ** 2).sum() for view in self.views(self.original)) / 9
            if not torch.allclose(self.totals[0], torch.as_tensor(squares, device=self.device), rtol=1e-6):
                return "a wrong norm"
        if self.flag != 0:
            return "finite values flagged"
        if mode != "clip":  # which takes the flag as it is
            for tensor in {0, len(self.numels) - 1}:
                launch = self.launch_of(mode, config, 3.0)
                self.buffer[self.starts[tensor] + self.numels[tensor] - 1] = float("inf")
                launch()
                if self.flag != 1:
                    return "an Inf was missed"
        return ""

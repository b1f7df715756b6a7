"""Finds the fastest launch configuration: every candidate is checked, timed and compared with the default.

Device and timer are arguments, so that the rules can be tested without a GPU.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from scaler_triton.kernels.launch_config import CANDIDATES, DEFAULT, ITEMSIZES, MODES, LaunchConfig
from scaler_triton.kernels.scratch import Scratch

# A candidate must beat the default by more than this fraction on both workloads: less is noise.
MARGIN = 0.02
# Every candidate is timed once per round, so that a GPU that heats up slows all of them.
ROUNDS = 3
# In each round so many are timed, one behind the other, after some that are not.
LAUNCHES, WARM_UP = 100, 10
DTYPES = {2: torch.float16, 4: torch.float32, 8: torch.float64}

Workloads = Callable[[int], Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class Trial:
    """Something to be timed: `launch` may be called any number of times.

    Args:
        mode: "unscale", "check", or "copy" for torch's own.
        itemsize: bytes an element.
        workload: its name.
        config: the shape of a program; None for a copy.
        launch: enqueues it once.
    """

    mode: str
    itemsize: int
    workload: str
    config: LaunchConfig | None
    launch: Callable[[], None]


Timer = Callable[[Trial], float]


@dataclass(frozen=True)
class Figures:
    """The measurements of one candidate.

    Args:
        mode: "unscale" or "check".
        itemsize: bytes an element.
        config: the candidate.
        problem: why it was dropped; empty if its results were right.
        ms: milliseconds per launch, the median over the rounds, by workload; empty if it was dropped.
        gbps: 10^9 bytes moved per second, by workload.
        copy_gbps: the same for torch's copy of the large span in this run, bytes read and written.
    """

    mode: str
    itemsize: int
    config: LaunchConfig
    problem: str
    ms: Mapping[str, float]
    gbps: Mapping[str, float]
    copy_gbps: float


def gpu_workloads(l2_bytes: int) -> Workloads:
    """Return one span four times as large as the L2 cache, and 2000 tensors from 16 to 262,144 elements."""
    span_bytes = max(4 * l2_bytes, 64 * 2**20)
    draw = random.Random(0)
    mixed = [int(2 ** draw.uniform(4, 18)) for _ in range(2000)]
    return lambda itemsize: {"span": [span_bytes // itemsize], "mixed": mixed}


def count_steps(candidates: int = len(CANDIDATES)) -> int:
    """Return how often `sweep` calls `progress`."""
    return len(ITEMSIZES) * len(MODES) * candidates * (1 + ROUNDS)


def sweep(
    device: torch.device,
    workloads: Workloads,
    timer: Timer,
    progress: Callable[[], object] = lambda: None,
    candidates: Sequence[LaunchConfig] = CANDIDATES,
) -> list[Figures]:
    """Check and time every candidate for every mode and element size.

    Args:
        device: where the kernels run; its scratch takes up to ten times the larger workload.
        workloads: the elements of each tensor by the workload's name, for elements of so many bytes; one is "span".
        timer: milliseconds that a trial takes.
        progress: called `count_steps` times.
        candidates: the default among them.

    Raises: RuntimeError if the default itself is wrong: then nothing can be compared.
    """
    found: list[Figures] = []
    for itemsize in ITEMSIZES:
        numels = workloads(itemsize)
        scratches = {name: Scratch(numels[name], DTYPES[itemsize], device) for name in numels}
        copy_gbps = _time_copy(scratches["span"], itemsize, timer)
        for mode in MODES:
            one = _Pass(mode, itemsize, scratches, copy_gbps)
            found += one.measure(timer, progress, candidates)
    return found


def choose(figures: Sequence[Figures]) -> LaunchConfig:
    """Return the default, unless a candidate beats it by more than `MARGIN` on every workload; then the fastest.

    Args:
        figures: of one mode and element size, the default's among them.
    """
    default = next(each for each in figures if each.config == DEFAULT)

    def times(rival: Figures) -> list[float]:
        """Return how many times as fast as the default, by workload."""
        return [default.ms[name] / rival.ms[name] for name in default.ms]

    better = [each for each in figures if not each.problem and min(times(each)) > 1 + MARGIN]
    # Of equals the first in the list.
    return max(better, key=lambda each: statistics.geometric_mean(times(each)), default=default).config


def choose_all(figures: Iterable[Figures]) -> dict[tuple[str, int], LaunchConfig]:
    """Return the choice for each mode and element size in bytes."""
    passes: dict[tuple[str, int], list[Figures]] = {}
    for each in figures:
        passes.setdefault((each.mode, each.itemsize), []).append(each)
    return {key: choose(group) for key, group in passes.items()}


def gpu_timer(trial: Trial) -> float:
    """Return the milliseconds that a trial takes on the current GPU, whose L2 cache is cold: a median of many."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    junk = torch.zeros(l2_bytes, dtype=torch.int32, device="cuda")  # four times the cache
    marks = [_launch_cold(trial, junk) for _ in range(WARM_UP + LAUNCHES)]
    torch.cuda.synchronize()
    ms: float = statistics.median(begin.elapsed_time(end) for begin, end in marks[WARM_UP:])
    return ms


def _launch_cold(trial: Trial, junk: torch.Tensor) -> list[torch.cuda.Event]:
    """Enqueue a trial once, and return the events around it."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    junk.sum()  # read, not written: a check would have to write dirty lines back, of which it makes none
    marks[0].record()
    trial.launch()
    marks[1].record()
    return marks


def _time_copy(scratch: Scratch, itemsize: int, timer: Timer) -> float:
    """Return 10^9 bytes a second that torch's copy reads and writes."""
    rounds = [timer(Trial("copy", itemsize, "span", None, scratch.copy)) for _ in range(ROUNDS)]
    return 2 * scratch.buffer.nbytes / statistics.median(rounds) / 1e6


@dataclass(frozen=True)
class _Pass:
    """One mode over elements of one size."""

    mode: str
    itemsize: int
    scratches: Mapping[str, Scratch]
    copy_gbps: float

    def measure(
        self, timer: Timer, progress: Callable[[], object], candidates: Sequence[LaunchConfig]
    ) -> list[Figures]:
        problems: dict[LaunchConfig, str] = {}
        for config in candidates:
            problems[config] = self._problem(config)
            progress()
        if problems[DEFAULT]:
            raise RuntimeError(
                f"the default configuration fails in {self.mode} of {self.itemsize} bytes: {problems[DEFAULT]}"
            )
        trials = {config: [] if problems[config] else self._trials(config) for config in candidates}
        times: dict[LaunchConfig, list[list[float]]] = {config: [] for config in candidates}
        for _ in range(ROUNDS):
            for config in candidates:
                times[config].append([timer(trial) for trial in trials[config]])
                progress()
        return [self._figures(config, problems[config], times[config]) for config in candidates]

    def _problem(self, config: LaunchConfig) -> str:
        """Return what is wrong with a candidate; whatever a compiler or a driver raises is."""
        try:
            for name, scratch in self.scratches.items():
                if problem := scratch.problem(self.mode, config):
                    return f"{problem} ({name})"
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def _trials(self, config: LaunchConfig) -> list[Trial]:
        return [
            Trial(self.mode, self.itemsize, name, config, scratch.launch_of(self.mode, config))
            for name, scratch in self.scratches.items()
        ]

    def _figures(self, config: LaunchConfig, problem: str, rounds: Sequence[Sequence[float]]) -> Figures:
        medians = map(statistics.median, zip(*rounds, strict=True))
        ms = {} if problem else dict(zip(self.scratches, medians, strict=True))
        passes = 2 if self.mode == "unscale" else 1
        gbps = {name: passes * self.scratches[name].nbytes / ms[name] / 1e6 for name in ms}
        return Figures(self.mode, self.itemsize, config, problem, ms, gbps, self.copy_gbps)

"""Times of several subjects, taken in turn in one process."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Clock = Callable[[Callable[[], Any]], float]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Subject:
    """What is timed, `run`, and what must happen around it, which is not."""

    run: Callable[[], Any]
    before: Callable[[], Any] = nothing
    after: Callable[[], Any] = nothing


@dataclass(frozen=True)
class Effort:
    """How often to repeat: for `seconds`, but at least `least` and at most `most` rounds."""

    seconds: float
    least: int
    most: int = 300


QUICK = Effort(seconds=0.02, least=3, most=5)


def host_clock(run: Callable[[], Any]) -> float:
    """Return how many seconds a call takes on the host."""
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) * 1e-9


def interleaved(
    subjects: Mapping[str, Subject], effort: Effort, *, clock: Clock = host_clock, warmup: int = 3
) -> dict[str, list[float]]:
    """Return each subject's times in seconds; in every round each has one turn, and another one begins.

    Whatever the machine does meanwhile hits all of them, so times of the same rounds may be compared. Who begins finds
    its own code in the caches if it ended the round before: only rounds in which each began once are fair.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    with _no_collection():
        for name in [*subjects] * warmup:
            _turn(subjects[name], clock)
        for order in rotations([*subjects], effort):
            for name in order:
                times[name].append(_turn(subjects[name], clock))
    return times


def rotations(names: list[str], effort: Effort) -> Iterator[list[str]]:
    """Give `names` once a round, each time with another one first, until each was first as often as the others."""
    end = time.monotonic() + effort.seconds
    nth = 0
    while nth < effort.least or nth % len(names) or (nth < effort.most and time.monotonic() < end):
        first = nth % len(names)
        yield names[first:] + names[:first]
        nth += 1


def _turn(subject: Subject, clock: Clock) -> float:
    subject.before()
    seconds = clock(subject.run)
    subject.after()
    return seconds


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of one subject's time for what another left."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread, as `torchrun` does: threads that wait for a busy core would be all that is timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

"""Times of several subjects that take turns in one process."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

Clock = Callable[[Callable[[], Any]], float]
Times = dict[str, list[float]]  # seconds, by subject
# Cycles that a GPU idles at first, about 10 ms, and at most.
HEAD_START, LONGEST = 20_000_000, 320_000_000


class WrongResult(AssertionError):
    """A subject computes something else than it must: its time would be no answer."""


def require(holds: object, text: str) -> None:
    """Raise WrongResult with `text` unless `holds`."""
    if not holds:
        raise WrongResult(text)


class Subject(NamedTuple):
    """What is timed, `run`, and what must happen around it, which is not."""

    run: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


class Context(NamedTuple):
    """Where the scale is, "cuda" or "cpu"; and whether a few rounds of the smallest cases will do, to try all out."""

    device: str
    quick: bool = False

    def rounds(self, names: Sequence[str], seconds: float) -> Iterator[list[str]]:
        """Yield `names` once a round, for `seconds` but 12 to 600 rounds, each time in an order that is drawn.

        Whoever follows one that runs the same code finds it in the caches; so all follow each other equally often.
        """
        end, least = time.monotonic() + (0.02 if self.quick else seconds), 3 if self.quick else 12
        nth, draw = 0, random.Random(0)
        while nth < least or (nth < 600 and time.monotonic() < end):
            yield draw.sample(names, len(names))
            nth += 1

    def interleaved(
        self, subjects: Mapping[str, Subject], seconds: float, clock: Clock | None = None, block: int = 1
    ) -> Times:
        """Return each subject's times; each has one turn a round, so other load on the machine meets all alike.

        A turn is the median of a `block` of runs: of many, most find the subject's own code in the caches.
        """
        times: Times = {name: [] for name in subjects}
        warmup = [[*subjects]] * 4
        for order in chain(warmup, self.rounds([*subjects], seconds)):
            for name in order:
                run, before, after = subjects[name]
                turn = []
                for _ in range(block):
                    before()
                    turn.append((clock or host_clock)(run))
                    after()
                times[name].append(statistics.median(turn))
        return {name: values[len(warmup) :] for name, values in times.items()}


def host_clock(run: Callable[[], Any]) -> float:
    """Return how many seconds a call takes on the host."""
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) * 1e-9


class DeviceClock:
    """Seconds that a GPU works on a call, with a cold L2 cache, beginning when the host has launched all of it."""

    def __init__(self) -> None:
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 1 << 26
        self._junk = torch.zeros(l2_bytes, dtype=torch.int32, device="cuda")  # four times the cache
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._head_start = HEAD_START

    def __call__(self, run: Callable[[], Any]) -> float:
        """Return the seconds that `run` keeps the GPU busy."""
        self._junk.sum()  # read, not written: a pass that only reads would have to write dirty lines back
        torch.cuda._sleep(self._head_start)
        self._marks[0].record()
        run()
        self._marks[1].record()
        if self._marks[0].query():  # the GPU waited for the host: such a subject is still warming up
            self._head_start = min(2 * self._head_start, LONGEST)
        torch.cuda.synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1])) * 1e-3

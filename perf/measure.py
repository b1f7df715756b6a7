"""Times of several subjects that take turns in one process."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Clock = Callable[[Callable[[], Any]], float]
HEAD_START = 20_000_000  # cycles that a GPU idles first, about 10 ms: by then the host has launched everything
MOST = 600  # rounds


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
    """How a run is to be done.

    Args:
        device: "cuda" or "cpu": where the scale is.
        quick: a few rounds of the smallest cases, to see that everything works; its numbers mean nothing.
    """

    device: str
    quick: bool = False

    def rounds(self, names: Sequence[str], seconds: float) -> Iterator[list[str]]:
        """Yield `names` once a round, for `seconds` but at least 12 rounds, each time with another one first.

        Whoever begins a round and ended the one before finds its own code in the caches: all begin equally often.
        """
        end, least = time.monotonic() + (0.02 if self.quick else seconds), 3 if self.quick else 12
        nth = 0
        while nth < least or nth % len(names) or (nth < MOST and time.monotonic() < end):
            first = nth % len(names)
            yield [*names[first:], *names[:first]]
            nth += 1

    def interleaved(
        self, subjects: Mapping[str, Subject], seconds: float, clock: Clock | None = None
    ) -> dict[str, list[float]]:
        """Return each subject's times in seconds; in every round each has one turn.

        Whatever the machine does meanwhile affects all of them, so times of the same round may be compared.
        """
        times: dict[str, list[float]] = {name: [] for name in subjects}
        with no_collection():
            for name in [*subjects] * 4:
                _turn(subjects[name], clock or host_clock)
            for order in self.rounds([*subjects], seconds):
                for name in order:
                    times[name].append(_turn(subjects[name], clock or host_clock))
        return times


def _turn(subject: Subject, clock: Clock) -> float:
    subject.before()
    seconds = clock(subject.run)
    subject.after()
    return seconds


def host_clock(run: Callable[[], Any]) -> float:
    """Return how many seconds a call takes on the host."""
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) * 1e-9


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of one subject's time for what another left."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class DeviceClock:
    """Seconds that a GPU works on a call, which it begins with a cold L2 cache, when the host has launched all of it."""

    def __init__(self) -> None:
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 1 << 26
        self._junk = torch.zeros(l2_bytes, dtype=torch.int32, device="cuda")  # four times the cache
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, run: Callable[[], Any]) -> float:
        """Return the seconds that `run` keeps the GPU busy."""
        self._junk.sum()  # read, not written: a pass that only reads would have to write dirty lines back
        torch.cuda._sleep(HEAD_START)
        self._marks[0].record()
        run()
        self._marks[1].record()
        torch.cuda.synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1])) * 1e-3

"""What torch.profiler saw the GPU do: which phase of a step launched it, and when it ran."""

import json
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from perf.check import require

PHASES = ("forward", "backward", "scaler", "optimizer")  # the last within the one before
WORK = {"kernel": "launches", "gpu_memset": "launches", "gpu_memcpy": "copies"}
CALLS = ("cuda_runtime", "cuda_driver")
Event = Mapping[str, Any]


class Span(NamedTuple):
    """A stretch of time in us."""

    begin: float
    end: float
    phase: str  # which it is, or belongs to
    what: str = ""


class Trace(NamedTuple):
    """What a few steps did: work on the GPU in order of time, and the host's waits for it."""

    steps: int
    work: list[Span]
    waits: list[Span]

    def per_step(self, phase: str) -> dict[str, float]:
        """Return how many launches, copies and waits a step's phase made."""
        found = [span.what for span in self.work + self.waits if span.phase == phase]
        return {what: found.count(what) / self.steps for what in ("launches", "copies", "waits")}


def record(step: Callable[[], Any], steps: int) -> Trace:
    """Profile some steps, which mark their phases by `record_function`.

    Raises: WrongResult if the profiler was not let see the GPU: no launches at all would pass for an answer.
    """
    step()
    torch.cuda.synchronize()
    with profiled() as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = parse(json.loads(path.read_text())["traceEvents"], steps)
    require(found.work, "torch.profiler saw nothing of the GPU's work: may it look here?")
    return found


@contextmanager
def profiled() -> Iterator[profile]:
    """Profile a block, whose events can be exported: to have torch accumulate them takes 0.2 ms for each of them."""
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)  # torch 2.11's, of that
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


def parse(events: Iterable[Event], steps: int) -> Trace:
    """Return the trace in the events of a Chrome trace.

    Work belongs to the phase during which the host launched it, from whichever thread: backward has its own.
    """
    events = [event for event in events if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    phases = sorted(_span(mark, mark["name"]) for mark in marks)
    calls = [event for event in events if event.get("cat") in CALLS]
    launched_in = {_correlation(call): _phase_at(phases, call["ts"]) for call in calls}
    work = [_span(e, launched_in.get(_correlation(e), ""), WORK[e["cat"]]) for e in events if e.get("cat") in WORK]
    waits = [_span(call, _phase_at(phases, call["ts"]), "waits") for call in calls if "Synchronize" in call["name"]]
    return Trace(steps, sorted(work), waits)


def idle_gaps(trace: Trace) -> list[float]:
    """Return for how many us the GPU did nothing between each backward pass and the forward pass after it."""
    gaps: list[float] = []
    idle, busy_until = 0.0, None
    for span in trace.work:
        if span.phase == "backward":
            idle, busy_until = 0.0, max(span.end, busy_until or 0.0)
        elif busy_until is not None:
            idle += max(0.0, span.begin - busy_until)
            busy_until = max(span.end, busy_until)
            if span.phase == "forward":
                gaps.append(idle)
                busy_until = None
    return gaps


def _span(event: Event, phase: str, what: str = "") -> Span:
    begin = float(event["ts"])
    return Span(begin, begin + float(event.get("dur", 0)), phase, what)


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _phase_at(phases: Sequence[Span], moment: float) -> str:
    behind = bisect_right(phases, float(moment), key=lambda span: span.begin)
    begun = reversed(phases[max(0, behind - 2) : behind])  # the inner one first
    return next((span.phase for span in begun if float(moment) <= span.end), "")

"""What is read out of a profiler's trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from perf_events import event, trace

from perf.check import WrongResult
from perf.trace import idle_gaps, parse, profiled, record


def test_work_counts_for_the_phase_that_launched_it() -> None:
    assert trace().per_step("scaler") == {"launches": 1, "copies": 1, "waits": 1}
    assert trace().per_step("backward") == {"launches": 1, "copies": 0, "waits": 0}


def test_an_optimizers_launches_are_not_the_scalers() -> None:
    marks = [event("user_annotation", "scaler", 0, 10), event("user_annotation", "optimizer", 3, 4)]
    calls = [event("cuda_runtime", "launch", at, 0, at) for at in (1, 5, 8, 11)]
    kernels = [event("kernel", "some", at, 1, at) for at in (1, 5, 8, 11)]
    assert [span.phase for span in parse([*marks, *calls, *kernels], 1).work] == ["scaler", "optimizer", "scaler", ""]


@pytest.mark.parametrize("idle", [0.0, 5.0])
def test_idle_is_what_nothing_covers_between_backward_and_forward(idle: float) -> None:
    # backward ends at 40; 10 us of the optimizer, 1 us of a copy; the next forward pass starts at 102
    assert idle_gaps(trace(idle)) == [pytest.approx(62 - 11)] * 2


def test_overlapping_work_is_not_idle_time() -> None:
    events = [
        event("user_annotation", "backward", 0, 5),
        event("user_annotation", "forward", 10, 5),
        event("cuda_runtime", "launch", 1, 1, 1),
        event("cuda_runtime", "launch", 2, 1, 2),
        event("cuda_runtime", "launch", 11, 1, 3),
        event("kernel", "long", 3, 20, 1),
        event("kernel", "short, on another stream", 4, 2, 2),
        event("kernel", "forward", 25, 5, 3),
    ]
    assert idle_gaps(parse(events, 1)) == [2.0]


def test_work_of_no_phase_belongs_to_none() -> None:
    assert parse([event("kernel", "alone", 0, 1, 7)], 1).work[0].phase == ""


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling:UserWarning")
def test_a_profile_is_exported_and_not_worked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes torch minutes where a step has thousands of parameters; its warning of that is no error here."""
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set(), raising=False)
    with profiled() as profiler, torch.profiler.record_function("forward"):
        torch.ones(3).add_(1)
    assert profiler.profiler._function_events is None
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "forward" in {event["name"] for event in events}


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling:UserWarning")
def test_a_profiler_that_may_not_see_the_gpu_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(WrongResult, match="saw nothing of the GPU's work"):
        record(lambda: torch.ones(3), 2)

"""Traces as torch.profiler writes them."""

from __future__ import annotations

from typing import Any

from perf.trace import Trace, parse


def event(cat: str, name: str, begin: float, duration: float, correlation: int | None = None) -> dict[str, Any]:
    """Return an event as torch.profiler writes it."""
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": duration, "args": args}


def step_events(begin: float, idle: float) -> list[dict[str, Any]]:
    """Return a step: two backward kernels, `idle` us, one of the optimizer's, a copy and a wait."""
    return [
        event("user_annotation", "forward", begin, 10.0),
        event("user_annotation", "backward", begin + 10, 10.0),
        event("user_annotation", "scaler", begin + 20, 10.0),
        event("gpu_user_annotation", "forward", begin, 50.0),
        event("cuda_runtime", "cudaLaunchKernel", begin + 1, 1.0, int(begin) + 1),
        event("cuda_driver", "cuLaunchKernelEx", begin + 11, 1.0, int(begin) + 2),
        event("cuda_runtime", "cudaLaunchKernel", begin + 21, 1.0, int(begin) + 3),
        event("cuda_runtime", "cudaMemcpyAsync", begin + 23, 1.0, int(begin) + 4),
        event("cuda_runtime", "cudaStreamSynchronize", begin + 25, 1.0, int(begin) + 5),
        event("kernel", "forward", begin + 2, 18.0, int(begin) + 1),
        event("kernel", "backward", begin + 20, 20.0, int(begin) + 2),
        event("kernel", "optimizer", begin + 40 + idle, 10.0, int(begin) + 3),
        event("gpu_memcpy", "flag", begin + 50 + idle, 1.0, int(begin) + 4),
    ]


def trace(idle: float = 5.0, steps: int = 3) -> Trace:
    """Return a trace of some steps, 100 us apart."""
    return parse([e for nth in range(steps) for e in step_events(100.0 * nth, idle)], steps)

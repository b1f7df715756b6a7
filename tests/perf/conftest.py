"""GPU benches on the CPU: the same code, with the CPU's tensors and clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from perf_events import trace

from perf import bench_check, bench_launches, bench_step, bench_unscale, lists
from perf.grads import Gradients
from perf.measure import host_clock, one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let no test wait for a core that others keep busy."""
    with one_thread():
        yield


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the GPU's benches run on the CPU; called with whether torch's op is to serve every dtype."""

    def install(served: bool) -> None:
        def on_the_cpu(numels: list[int], dtype: Any, device: str) -> Gradients:
            return Gradients(numels, dtype, "cpu")

        monkeypatch.setattr(lists, "Gradients", on_the_cpu)
        monkeypatch.setattr(lists, "torch_serves", lambda dtype: served)
        for module in (bench_unscale, bench_check, bench_step):
            monkeypatch.setattr(module, "ColdClock", lambda *, device_only: host_clock)
        for module in (bench_launches, bench_step):
            monkeypatch.setattr(module, "record", lambda step, steps: (step(), trace())[1])
        monkeypatch.setattr(bench_launches, "tokens", lambda *args: _tokens(*args[:3]))
        monkeypatch.setattr(bench_launches, "transformer", lambda size, words, device: _transformer(size, words))

    from perf.models import tokens, transformer

    _tokens, _transformer = partial(tokens, device="cpu"), partial(transformer, device="cpu")
    return install

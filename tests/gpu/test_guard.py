"""StepGuard on a GPU: no host waits, and a window that graphs keep from replay to replay."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import WAYS, assert_all_same, parameters, take_step, waits_raise
from spike_rule import judged

from scaler_triton import StepGuard

pytestmark = pytest.mark.gpu

SIGMA, WINDOW = 4.0, 8
LIMIT = {"max_consecutive_skips": 9}  # which looks at copies of the counters, but not in a capture
SHAPES = [(7,), (64, 3), (1,)]
BACKENDS = pytest.mark.parametrize("backend", ["triton", "torch"])


class Run:
    """A fused AdamW whose gradients stay where they are, and its guard."""

    def __init__(self, how: str, dtype: torch.dtype, backend: str) -> None:
        self.how, self.guard = how, StepGuard("cuda", spike_sigma=SIGMA, window=WINDOW, backend=backend, **LIMIT)
        self.params = parameters([torch.ones(shape, dtype=dtype) for shape in SHAPES], "cuda")
        self.optimizer = torch.optim.AdamW(self.params, lr=0.125, fused=True, capturable=True)
        self.norms: list[float] = []

    def load(self, step: int) -> bool:
        """Write the gradients of a batch; return whether it is to be skipped."""
        value = {13: math.inf, 14: 64.0, 21: math.nan, 22: 512.0}.get(step, 1.0 + step % 3)
        for param in self.params:
            param.grad.fill_(1.0)
        self.params[1].grad[0, 0] = value
        self.norms.append(math.sqrt(value**2 + sum(math.prod(shape) for shape in SHAPES) - 1))
        return bool(judged(self.norms, SIGMA, WINDOW)[-1][0])

    def step(self) -> None:
        take_step(self.guard, self.optimizer, self.how)

    def state(self) -> list[Any]:
        return [*self.params, *(each for param in self.params for each in self.optimizer.state[param].values())]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", WAYS)
def test_a_fused_step_never_waits(how: str, dtype: torch.dtype, backend: str) -> None:
    run, skipped = Run(how, dtype, backend), []
    for step in range(24):
        bad = run.load(step)
        before = [each.clone() for each in run.state()]
        with waits_raise() if step >= 3 else nullcontext():  # plans and kernels are made in the first steps
            run.step()
        assert run.guard.was_skipped(run.optimizer) is bad
        if bad:
            skipped.append(step)
            assert_all_same(run.state(), before)
    assert skipped == [13, 14, 21, 22]
    assert (run.guard.stats().skipped, run.guard.stats().spikes) == (4, 2)


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
@BACKENDS
@pytest.mark.parametrize("how", WAYS)
def test_replayed_steps_keep_the_window(how: str, backend: str) -> None:
    eager, graphed = Run(how, torch.float32, backend), Run(how, torch.float32, backend)
    graph = torch.cuda.CUDAGraph()
    for step in range(30):
        bad = eager.load(step)
        graphed.load(step)
        if step == 3:
            with torch.cuda.graph(graph):
                graphed.step()
        eager.step()
        if step < 3 or step % 7 == 0:  # steps between replays see their norms, and the other way round
            graphed.step()
        else:
            graph.replay()
        for run in (eager, graphed):
            assert run.guard.was_skipped(run.optimizer) is bad
        assert_all_same(graphed.state(), eager.state())
        assert graphed.guard.state_dict() == eager.guard.state_dict()
    assert eager.guard.stats().spikes == 2
    assert str(graphed.guard.overflow_report()) == str(eager.guard.overflow_report())

"""A whole step in a CUDA graph: replayed, it does to the bit what it does when called."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import WAYS, assert_same, sgd, started, take_step
from scaler_triton.stats import Counters

from scaler_triton import GradScaler

# torch's optimizers notice steps beside the captured ones, which is what is compared here.
CAPTURABLE = pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
pytestmark = CAPTURABLE
# A capture that is refused, or has nothing left to do.
MAY_BE_EMPTY = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")

STEPS = 100
BAD_STEPS = {3, 4, 40, 77, 99}


class Run:
    """A small model trained in fp16 on batches that stay where they are, so that a graph can read them."""

    def __init__(self, first: str = "") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True, capturable=True)
        self.scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=7)
        self.batch = torch.zeros(4, 64, device="cuda")
        self.first = first

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = self.model(self.batch).float().square().mean()
        self.scaler.scale(loss).backward()
        if self.first == "unscale_":
            self.scaler.unscale_(self.optimizer)
        elif self.first:
            self.scaler.clip_grad_norm_(self.optimizer, 0.01, defer=self.first == "deferred clipping")
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.batch.copy_(torch.randn(4, 64, generator=generator) * (float("inf") if step in BAD_STEPS else 1.0))

    def captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(3):
                self.load(step)
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def state(self) -> list[torch.Tensor]:
        scaler: Any = self.scaler
        assert scaler._scale is not None
        return [*self.model.parameters(), scaler._scale, scaler._growth_tracker]


def assert_equal_runs(run: Run, other: Run, replay: Callable[[], None], steps: range) -> None:
    for step in steps:
        run.load(step)
        other.load(step)
        run.step()
        replay()
        for mine, theirs in zip(run.state(), other.state(), strict=True):
            assert_same(mine.detach(), theirs.detach())


def eager_and_captured(first: str = "") -> tuple[Run, Run, Callable[[], None]]:
    eager, graphed = Run(first), Run(first)
    replay = graphed.captured()
    for step in range(3):
        eager.load(step)
        eager.step()
    return eager, graphed, replay


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["", "unscale_", "clipping", "deferred clipping"])
def test_replayed_steps_equal_eager_ones_through_overflows(first: str) -> None:
    assert_equal_runs(*eager_and_captured(first), range(3, STEPS))


@pytest.mark.gpu
def test_setters_and_writes_into_the_scale_take_effect_under_replay() -> None:
    eager, graphed, replay = eager_and_captured()
    assert_equal_runs(eager, graphed, replay, range(3, 12))
    for run in (eager, graphed):
        run.scaler.set_growth_factor(1.1)
        run.scaler.set_backoff_factor(0.3)
        run.scaler.set_growth_interval(2)
        run.scaler._scale.fill_(96.0)
    assert_equal_runs(eager, graphed, replay, range(35, 60))


@pytest.mark.gpu
def test_eager_steps_between_replays_use_their_own_gradients() -> None:
    eager, graphed, replay = eager_and_captured("unscale_")
    for step in range(3, 30):
        assert_equal_runs(eager, graphed, replay if step % 3 else graphed.step, range(step, step + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("other_form", [False, True])
def test_replayed_steps_after_an_update_are_told_of(other_form: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2, device="cuda"))
    scaler, optimizer = started(GradScaler, "cuda"), torch.optim.SGD([weight], lr=0.5, fused=True)

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.update()
        scaler.step(optimizer)
        scaler.update()

    weight.grad = static = torch.ones(4, 2, device="cuda")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    if other_form:
        weight.grad = torch.ones(2, 4, device="cuda").t()
        with mock.patch.object(optimizer, "step"):  # torch's fused kernels refuse strides other than the parameter's
            step()
    for value in (float("nan"), 1.0, 1.0):
        static.fill_(value)
        graph.replay()
        report = scaler.overflow_report([("weight", weight)])
        assert [(each.name, each.kinds) for each in report.bad] == [("weight", "NaN")]


@pytest.mark.gpu
def test_the_host_waits_for_no_copy_that_a_capture_never_made() -> None:
    """An event that is recorded in a capture cannot be asked later: what copies to the host leaves captures alone."""
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    scaler = started(GradScaler, "cuda", init_scale=4.0, max_consecutive_skips=9)
    weight.grad = torch.ones(3, device="cuda")

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.stats(wait=False)

    for _ in range(6):  # more than the counters' copies lag behind
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    weight.grad.fill_(float("nan"))
    graph.replay()
    assert scaler.was_skipped(optimizer)
    assert (scaler.stats().updates, scaler.stats().skipped) == (7, 1)
    weight.grad.fill_(1.0)
    for _ in range(6):
        step()
    assert not scaler.was_skipped(optimizer)
    assert scaler.stats().updates == 13


@pytest.mark.gpu
def test_the_first_step_is_refused_in_a_capture_with_a_reason() -> None:
    """What it would have left on the device was never done: the steps after it begin anew."""
    eager, refused = Run("unscale_"), Run("unscale_")
    for run in (eager, refused):
        run.load(0)
        with torch.autocast("cuda", torch.float16):  # cuBLAS must not set itself up in a capture
            run.model(run.batch).sum().backward()
        run.scaler.scale(torch.ones((), device="cuda"))
    with pytest.raises(RuntimeError, match="take one step like it before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        refused.step()
    assert_equal_runs(eager, refused, refused.step, range(5))
    assert refused.scaler.stats() == eager.scaler.stats()


@pytest.mark.gpu
@MAY_BE_EMPTY
def test_the_first_scale_is_refused_in_a_capture() -> None:
    """Each replay would set the scale anew."""
    scaler, loss = GradScaler("cuda", init_scale=2.0**10), torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="a scaler's first scale cannot"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        scaler.scale(loss)
    assert (scaler.scale(loss).item(), scaler._growth_tracker.item()) == (2.0**10, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAYS)
def test_what_fails_in_a_capture_has_done_nothing(how: str) -> None:
    """Another optimizer's kernels were compiled: only its own table is missing, once a write has been announced."""
    scaler = started(GradScaler, "cuda", init_scale=4.0)
    weights = [torch.nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full((3,), 4.0, device="cuda")
    first, other = (torch.optim.SGD([weight], lr=1.0, fused=True) for weight in weights)
    take_step(scaler, first, how)
    with pytest.raises(RuntimeError, match="take one step like it before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        take_step(scaler, other, how)
    take_step(scaler, other, how)
    assert_same(weights[1].detach(), weights[0].detach())
    assert weights[0][0].item() < 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("replay_before_update", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_a_graph_wrote_anew_are_scaled(fused: bool, replay_before_update: bool) -> None:
    """No version counter tells: gradients that were left unscaled are no longer there."""
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler = GradScaler("cuda", init_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale(weight.sum()).backward()
    graph.replay()
    scaler.unscale_(optimizer)
    if replay_before_update:
        graph.replay()
    scaler.update()
    graph.replay()
    scaler.step(optimizer)
    assert_same(weight.detach(), torch.full((3,), -2.0, device="cuda"))


def after_a_step() -> tuple[Any, torch.optim.Optimizer, GradScaler]:
    """Return a weight, its fused optimizer and a scaler at 4, after a step that took the weight from 1 to 0."""
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = started(GradScaler, "cuda", init_scale=4.0)
    weight.grad = torch.full((3,), 4.0, device="cuda")
    scaler.step(optimizer)
    scaler.update()
    return weight, optimizer, scaler


@pytest.mark.gpu
def test_a_captured_step_unscales_whatever_was_left_unscaled_before() -> None:
    """A replay finds other gradients."""
    weight, optimizer, scaler = after_a_step()
    scaler.unscale_(optimizer)
    scaler.update()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.step(optimizer)
        scaler.update()
    weight.grad.fill_(8.0)
    graph.replay()
    assert_same(weight.detach(), torch.full((3,), -2.0, device="cuda"))


@pytest.mark.gpu
def test_a_postponed_step_in_one_graph_with_its_unscaling_divides_once() -> None:
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler, loss = started(GradScaler, "cuda", init_scale=4.0), torch.ones((), device="cuda")

    def step() -> None:
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        scaler.update()
        scaler.step(optimizer)
        scaler.update()

    weight.grad = torch.full((3,), 8.0, device="cuda")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    weight.grad.fill_(8.0)
    graph.replay()
    assert_same(weight.detach(), torch.full((3,), -3.0, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("explicit", [False, True])
def test_an_optimizer_that_raises_in_a_capture_is_stepped_outside_of_it(explicit: bool) -> None:
    weight, optimizer, scaler = after_a_step()

    def step() -> None:
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)

    if explicit:  # a first time is refused in a capture
        scaler.unscale_(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    weight.grad.fill_(4.0)  # the fused optimizer has divided it
    refusing = mock.patch.object(optimizer, "step", side_effect=RuntimeError("not capturable"))
    with pytest.raises(RuntimeError, match="not capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()), refusing:
        step()
    scaler.step(optimizer)
    scaler.update()
    assert_same(weight.detach(), torch.full((3,), -1.0, device="cuda"))


@pytest.mark.gpu
@MAY_BE_EMPTY
@pytest.mark.parametrize("how", ["unscale_", "deferred clip"])
def test_what_was_done_before_a_capture_that_fails_stays(how: str) -> None:
    weights = [torch.nn.Parameter(torch.ones(3, device="cuda")) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full((3,), 4.0, device="cuda")
    first, other = (torch.optim.SGD([weight], lr=1.0, fused=True) for weight in weights)
    scaler = started(GradScaler, "cuda", init_scale=4.0)
    take_step(scaler, first, how)
    with mock.patch.object(scaler, "step"), mock.patch.object(scaler, "update"):
        take_step(scaler, other, how)
    refusing = mock.patch.object(other, "step", side_effect=RuntimeError("not capturable"))
    with pytest.raises(RuntimeError, match="not capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()), refusing:
        scaler.step(other)
    scaler.step(other)
    assert_same(weights[1].detach(), weights[0].detach())


@pytest.mark.gpu
@MAY_BE_EMPTY
def test_a_step_that_reads_the_flag_on_the_host_is_refused_in_a_capture() -> None:
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), started(GradScaler, "cuda", init_scale=4.0)
    weight.grad = torch.full((3,), 4.0, device="cuda")
    with pytest.raises(RuntimeError, match="use fused=True"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert_same(weight.detach(), torch.zeros(3, device="cuda"))


def test_trackers_are_compared_to_the_bit() -> None:
    """Without a GPU, too: what compares the runs above must take all of their states."""
    tracker = torch.tensor(3, dtype=torch.int32)
    assert_same(tracker, tracker.clone())
    with pytest.raises(AssertionError):
        assert_same(tracker, tracker + 1)


def test_nothing_is_made_on_the_device_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold what was in memory before, and a pinned buffer ends the capture."""
    gpu = torch.device("cuda", 0)
    scaler, optimizer, counters = started(GradScaler, "cpu"), sgd([torch.ones(3)]), Counters([1] * 7)
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(scaler, "_scale", SimpleNamespace(device=gpu))
    for first in (lambda: scaler.unscale_(optimizer), lambda: counters.on(gpu)):
        with pytest.raises(RuntimeError, match="take one step like it before"):
            first()
    assert scaler._flag_buffers == {}
    assert counters.read() == [1] * 7
    monkeypatch.undo()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.stats().updates == 1

"""A whole step in a CUDA graph: replayed, it does to the bit what it does when called."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import WAYS, assert_all_same, assert_same, parameters, sgd, started, take_step, values
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ops
from scaler_triton.core.torch_ops import kept_constants

# torch's optimizers notice steps beside the captured ones, which is what is compared here.
CAPTURABLE = pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
pytestmark = [pytest.mark.gpu, CAPTURABLE]
# A capture that is refused, or has nothing left to do.
MAY_BE_EMPTY = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")

STEPS = 100
BAD_STEPS = {3, 4, 40, 77, 99}


class Static:
    """An optimizer of one weight whose gradient stays where it is, for a graph; and a scaler, after one step."""

    def __init__(self, fused: bool = True, **options: Any) -> None:
        (self.weight,) = parameters([torch.full((3,), 8.0)], "cuda")
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, fused=fused)
        self.scaler = started(GradScaler, "cuda", init_scale=8.0, growth_interval=1000, **options)
        self.step()

    def step(self, how: str = "unscale_") -> None:
        take_step(self.scaler, self.optimizer, how)

    def capture(self, work: Callable[[], object]) -> Callable[[float], None]:
        """Capture; return a function that replays it with a gradient."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def replay(value: float) -> None:
            self.weight.grad.fill_(value)
            graph.replay()

        return replay

    def eager(self, value: float) -> None:
        self.weight.grad.fill_(value)
        self.step()

    def value(self) -> float:
        return self.weight[0].item()


def test_what_is_read_in_a_capture_tells_the_gpu_of_no_update() -> None:
    """A replay would tell it again."""
    static = Static(fused=False)
    for _ in range(4):
        static.step("step")
    static.scaler.metrics()
    static.step("step")
    replay = static.capture(lambda: (static.weight.add(1), static.scaler.metrics(), repr(static.scaler)))
    for _ in range(3):
        replay(1.0)
    assert (static.scaler.stats().updates, static.scaler._get_growth_tracker()) == (6, 6)


class Run:
    """A small model trained in fp16 on batches that stay where they are, so that a graph can read them."""

    def __init__(self, how: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True, capturable=True)
        self.scaler: Any = GradScaler("cuda", init_scale=2.0**10, growth_interval=7, **options)
        self.batch = torch.zeros(4, 64, device="cuda")
        self.how = how

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = self.model(self.batch).float().square().mean()
        self.scaler.scale(loss).backward()
        take_step(self.scaler, self.optimizer, self.how)

    def load(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.batch.copy_(torch.randn(4, 64, generator=generator) * (math.inf if step in BAD_STEPS else 1.0))

    def take_three(self) -> None:
        for step in range(3):
            self.load(step)
            self.step()

    def captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.take_three()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def state(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), self.scaler._scale, self.scaler._growth_tracker]


def assert_equal_step(step: int, eager: Run, other: Run, act: Callable[[], None]) -> None:
    """Take the step of one run, and of another one by `act`."""
    eager.load(step)
    other.load(step)
    eager.step()
    act()
    assert_all_same(eager.state(), other.state())


def eager_and_captured(how: str, **options: Any) -> tuple[Run, Run, Callable[[], None]]:
    """Return a run after three steps, one like it, and what replays a step of the other's."""
    eager, graphed = (Run(how, **options) for _ in range(2))
    eager.take_three()
    return eager, graphed, graphed.captured()


HEADROOM: dict[str, Any] = {"scale_policy": "headroom", "headroom_window": 5}


@pytest.mark.parametrize("options", [{}, HEADROOM, HEADROOM | {"backend": "torch"}], ids=["probe", "headroom", "torch"])
@pytest.mark.parametrize(("how", "mixed"), [*((way, False) for way in WAYS), ("step", True), ("unscale_", True)])
def test_replayed_steps_equal_eager_ones_through_overflows(how: str, mixed: bool, options: dict[str, Any]) -> None:
    """Also if every third one is no replay: each uses its own gradients, and all the same ring of exponents."""
    eager, graphed, replay = eager_and_captured(how, **options)
    scales = set()
    for step in range(3, STEPS):
        assert_equal_step(step, eager, graphed, graphed.step if mixed and step % 3 == 0 else replay)
        scales.add(eager.scaler.get_scale())
        assert not options or graphed.scaler.headroom() == eager.scaler.headroom()
    assert graphed.scaler.state_dict() == eager.scaler.state_dict()
    assert len(scales) > 3


def test_a_postponed_step_in_one_graph_with_its_unscaling_divides_once_and_is_told_of() -> None:
    """Two updates count its overflow, of which the marks have the first one's number."""
    it, loss = Static(), torch.ones((), device="cuda")

    def step() -> None:
        it.scaler.scale(loss)
        it.scaler.unscale_(it.optimizer)
        it.scaler.update()
        it.step("step")

    step()
    replay, before = it.capture(step), it.value()
    for value, kinds in ((16.0, []), (math.nan, ["NaN"]), (-math.inf, ["Inf"])):
        replay(value)
        assert it.value() == before - 2.0
        assert [each.kinds for each in it.scaler.overflow_report().bad] == kinds


def test_the_host_waits_for_no_copy_that_a_capture_never_made() -> None:
    """An event that is recorded in a capture cannot be asked later: what copies to the host leaves captures alone."""
    it = Static(max_consecutive_skips=9)

    def step() -> None:
        it.step()
        it.scaler.stats(wait=False)
        said.append(repr(it.scaler))

    said: list[str] = []
    for _ in range(5):  # with the first one more than the counters' copies lag behind
        step()
    replay = it.capture(step)
    assert said[-1].endswith("; newer numbers are on their way)")
    replay(math.nan)
    assert it.scaler.was_skipped(it.optimizer)
    assert (it.scaler.stats().updates, it.scaler.stats().skipped) == (7, 1)
    it.weight.grad.fill_(1.0)
    for _ in range(6):
        step()
    assert not it.scaler.was_skipped(it.optimizer)
    assert it.scaler.stats().updates == 13


@MAY_BE_EMPTY
def test_the_first_scale_is_refused_in_a_capture() -> None:
    """Each replay would set the scale anew."""
    scaler, loss = GradScaler("cuda", init_scale=2.0**10), torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="a scaler's first scale cannot"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        scaler.scale(loss)
    assert (scaler.scale(loss).item(), scaler._growth_tracker.item()) == (2.0**10, 0)


@MAY_BE_EMPTY
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_first_step_is_refused_in_a_capture_and_has_done_nothing(how: str, is_first: bool) -> None:
    """Of a scaler or of an optimizer, for which only its table is missing, once a write has been announced."""
    scaler = started(GradScaler, "cuda", init_scale=4.0)
    one, other = (sgd([torch.full((3,), 4.0)], "cuda", fused=True) for _ in range(2))
    if not is_first:
        take_step(scaler, one, how)
    with pytest.raises(RuntimeError, match="take one step like it before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        take_step(scaler, other, how)
    for optimizer in (other, one) if is_first else (other,):
        take_step(scaler, optimizer, how)
    assert values(other) == values(one) == [pytest.approx(-0.5 / (math.sqrt(3) if how == "clip" else 1))]
    assert (scaler.stats().updates, scaler.stats().skipped) == (2, 0)


@MAY_BE_EMPTY
def test_a_first_check_by_torchs_op_is_refused_in_a_capture() -> None:
    """It keeps a 1 on the device, which a capture would only announce."""
    kept_constants.cache_clear()
    grads, flag = [torch.full((3,), 4.0, device="cuda")], torch.zeros((), device="cuda")
    with pytest.raises(RuntimeError, match="take one step like it before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.check_nonfinite(grads, flag, backend="torch")
    ops.check_nonfinite(grads, flag, backend="torch")
    assert (grads[0].tolist(), flag.item()) == ([4.0] * 3, 0.0)


@pytest.mark.parametrize("replay_before_update", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_a_graph_wrote_anew_are_scaled(fused: bool, replay_before_update: bool) -> None:
    """No version counter tells: gradients that were left unscaled are no longer there."""
    it = Static(fused)
    it.optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        it.scaler.scale(it.weight.sum()).backward()
    before = it.value()
    graph.replay()
    it.scaler.unscale_(it.optimizer)
    if replay_before_update:
        graph.replay()
    it.scaler.update()
    graph.replay()
    it.scaler.step(it.optimizer)
    assert it.value() == before - 1.0


@pytest.mark.parametrize("how", ["unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize(("values", "wanted"), [((8.0,), -2.0), ((math.inf,), -1.0), ((math.inf, 8.0), -2.0)])
def test_a_plain_step_reads_the_flag_of_a_replayed_unscaling(how: str, values: Any, wanted: float) -> None:
    """Of the last one, and not the copy that a capture only recorded."""
    it = Static(fused=False)
    limit = () if how == "unscale_" else (100.0,)
    take_step(it.scaler, it.optimizer, "clip")
    before = it.value()
    replay = it.capture(lambda: getattr(it.scaler, how)(it.optimizer, *limit))
    for value in values:
        replay(value)
    it.scaler.step(it.optimizer)
    assert it.value() - before == wanted + 1.0


@MAY_BE_EMPTY
def test_a_step_that_reads_the_flag_on_the_host_is_refused_in_a_capture() -> None:
    it = Static(fused=False)
    it.step("step")
    before = it.value()
    it.weight.grad.fill_(8.0)
    with pytest.raises(RuntimeError, match="use fused=True"):
        it.capture(lambda: it.scaler.step(it.optimizer))
    it.scaler.step(it.optimizer)
    assert it.value() == before - 1.0


def test_limits_and_checkpoints_take_effect_under_replay_and_replays_are_counted() -> None:
    eager, graphed, replay = eager_and_captured("step", hysteresis=2)
    saved = eager.scaler.state_dict()
    for steps in (range(3, 12), range(35, 50), range(76, 80), range(38, 45)):
        for step in steps:
            assert_equal_step(step, eager, graphed, replay)
            assert graphed.scaler.stats() == eager.scaler.stats()
            assert graphed.scaler.was_skipped(graphed.optimizer) is eager.scaler.was_skipped(eager.optimizer)
        for scaler in (eager.scaler, graphed.scaler):
            if steps[0] == 3:
                scaler.set_limits(hysteresis=3, max_scale=2.0**11, min_scale=2.0**9)
                scaler.set_growth_factor(1.1)
                scaler.set_backoff_factor(0.3)
                scaler.set_growth_interval(2)
                scaler._scale.fill_(600.0)
            elif steps[0] == 35:
                assert scaler.get_scale() < 2.0**11  # by the numbers before it would have doubled twice
                scaler.load_state_dict(saved)
    assert graphed.scaler.state_dict() == eager.scaler.state_dict()


@pytest.mark.parametrize("how", ["set", "others' flag", "attempt"])
def test_the_outcome_of_a_replay_is_known_whatever_was_called_before(how: str) -> None:
    it = Static()
    replay, state = it.capture(it.step), {"stage": OptState.STEPPED, "found_inf_per_device": {}}
    for value in (math.inf, 8.0):
        it.weight.grad.fill_(8.0)
        it.scaler.step(it.optimizer)
        if how == "others' flag":
            state["found_inf_per_device"] = {it.weight.device: torch.zeros((), device="cuda")}
            it.scaler._per_optimizer_states["others"] = state
        it.scaler.update(*[8.0] if how == "set" else [])
        for _ in it.scaler.attempts(it.optimizer) if how == "attempt" else [1]:
            replay(value)
        assert it.scaler.was_skipped(it.optimizer) is (value == math.inf)


def test_an_update_outside_the_graph_of_its_step_and_one_in_a_graph_alone_clear_the_flag() -> None:
    it = Static()
    it.step("step")
    step = it.capture(lambda: it.scaler.step(it.optimizer))
    it.scaler.update()  # of a step that was captured only: nothing was found
    step(math.inf)
    it.eager(8.0)
    assert (it.scaler.get_scale(), it.scaler.was_skipped(it.optimizer)) == (8.0, False)
    it.scaler.step(it.optimizer)
    update = it.capture(it.scaler.update)
    update(8.0)
    it.eager(8.0)
    assert (it.scaler.get_scale(), it.scaler.was_skipped(it.optimizer)) == (8.0, False)


def test_an_update_that_was_only_captured_clears_no_flag() -> None:
    it = Static()
    before = it.value()
    it.weight.grad.fill_(math.inf)
    it.scaler.step(it.optimizer)
    it.capture(it.scaler.update)
    it.eager(8.0)
    assert (it.value(), it.scaler.was_skipped(it.optimizer)) == (before - 1.0, False)


def test_the_flag_that_a_replay_writes_never_becomes_another_optimizers() -> None:
    it = Static()
    replay = it.capture(it.step)
    weight, it.optimizer = it.weight, None
    later = [torch.optim.SGD(parameters([torch.full((3,), 8.0)], "cuda"), lr=1.0, fused=True) for _ in range(3)]
    for each in later:
        it.scaler.unscale_(each)
    scale = it.scaler.get_scale()
    replay(math.inf)
    for each in later:
        it.scaler.step(each)
    it.scaler.update()
    assert [values(each) for each in later] == [[-8.0 / scale]] * 3
    assert weight[0].item() == -1.0


@pytest.mark.parametrize("explicit", [False, True])
def test_an_optimizer_that_raises_in_a_capture_is_stepped_outside_of_it(explicit: bool) -> None:
    it = Static()
    it.step("step")
    before = it.value()
    it.weight.grad.fill_(8.0)
    refusing = mock.patch.object(it.optimizer, "step", side_effect=RuntimeError("not capturable"))
    with pytest.raises(RuntimeError, match="not capturable"), refusing:
        it.capture(lambda: it.step("unscale_" if explicit else "step"))
    it.step("step")
    assert it.value() == before - 1.0


def test_the_ops_on_lists_can_be_captured_after_one_call() -> None:
    """Calls on other tensors of the same form disturb no replay, and it none of them."""
    grads, others = ([torch.zeros(numel, device="cuda") for numel in (5, 4000)] for _ in range(2))
    flag, factor = torch.zeros((), device="cuda"), torch.full((), 0.25, device="cuda")

    def use(grads: list[torch.Tensor]) -> torch.Tensor:
        ops.check_nonfinite(grads, flag)
        norm = ops.grad_norm(grads, flag, inv_scale=factor)
        ops.unscale_(grads, factor, flag)
        return norm

    use(grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = use(grads)
    for value in (8.0, 4.0, math.inf, 8.0):
        for grad in [*grads, *others]:
            grad.fill_(value)
        use(others)
        flag.zero_()
        graph.replay()
        assert flag.item() == (value == math.inf)
        assert norm.item() == pytest.approx(value / 4 * 4005**0.5, rel=1e-6)
        for grad in [*grads, *others]:
            assert_same(grad, torch.full_like(grad, value / 4))


def test_a_prepared_list_can_be_captured_after_one_call() -> None:
    grads = [torch.zeros(numel, device="cuda") for numel in (5, 4000)]
    flag, factor = torch.zeros((), device="cuda"), torch.full((), 0.25, device="cuda")
    prepared = ops.prepare(grads)

    def use() -> tuple[torch.Tensor, torch.Tensor]:
        prepared.check(flag)
        norm = prepared.norm(flag, inv_scale=factor)
        prepared.unscale_(factor, flag)
        return norm, prepared.clip_(1e-3, flag)

    use()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = use()
    for value in (8.0, 4.0, math.inf, 8.0):
        for call in (graph.replay, use):
            for grad in grads:
                grad.fill_(value)
            flag.zero_()
            found = call() or norms
            assert flag.item() == (value == math.inf)
            assert [norm.item() for norm in found] == [pytest.approx(value / 4 * 4005**0.5, rel=1e-6)] * 2
            after = math.inf if value == math.inf else 1e-3 / 4005**0.5
            assert grads[1][-1].item() == pytest.approx(after, rel=1e-5)

"""What only a GPU can show: no host waits, few launches, offloaded gradients that wait for the GPU, other streams."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import WAYS, assert_all_same, flags, parameters, started, take_step, waits_raise
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import GradScaler, ScalerStats, ops
from scaler_triton.core import dispatch
from scaler_triton.core.update import LaggingCounters

pytestmark = pytest.mark.gpu

LONG = 200_000_000  # cycles, a tenth of a second


def network(fused: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=None if fused else False)


def quiet(step: int, known: int = 3) -> Any:
    """Raise where the host waits, once plans and kernels were made in the first steps."""
    return waits_raise() if step >= known else nullcontext()


@pytest.mark.parametrize("policy", ["probe", "headroom"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", WAYS)
def test_a_step_never_waits_but_where_a_plain_one_reads_the_flag(how: str, fused: bool, policy: str) -> None:
    model, optimizer = network(fused)
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=2, scale_policy=policy)
    batch = torch.randn(4, 64, device="cuda")
    for step in range(8):
        with quiet(step):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if how == "unscale_":
                scaler.unscale_(optimizer)
            elif how == "clip":
                scaler.clip_grad_norm_(optimizer, 1.0)
        with quiet(step) if fused else nullcontext():
            scaler.step(optimizer)
        with quiet(step):
            scaler.update()
            if policy == "headroom":
                scaler.headroom(wait=False)
    assert policy == "headroom" or scaler.get_scale() == 64.0


def test_ops_leave_a_flag_set_that_is_elsewhere() -> None:
    flag = torch.zeros((), device="cuda")
    for gradient in (math.inf, 1.0):
        ops.check_nonfinite([torch.tensor([gradient])], flag)
    assert flag.item() == 1.0


@pytest.mark.parametrize("clip", [False, True])
def test_offloaded_gradients_wait_for_the_scale_that_an_update_has_yet_to_set(clip: bool) -> None:
    """The CPU would divide by the scale before it, which a growth doubles."""
    (parameter,) = parameters([torch.full((5,), 8.0)], "cpu")
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = started(GradScaler, "cuda", init_scale=4.0, growth_interval=1)
    for scale in (4.0, 8.0, 16.0):
        parameter.grad = torch.full_like(parameter, 2 * scale)
        if clip:
            scaler.clip_grad_norm_(optimizer, 100.0)
        scaler.step(optimizer)
        torch.cuda._sleep(LONG)
        scaler.update()
    assert parameter[0].item() == -6.0


class ReadsFromGpu(TorchDispatchMode):
    """Counts the ops that wait for the GPU, as they bring a number to the host."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in (torch.ops.aten._to_copy.default, torch.ops.aten._local_scalar_dense.default):
            self.count += args[0].is_cuda and not (isinstance(result, torch.Tensor) and result.is_cuda)
        return result


def test_a_good_step_of_offloaded_gradients_waits_only_for_the_scale() -> None:
    weights = parameters([torch.full((5,), 8.0)] * 2, "cpu")
    optimizer, scaler = torch.optim.SGD(weights, lr=1.0), started(GradScaler, "cuda", init_scale=4.0)
    for step, bad in enumerate([False, False, True, False]):
        weights[1].grad = torch.full((5,), math.inf if bad else 8.0)
        with ReadsFromGpu() as reads:
            scaler.step(optimizer)
        assert reads.count == 1 + bad or step == 0  # a report reads how many updates have skipped
        scaler.update()
        assert scaler.get_scale() == (4.0 if step < 2 else 2.0)
        assert scaler.was_skipped(optimizer) is bad


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_fused_step_of_offloaded_parameters_reads_no_scale_or_flag_too_early(bad: bool, unscale: bool) -> None:
    """torch copies both to the CPU behind what the GPU still has to do, and its CPU kernel waits for neither."""
    params = [p for device in ("cuda", "cpu") for p in parameters([torch.full((5,), 8.0)], device)]
    optimizer = torch.optim.AdamW([{"params": [p]} for p in params], lr=1.0, weight_decay=0.0, fused=True)
    optimizer.register_step_pre_hook(lambda *args: torch.cuda._sleep(LONG))
    scaler = started(GradScaler, "cuda", init_scale=4.0, growth_interval=1000)
    if bad:
        params[0].grad[2] = math.inf
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert [p[0].item() for p in params] == pytest.approx([0.0 if bad else -1.0] * 2, rel=1e-4)  # powf of 0.999
    assert [optimizer.state[p]["step"].item() for p in params] == [float(not bad)] * 2
    assert [optimizer.state[p]["exp_avg"][0].item() for p in params] == pytest.approx([0.0 if bad else 0.2] * 2)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_optimizers_that_begin_on_two_streams_keep_their_flags(backend: str) -> None:
    """They share memory, which the first of them makes; here it is late, and the second one overflows."""
    optimizers = [torch.optim.SGD(parameters([grad], "cuda"), lr=1.0) for grad in (None, torch.tensor([math.inf]))]
    scaler = started(GradScaler, "cuda", init_scale=4.0, backend=backend)
    streams = [torch.cuda.Stream() for _ in optimizers]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)
    for stream, optimizer in zip(streams, optimizers, strict=True):
        with torch.cuda.stream(stream):
            scaler.unscale_(optimizer)
    streams[1].synchronize()
    torch.cuda.synchronize()
    assert flags(scaler, optimizers[1]) == [1.0]
    scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_counting_and_watching_a_streak_never_wait(backend: str) -> None:
    limits = {"hysteresis": 2, "min_scale": 1.0, "max_scale": 2.0**30, "max_consecutive_skips": 50}
    scaler = started(GradScaler, "cuda", backend=backend, **limits)
    (parameter,) = parameters([torch.ones(8)], "cuda")
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    for step in range(24):
        parameter.grad.fill_(math.inf if step in (5, 6, 23) else 1.0)
        with quiet(step, 2 + LaggingCounters.LAG):
            scaler.step(optimizer)
            scaler.update()
            scaler.stats(wait=False)
            repr(scaler)
    for _ in range(2):  # as below; newer numbers may still be on their way a millisecond later
        torch.cuda.synchronize()
        said = repr(scaler)
    assert said.startswith(f"GradScaler(cuda, {backend}; scale 16384; 24 updates, 3 skipped, the last at 24")
    assert scaler.stats() == ScalerStats(24, 3, 1, 0, 2, 24)
    assert scaler.was_skipped(optimizer)
    for _ in range(2):  # the first call may take an older copy, and starts the one that the second takes
        torch.cuda.synchronize()
        newest = scaler.stats(wait=False)
    assert newest == scaler.stats()


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_does_not_raise_where_waits_do(how: str, dtype: torch.dtype) -> None:
    """What is made once is waited for; torch's scaler makes nothing. And kernels on trial are none that fail."""
    (parameter,) = parameters([torch.full((5,), 8.0, dtype=dtype)], "cuda")
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    with waits_raise():
        scaler = started(GradScaler, "cuda", init_scale=4.0)
        take_step(scaler, optimizer, how)
        scaler.set_growth_factor(3.0)
        with pytest.raises(RuntimeError, match="synchronizing"):
            scaler.get_scale()
    task = "clipping" if how == "clip" else "unscaling"
    assert dispatch.choose(parameter.device, dtype, "auto", task=task) == "triton"
    assert scaler.get_growth_factor() == 3.0
    assert parameter[0].item() < 0.0


def test_an_update_on_another_stream_leaves_a_step_its_flag() -> None:
    """It clears the flags for the next step, and all that its stream has waited for is the check."""
    (parameter,) = parameters([torch.full((5,), math.inf)], "cuda")
    optimizer, other = torch.optim.SGD([parameter], lr=1.0, fused=True), torch.cuda.Stream()
    scaler = started(GradScaler, "cuda", init_scale=4.0)
    take_step(scaler, optimizer, "unscale_")  # what is made once is made
    scaler.unscale_(optimizer)
    here = torch.cuda.current_stream()
    other.wait_stream(here)
    torch.cuda._sleep(LONG)
    scaler.step(optimizer)
    wait = torch.cuda.Stream.wait_stream
    with torch.cuda.stream(other), mock.patch.object(torch.cuda.Stream, "wait_stream", autospec=True) as waited:
        waited.side_effect = wait
        scaler.update()
    assert waited.mock_calls == [mock.call(other, here)]
    here.wait_stream(other)
    assert parameter[0].item() == 0.0
    assert scaler.get_scale() == 1.0


def test_updates_that_were_put_off_are_told_and_launched_in_order_on_any_stream() -> None:
    (parameter,) = parameters([torch.full((5,), 8.0)], "cuda")
    optimizer, other = torch.optim.SGD([parameter], lr=0.0), torch.cuda.Stream()
    scaler = started(GradScaler, "cuda", init_scale=4.0, growth_interval=64)
    for _ in range(5):
        take_step(scaler, optimizer, "step")
    here, wait = torch.cuda.current_stream(), torch.cuda.Stream.wait_stream
    with mock.patch.object(torch.cuda.Stream, "wait_stream", autospec=True, side_effect=wait) as waited:
        torch.cuda._sleep(LONG)
        with torch.cuda.stream(other):
            assert scaler.stats().updates == 5  # tells the GPU
        assert waited.mock_calls == [mock.call(other, here)]
        parameter.grad.fill_(math.inf)
        take_step(scaler, optimizer, "step")  # launches
        assert waited.mock_calls[1:] == [mock.call(here, other)]
        parameter.grad.fill_(8.0)
        for _ in range(5):
            take_step(scaler, optimizer, "step")
        assert len(waited.mock_calls) == 2
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.stats().updates) == (2.0, 5, 11)


@pytest.mark.parametrize("first", [False, True])
def test_a_setter_leaves_alone_an_update_that_waits_on_another_stream(first: bool) -> None:
    (parameter,) = parameters([torch.full((5,), 8.0)], "cuda")
    optimizer, other = torch.optim.SGD([parameter], lr=1.0, fused=True), torch.cuda.Stream()
    scaler = started(GradScaler, "cuda", init_scale=4.0, growth_interval=1 if first else 2)
    if not first:
        take_step(scaler, optimizer, "step")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG)
        take_step(scaler, optimizer, "step")
    scaler.set_growth_interval(100)
    torch.cuda.current_stream().wait_stream(other)
    assert scaler.get_scale() == 8.0
    for _ in range(3):
        take_step(scaler, optimizer, "step")
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 3)


def train_on_streams(backward: Any, scaling: Any, backend: str) -> list[torch.Tensor]:
    """Train with backward on one stream and the scaler on another, each waiting for the other's work alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cuda", init_scale=2.0**12, growth_interval=3, backend=backend)
    batches, seen = torch.randn(20, 64, 256, device="cuda"), []
    torch.cuda.synchronize()
    for step, batch in enumerate(batches):
        with torch.cuda.stream(backward):
            backward.wait_stream(scaling)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = model(batch).square().mean() * (torch.inf if step % 7 == 3 else 1.0)
            scaler.scale(loss).backward()
        with torch.cuda.stream(scaling):
            scaling.wait_stream(backward)
            take_step(scaler, optimizer, "unscale_")
            seen.append(scaler._scale.clone())
    torch.cuda.synchronize()
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_backward_on_one_stream_and_the_scaler_on_another(backend: str) -> None:
    current, side, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    expected = train_on_streams(current, current, backend)
    for streams in ((side, current), (current, side), (side, other)):
        assert_all_same(train_on_streams(*streams, backend), expected)


def seen_on_gpu(step: Callable[[], object]) -> Counter[str]:
    """Count the kernels, copies and fills that the profiler sees on the GPU."""
    # torch 2.11 warns of events that go with their cycle, unless they are accumulated.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    events = [each for each in profile.events() or [] if each.device_type == torch.autograd.DeviceType.CUDA]
    work = [each.name for each in events if not each.name.endswith((" Sync", " Wait Event"))]  # the host's, a stream's
    return Counter("copy" if "Memcpy" in name else "fill" if "Memset" in name else "kernel" for name in work)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("how", "kernels"), [("step", 2), ("clip", 4)])
def test_a_step_launches_check_and_update_and_nothing_more(how: str, kernels: int, fused: bool) -> None:
    """Scaling the loss is the third launch; a plain step reads its flag on the host, one copy, and needs no update.

    Clipping has in place of the check: squares, their sum, and a pass that clips.
    """
    if not seen_on_gpu(lambda: torch.ones(1, device="cuda")):
        pytest.skip("the profiler sees nothing of the GPU, as in a container without CUPTI")
    model, optimizer = network(fused)
    optimizer.step = lambda: None  # only what is ours is counted
    scaler = GradScaler("cuda", init_scale=4.0)
    scaler.scale(model(torch.randn(4, 64, device="cuda")).square().mean()).backward()
    for _ in range(8):  # the first ones are looked at, too
        take_step(scaler, optimizer, how)
    work = Counter(kernel=kernels) if fused else Counter(kernel=kernels - 1, copy=1)
    assert seen_on_gpu(lambda: take_step(scaler, optimizer, how)) == work

"""Clipping's benches: wrong norms, gradients, flags and steps are refused; the GPU's code runs on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from perf_events import trace
from torch import Tensor

from perf import bench_clip, bench_host, clip_host
from perf.check import WrongResult
from perf.clipping import CLIP, DEFERRED, METRICS, STEP, Clipping, clip_at_once, norm_of, require_right
from perf.context import Context
from perf.goals import GOALS, answers
from perf.grads import Gradients
from perf.host_cases import Case
from perf.machine import Machine
from perf.measure import QUICK, host_clock
from perf.rows import Entry, Row
from perf.scalers import SCALE
from perf.solo import one_rank
from scaler_triton import GradScaler

CASE = Case("10", "plain", "new addresses", "cpu", 10)
MACHINE = Machine("card", "1.2", "2.13", "3.7", "3.11", "abc", "2025-01-01")


def right(metric: str, dtype: torch.dtype = torch.float32) -> None:
    gradients = Gradients([4, 40], dtype)
    require_right("some list", lambda share: Clipping(gradients, metric, share=share))


@pytest.fixture
def ours_but(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Let something else stand for our clipping."""

    def install(wrong: Callable[..., Tensor]) -> None:
        monkeypatch.setattr("perf.clipping.clip_at_once", wrong)

    return install


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metric", METRICS)
def test_right_results_are_believed(metric: str, dtype: torch.dtype) -> None:
    right(metric, dtype)


def test_the_norm_is_of_the_unscaled_gradients() -> None:
    assert norm_of([torch.tensor([3.0 * SCALE]), torch.tensor([4.0 * SCALE])]) == 5.0


def test_a_wrong_norm_is_refused(ours_but: Callable[..., None]) -> None:
    ours_but(lambda *args, **options: clip_at_once(*args, **options) * 1.001)
    with pytest.raises(WrongResult, match="some list, unscale \\+ clip, clipped: ours: the norm is"):
        right(CLIP)


@pytest.mark.parametrize("metric", METRICS)
def test_gradients_clipped_too_much_are_refused(ours_but: Callable[..., None], metric: str) -> None:
    ours_but(lambda scaler, optimizer, max_norm, **o: clip_at_once(scaler, optimizer, max_norm * (1 - 1e-6), **o))
    with pytest.raises(WrongResult, match="clipped: ours: gradient 0 differs"):
        right(metric)


def test_gradients_that_are_clipped_for_nothing_are_refused(ours_but: Callable[..., None]) -> None:
    ours_but(lambda scaler, optimizer, max_norm, **o: clip_at_once(scaler, optimizer, max_norm / 4, **o))
    with pytest.raises(WrongResult, match="differs"):
        right(STEP)


def test_a_missed_overflow_is_refused(ours_but: Callable[..., None]) -> None:
    def blind(scaler: Any, optimizer: Any, max_norm: float) -> Tensor:
        norm = clip_at_once(scaler, optimizer, max_norm)
        for flag in scaler._found_inf_per_device(optimizer).values():
            flag.zero_()
        return norm

    ours_but(blind)
    with pytest.raises(WrongResult, match=r"overflow: ours: flags \[0.0\]"):
        right(CLIP)


def test_a_step_that_had_to_be_skipped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradScaler, "_maybe_opt_step", lambda self, optimizer, *args: optimizer.step())
    with pytest.raises(WrongResult, match="overflow: ours: 1 steps"):
        right(CLIP)


def test_an_optimizer_that_is_not_stepped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradScaler, "_maybe_opt_step", lambda self, *args: None)
    with pytest.raises(WrongResult, match="clipped: ours: 0 steps"):
        right(CLIP)


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_host_cases_are_measured(kind: str) -> None:
    for coming in ("new addresses", "come and go"):
        case = Case("192", kind, coming, "cpu", 192)
        with one_rank("cpu") as mesh:
            rows = list(clip_host.measure(case, mesh if kind == "DTensor" else None, QUICK))
        metrics = METRICS if kind == "DTensor" else (CLIP,)
        assert {(found.bench, found.metric) for found in rows} == {("clip", metric) for metric in metrics}


def test_large_lists_of_dtensors_are_clipped_only() -> None:
    assert clip_host.metrics_of(Case("1000", "DTensor", "new addresses", "cpu", 1000)) == (CLIP,)


@pytest.mark.parametrize("coming", ["same addresses", "come and go"])
def test_a_wrong_step_of_dtensors_is_refused(ours_but: Callable[..., None], coming: str) -> None:
    ours_but(lambda scaler, optimizer, max_norm, **o: clip_at_once(scaler, optimizer, max_norm * (1 - 1e-6), **o))
    case = Case("192", "DTensor", coming, "cpu", 192)
    with one_rank("cpu") as mesh, pytest.raises(WrongResult, match="clipped: ours: gradient 0 differs"):
        clip_host.check(case, mesh, STEP)


@pytest.mark.parametrize("wrong", ["has not moved", "a step that had to be skipped"])
def test_a_step_of_dtensors_that_is_left_out_or_should_have_been_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    right = torch.optim.AdamW.step

    def step(optimizer: Any) -> None:
        if wrong != "has not moved":
            optimizer.found_inf = torch.zeros_like(optimizer.found_inf)
            right(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    case = Case("10", "DTensor", "same addresses", "cpu", 10)
    with one_rank("cpu") as mesh, pytest.raises(WrongResult, match=wrong):
        clip_host.check(case, mesh, STEP)


def test_lists_are_measured_on_the_cpu() -> None:
    rows = list(bench_clip.on_cpu(Context(quick=True, gpu=False)))
    assert {(found.case, found.metric) for found in rows} == {
        (f"10 x 64 {dtype}, cpu", metric) for dtype in ("fp32", "bf16") for metric in METRICS
    }


def test_one_collective_less() -> None:
    case = "50 DTensor, same addresses, 2 ranks"
    counts = {(found.case, found.subject): found.p50 for found in bench_clip.collectives()}
    assert counts == {(f"{case}, {m}", who): n for m in METRICS for who, n in (("torch", 2.0), ("ours", 1.0))}


def test_the_stub_must_have_been_launched_on_to_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.stub_driver.launches", lambda: 0)
    with pytest.raises(WrongResult, match="ours launched 0 kernels"):
        clip_host.check_launches(CASE, None, CLIP)


def test_torchs_passes_are_left_out_and_come_back() -> None:
    x = [torch.full((4,), 2.0)]
    for left_out in (clip_host.without_torchs_clipping, clip_host.without_norms_of_shards):
        with left_out():
            assert torch._foreach_norm(x, 2.0)[0].item() == 1.0
            torch._foreach_mul_(x, torch.zeros(()))
        assert torch._foreach_norm(x, 2.0)[0].item() == 4.0


@pytest.mark.skipif(torch.cuda.is_available() or not shutil.which("gcc"), reason="for machines with gcc and no GPU")
def test_the_gpus_clipping_is_measured_without_a_gpu() -> None:
    rows = list(bench_host.measure_stub(Context(quick=True, gpu=False), "perf.clip_host"))
    assert {found.case.rsplit(", ", 1)[1] for found in rows} == {"stub"}
    assert {found.metric for found in rows if "DTensor" in found.case} == set(METRICS)
    assert {found.metric for found in rows if "plain" in found.case} == {CLIP}


@pytest.fixture
def gpus_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the GPU's sections run with the CPU's tensors and clock."""

    def small(numels: list[int], device: str, **options: Any) -> Gradients:
        return Gradients([n // 1000 + 1 for n in numels], **options)

    monkeypatch.setattr(bench_clip, "Gradients", small)
    monkeypatch.setattr(bench_clip, "one_rank", lambda device: one_rank("cpu"))
    monkeypatch.setattr(bench_clip, "ColdClock", lambda *, device_only: host_clock)
    monkeypatch.setattr(bench_clip, "record", lambda step, steps: (step(), trace())[1])


@pytest.mark.usefixtures("gpus_code")
def test_the_gpus_rows_answer_their_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_clip, "gpu_lists", lambda context: {"200 x 5M": [64] * 100})
    rows: list[Row] = list(bench_clip.on_gpu(Context(quick=True, gpu=True)))
    times = {f"{m}, {clock}" for m in METRICS for clock in ("device", "wall")}
    assert {found.metric for found in rows} == {*times, *(f"{m}, bytes" for m in METRICS), "bandwidth"}
    moved = {(found.metric, found.subject): found.p50 for found in rows if found.unit == "GB"}
    per_element = {(CLIP, "torch"): 20, (CLIP, "ours"): 12, (STEP, "torch"): 48, (STEP, "ours"): 40}
    per_element |= {(DEFERRED, "torch"): 48, (DEFERRED, "ours"): 36}  # bytes of fp32
    assert moved == {(f"{m}, bytes", who): pytest.approx(n * 100e-9) for (m, who), n in per_element.items()}
    answered = [answer for answer in answers([Entry(found, MACHINE) for found in rows], GOALS) if answer.rows]
    assert [answer.goal.limit for answer in answered] == [pytest.approx(1 / x) for x in (1.6, 1.15, 1.3)]


@pytest.mark.usefixtures("gpus_code")
def test_the_gpus_launches_of_clipping_are_counted() -> None:
    found = {(row.case, row.metric, row.subject): row.p50 for row in bench_clip.launches(Context(quick=True, gpu=True))}
    assert found[f"GPT-2 124M, {DEFERRED}", "launches", "ours"] == 1.0
    assert len(found) == len(METRICS) * 3 * 2


@pytest.mark.usefixtures("gpus_code")
def test_dtensors_are_timed_and_counted_on_the_gpu() -> None:
    rows = list(bench_clip.sharded_on_gpu(Context(quick=True, gpu=True)))
    assert {"DTensor" in found.case for found in rows} == {True}
    assert {f"{m}, device" for m in METRICS} <= {found.metric for found in rows}
    counted = {found.case for found in rows if found.metric == "launches"}
    assert counted == {f"GPT-2 124M DTensor, {m}" for m in METRICS}


@pytest.mark.parametrize(("gigabytes", "count"), [(141, 200), (16, 88)])
def test_the_largest_list_fits(monkeypatch: pytest.MonkeyPatch, gigabytes: int, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gigabytes * 10**9, 0))
    lists = bench_clip.gpu_lists(Context(quick=False, gpu=True))
    assert lists[f"{count} x 5M"] == [5_000_000] * count


@pytest.mark.parametrize(("gpu", "left_out"), [(False, 1), (True, 0)])
def test_sections_tell_what_they_leave_out(gpu: bool, left_out: int) -> None:
    context = Context(quick=True, gpu=gpu)
    names = [section.name for section in bench_clip.sections(context)]
    assert len(context.left_out) == left_out
    assert ("clip, launches" in names) == gpu

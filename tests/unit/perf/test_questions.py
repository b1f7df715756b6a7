"""Each question, in small, on the CPU; what it counts; and that a wrong result ends it."""

import shutil
from typing import Any

import pytest
import torch

from perf import bench_clip, bench_guard, bench_host, bench_launches, bench_passes, host_stub
from perf.measure import Context, WrongResult
from perf.subjects import Gradients, require_equal
from scaler_triton import GradScaler

QUICK, CLIP = Context("cpu", quick=True), GradScaler.clip_grad_norm_


def values(rows: Any) -> dict[tuple[str, str, str], float]:
    return {(row.case, row.metric, row.subject): row.p50 for row in rows}


def test_python_calls_are_counted() -> None:
    found = values(bench_host.calls())
    assert found["10 gradients, plain", "calls", "ours"] <= 26
    assert found["10 gradients, fused", "calls", "ours"] <= 30


@pytest.mark.parametrize("kind", bench_host.KINDS)
def test_loops_and_steps_alone(kind: str) -> None:
    assert values(bench_host.alone(QUICK, kind))[f"10 x 64, {kind}", bench_host.ALL, "ours / torch"] > 0
    found = values(bench_host.loops(QUICK, kind))
    for subject in ("none", "torch", "ours"):
        assert all(found[f"MLP, 10, {kind}", metric, subject] > 0 for metric in bench_host.METRICS)
    assert found[f"MLP, 10, {kind}", bench_host.ALL, "none"] < found[f"MLP, 10, {kind}", "step", "torch"]


def test_dtensors_passes_and_clipping() -> None:
    assert values(bench_host.fsdp2(QUICK))["10 DTensors", "unscale + clip", "ours / torch"] > 0
    assert values(bench_passes.measure(QUICK))["10 x 64 bf16", "unscale", "copy / ours"] > 0
    assert values(bench_clip.measure(QUICK))["10 x 64 bf16", "unscale + clip", "ours / torch"] > 0


def test_guards_beside_a_check_by_hand() -> None:
    found = values(bench_guard.measure(QUICK))
    for case in (f"10 x 64 bf16, {kind}" for kind in bench_host.KINDS):
        assert len({found[case, metric, "torch"] for metric in bench_guard.SIGMAS}) == 1
        assert all(found[case, f"{metric}, update()", "ours / torch"] > 0 for metric in bench_guard.SIGMAS)


@pytest.mark.parametrize(
    ("bench", "name", "broken", "text"),
    [
        (bench_passes, "ops.check_nonfinite", lambda grads, flag: None, "fp32: check sets the flag to 0.0"),
        (bench_clip, "GradScaler.clip_grad_norm_", lambda *args: CLIP(*args) * 1.001, "fp32: ours, to 0.5 of the norm"),
        (
            bench_guard,
            "guard.spikes.Window.judge",
            lambda *args, **options: None,
            "bf16: skip spikes, too, spike: the step",
        ),
        (
            bench_host,
            "core.look.bind_check",
            lambda *args: lambda tensors: None,
            "MLP, 1, fused, an infinity: another state than torch's",
        ),
        (
            bench_guard,
            "clipping.norm.clip_batch_",
            lambda *args: (None, False),
            "bf16: skip what is not finite, usual: grad",
        ),
    ],
)
def test_what_is_wrong_is_refused(bench: Any, name: str, broken: Any, text: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(f"scaler_triton.{name}", broken)
    with pytest.raises(WrongResult, match=text):
        list(bench.measure(QUICK))


def test_one_wrong_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, right = Gradients([3, 5]), GradScaler.update

    def update(self: Any) -> None:
        gradients.parameters[1].grad.view(torch.int32)[0] ^= 1
        right(self)

    monkeypatch.setattr(GradScaler, "update", update)
    with pytest.raises(WrongResult, match="some list: another gradient 1 than torch's"):
        require_equal("some list", gradients.parameters, "cpu")


def test_torchs_launches_and_everyones_collectives_are_counted() -> None:
    found = values(bench_launches.by_dispatch())
    assert (found["plain", "launches", "torch"], found["plain", "gradient bytes", "torch"]) == (7, 2)
    assert found["fused, clip", "gradient bytes", "torch"] == 5
    found = values(bench_launches.collectives())
    assert (found["plain, clip", "collectives", "torch"], found["plain, clip", "collectives", "ours"]) == (2, 1)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or not shutil.which("gcc"), reason="needs gcc and no GPU")
def test_our_launches_are_counted_and_the_gpus_path_timed_without_one() -> None:
    memory = values(host_stub.measure(QUICK, "memory"))
    assert memory["plain", "bytes", "ours"] > 0
    launches = values(host_stub.measure(QUICK, "launches"))
    found = [launches[case, "launches", "ours"] for case in ("plain", "fused", "plain, clip", "fused, clip")]
    assert found == [2, 3, 4, 5]
    assert launches["fused", "gradient bytes", "ours"] == 1
    cases = {f"{count} x 64, {kind}" for count in (1, 10) for kind in ("plain", "fused")}
    assert {row.case for row in host_stub.measure(QUICK)} == {*cases, "10 DTensors"}

"""Each question, in small, on the CPU; what it counts; and that a wrong result ends it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perf import __main__ as command
from perf import bench_clip, bench_host, bench_launches, bench_passes, host_stub
from perf.measure import Context, Subject, WrongResult
from perf.models import loop_cases, resnet18, transformer
from perf.rows import Row
from perf.subjects import Gradients
from scaler_triton import GradScaler, ops

QUICK = Context("cpu", quick=True)
NEEDS_GCC = pytest.mark.skipif(torch.cuda.is_available() or not shutil.which("gcc"), reason="needs gcc and no GPU")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let no test wait for a core that others keep busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def values(rows: Any) -> dict[tuple[str, str, str], float]:
    return {(row.case, row.metric, row.subject): row.p50 for row in rows}


def test_python_calls_are_counted() -> None:
    def inner() -> None:
        pass

    assert bench_host.calls_of(lambda: (inner(), inner())) == 2
    found = values(bench_host.calls())
    assert found["10 gradients, plain", "calls", "ours"] <= 30
    assert found["10 gradients, fused", "calls", "ours"] <= 36


@pytest.mark.parametrize("kind", bench_host.KINDS)
def test_loops_and_steps_alone(kind: str) -> None:
    rows = [*bench_host.loops(QUICK, kind), *bench_host.alone(QUICK, kind)]
    assert {row.case for row in rows if row.part == "alone"} == {f"1 gradient, {kind}", f"10 gradients, {kind}"}
    in_loop = values(row for row in rows if row.part != "alone")
    for subject in ("none", "torch", "ours"):
        phases = [in_loop[f"10 parameters, {kind}", metric, subject] for metric in ("scale", "step", "update")]
        assert all(phase > 0 for phase in phases)
    assert (
        in_loop[f"10 parameters, {kind}", bench_host.ALL, "none"] < in_loop[f"10 parameters, {kind}", "step", "torch"]
    )


def test_the_optimizers_own_step_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ((model, batch), *_) = loop_cases("cpu", True).values()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: torch.randn(1 << 20).sort())
    loop = bench_host.Loop(model, batch, fused=False)
    loop.seconds(loop.scalers["torch"])
    assert sum(loop.seconds(loop.scalers["torch"])) < 0.02


def test_models_have_the_parameters_of_their_names() -> None:
    assert len(list(resnet18().parameters())) == 62
    assert resnet18()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert len(list(transformer(2, 8, 2).parameters())) == 24
    assert [len(list(model.parameters())) for model, _ in loop_cases("cpu", False).values()] == [*bench_host.COUNTS]


def test_dtensors_and_ops() -> None:
    assert values(bench_host.fsdp2(QUICK))["10 DTensors", "unscale + clip", "ours / torch"] > 0
    assert values(bench_host.public_ops(QUICK))["10 tensors", "ops.unscale_", "ours / torch"] > 0


def test_passes_and_clipping() -> None:
    found = values(bench_passes.measure(QUICK))
    assert {(metric, subject) for _, metric, subject in found} >= {("unscale", "copy / ours"), ("check", "read / ours")}
    assert values(bench_clip.measure(QUICK))["10 x 64 bf16", "unscale + clip", "ours / torch"] > 0


def test_a_pass_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "check_nonfinite", lambda grads, flag: None)
    with pytest.raises(WrongResult, match="10 x 64 fp32: check sets the flag to 0.0"):
        list(bench_passes.measure(QUICK))


def test_a_clipping_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GradScaler.clip_grad_norm_
    monkeypatch.setattr(GradScaler, "clip_grad_norm_", lambda *args: right(*args) * 1.001)
    with pytest.raises(WrongResult, match="10 x 64 fp32: ours, to 0.5 of the norm: the norm is"):
        list(bench_clip.measure(QUICK))


def test_torchs_launches_bytes_and_waits_are_counted() -> None:
    found = values(bench_launches.by_dispatch())
    counts = {metric: found["plain", metric, "torch"] for metric in ("launches", "copies", "waits", "gradient bytes")}
    assert counts == {"launches": 7, "copies": 3, "waits": 1, "gradient bytes": 2}
    assert found["fused, clip", "gradient bytes", "torch"] == 5


def test_collectives_are_counted() -> None:
    found = values(bench_launches.collectives())
    assert (found["plain, clip", "collectives", "torch"], found["plain, clip", "collectives", "ours"]) == (2, 1)


@NEEDS_GCC
@pytest.mark.slow
def test_the_stub_counts_our_launches_and_times_the_gpus_path() -> None:
    launches = values(host_stub.measure(QUICK, "launches"))
    assert {case: launches[case, "launches", "ours"] for case in ("plain", "fused", "plain, clip", "fused, clip")} == {
        "plain": 3, "fused": 3, "plain, clip": 5, "fused, clip": 5,
    }  # fmt: skip
    assert launches["fused", "gradient bytes", "ours"] == 1
    rows = list(host_stub.measure(QUICK))
    assert {row.case for row in rows} == {"1 gradient, plain", "1 gradient, fused", "10 DTensors"}


def test_what_launches_nothing_is_refused_on_the_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.stub_driver.launches", lambda: 0)
    with pytest.raises(WrongResult, match="case: ours launched 0 kernels"):
        host_stub.require_launches("case", {"ours": Subject(lambda: None)})


def test_a_failure_leaves_the_other_questions(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(context: Context) -> Iterator[Row]:
        yield from bench_host.calls()
        raise WrongResult("it is wrong")

    monkeypatch.setattr(bench_launches, "measure", fail)
    monkeypatch.setattr(bench_passes, "lists", lambda context: {"2 x 4": [4, 4]})
    assert command.main(["launches", "passes", "--quick", "--runs", "2", "--out", str(tmp_path)]) == 1
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {"launches.csv", "passes.csv"}
    said = capsys.readouterr().out
    assert "FAILED: launches: WrongResult: it is wrong" in said
    assert "2 x 4 fp32" in said


def test_gradients_of_gpt2() -> None:
    from perf.subjects import gpt2

    assert (len(gpt2()), sum(gpt2())) == (148, 124_439_808)
    assert Gradients(gpt2(1 << 20)).values.numel() < 200

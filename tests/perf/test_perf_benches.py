"""The benches: wrong results are refused, the GPU's code runs on the CPU, the command tells what it left out."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from perf import (
    bench_check,
    bench_cpu,
    bench_host,
    bench_launches,
    bench_step,
    bench_unscale,
    command,
    host_cases,
    host_stub,
)
from perf.check import WrongResult, require_same, same_bits
from perf.compare import checking, require_equal, unscaling
from perf.context import Context, Section
from perf.grads import Gradients
from perf.host_cases import Case
from perf.machine import here
from perf.measure import QUICK, Subject
from perf.rows import FARTHER, Row, read_csv, row
from perf.solo import one_rank
from scaler_triton import GradScaler

ROOT = Path(__file__).parents[2]
CLIP = GradScaler.clip_grad_norm_
CASE = Case("10", "plain", "new addresses", "cpu", 10)


@pytest.fixture
def wrong_by_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GradScaler._unscale_batches_

    def wrong(self: Any, plan: Any, *args: Any) -> Any:
        flags = right(self, plan, *args)
        plan.parameters[-1].grad.view(torch.int32)[0] ^= 1
        return flags

    monkeypatch.setattr(GradScaler, "_unscale_batches_", wrong)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our check see nothing."""
    monkeypatch.setattr("scaler_triton.reference.check_nonfinite", lambda *arguments: None)


@pytest.mark.usefixtures("wrong_by_one_bit")
def test_a_wrong_gradient_is_refused() -> None:
    with pytest.raises(WrongResult, match="10 plain, new addresses, cpu, unscale_: ours's tensor 9 differs"):
        list(host_cases.measure(CASE, None, QUICK))
    with pytest.raises(WrongResult, match="some list: ours's tensor 2 differs"):
        require_equal("some list", Gradients([4, 4, 4]), unscaling)


@pytest.mark.usefixtures("blind")
def test_a_missed_overflow_is_refused() -> None:
    with pytest.raises(WrongResult, match="ours's tensor 3 differs: torch.float32 \\[0.0\\], not"):
        require_equal("some list", Gradients([4, 4, 4]), checking)


def test_without_torch_the_arithmetic_decides() -> None:
    for build in (unscaling, checking):
        require_equal("some list", Gradients([4, 4, 4], torch.bfloat16), build, torch_serves=False)


@pytest.mark.usefixtures("wrong_by_one_bit")
def test_without_torch_a_wrong_gradient_is_refused() -> None:
    with pytest.raises(WrongResult):
        require_equal("some list", Gradients([4, 4, 4]), unscaling, torch_serves=False)


def test_bits_are_compared() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())


def test_a_missing_tensor_is_a_difference() -> None:
    left = {"torch": [torch.ones(1)], "ours": []}
    with pytest.raises(WrongResult, match="left 0 tensors, not 1"):
        require_same("case", {name: Subject(lambda: None) for name in left}, left.__getitem__)


def test_gradients_move_only_when_they_are_to() -> None:
    gradients = Gradients([3, 5])
    addresses = [parameter.grad.data_ptr() for parameter in gradients.parameters]
    gradients.restore()
    assert [parameter.grad.data_ptr() for parameter in gradients.parameters] == addresses
    gradients.renew()
    assert all(p.grad.data_ptr() != old for p, old in zip(gradients.parameters, addresses, strict=True))
    gradients.choose([1])
    assert [parameter.grad is None for parameter in gradients.parameters] == [True, False]


def test_adjacent_gradients_touch() -> None:
    first, second = Gradients([3, 5], adjacent=True).locals
    assert first.data_ptr() + first.nbytes == second.data_ptr()


def test_dtensors_are_measured() -> None:
    with one_rank("cpu") as mesh:
        rows = list(host_cases.measure(Case("10", "DTensor", "same addresses", "cpu", 10), mesh, QUICK))
    assert {found.metric for found in rows if found.subject == "ours / torch"} == set(host_cases.CALLS)


def test_experts_come_and_go_alike_for_both() -> None:
    bench = host_cases.Bench(Case("MoE", "plain", "come and go", "cpu", 192), None)
    present = []
    for subject in bench.subjects("unscale_").values():
        subject.before()
        present.append([parameter.grad is not None for parameter in bench.gradients.parameters])
        subject.run()
        subject.after()
    assert present[0] == present[1]
    assert sum(present[0]) == 96


def test_a_gan_has_two_optimizers_and_both_step() -> None:
    (case,) = (case for case in host_cases.cases("cpu") if case.what == "GAN")
    bench = host_cases.Bench(case, None)
    assert [len(optimizer.param_groups[0]["params"]) for optimizer in bench.optimizers] == [702, 12]
    for name, subject in bench.subjects("scale + unscale_ + step + update").items():
        subject.before()
        subject.run()
        assert bench.scalers[name]._growth_tracker == 1
        assert all(p.grad.abs().max() < 1e-3 for p in bench.gradients.parameters)


def test_the_stub_must_have_been_launched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.stub_driver.launches", lambda: 0)
    with pytest.raises(WrongResult, match="ours launched 0 kernels"):
        host_stub.check(CASE, None)


@pytest.mark.skipif(torch.cuda.is_available() or not shutil.which("gcc"), reason="for machines with gcc and no GPU")
def test_the_gpus_host_path_is_measured_without_a_gpu() -> None:
    rows = list(bench_host.measure_stub(Context(quick=True, gpu=False), "perf.host_stub"))
    assert {found.case.rsplit(", ", 1)[1] for found in rows} == {"stub"}
    assert {found.metric for found in rows} == {*host_cases.CALLS, "launch"}
    assert [found.subject for found in rows if found.metric == "launch"] == ["dispatch", "ours", "ours / dispatch"]


def test_one_launch_must_reach_the_driver_once_and_the_same_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("perf.stub_driver.note_params", lambda count: None)
    monkeypatch.setattr("perf.stub_driver.launches", lambda: len(seen))
    monkeypatch.setattr("perf.stub_driver.launch", seen.__getitem__)
    one, other, none = (Subject(partial(seen.extend, launched)) for launched in ("a", "b", ""))
    host_stub.require_one_launch({"dispatch": one, "ours": one})
    with pytest.raises(WrongResult, match="one launch, stub: \\['a', 'b'\\]"):
        host_stub.require_one_launch({"dispatch": one, "ours": other})
    with pytest.raises(WrongResult, match="one launch, stub: ours launched not once"):
        host_stub.require_one_launch({"dispatch": one, "ours": none})


@pytest.mark.parametrize("served", [True, False])
def test_the_gpus_lists_run(on_cpu: Callable[[bool], None], served: bool) -> None:
    on_cpu(served)
    context = Context(quick=True, gpu=True)
    rows = [*bench_unscale.measure(context), *bench_check.measure(context)]
    subjects = {found.subject for found in rows}
    assert {"ours", "copy", "copy / ours"} <= subjects
    assert ("torch" in subjects) == served
    assert {found.metric for found in rows} == {"device", "bandwidth", "wall"}
    assert len(context.left_out) == (0 if served else 6)


def test_the_gpus_launches_are_counted(on_cpu: Callable[[bool], None]) -> None:
    on_cpu(True)
    found = {(r.case, r.metric, r.subject): r.p50 for r in bench_launches.measure()}
    assert found["fused AdamW, clip", "launches", "ours - none"] == 0.0
    assert found["plain AdamW", "copies", "torch"] == 1.0


def test_the_gpus_training_runs(on_cpu: Callable[[bool], None]) -> None:
    on_cpu(True)
    context = Context(quick=True, gpu=True)
    rows = list(bench_step.lora(context, "cpu"))
    hosts = {"host", "host, optimizer too"}
    assert {found.metric for found in rows} == {"step", "backward to forward", *hosts, "addresses repeated"}
    seconds = {(found.metric, found.subject): found.p50 for found in rows}
    assert all(seconds["host, optimizer too", name] > seconds["host", name] for name in ("none", "torch", "ours"))
    assert {"ours / none", "torch / none"} <= {found.subject for found in rows}


def test_repeated_addresses_are_counted() -> None:
    loop = bench_step.Loop(*small())
    kept = [torch.zeros_like(parameter) for parameter in loop.model.parameters()]

    def backward(scaler: Any) -> None:
        scaler.scale(torch.ones(()))
        for index, parameter in enumerate(loop.model.parameters()):
            parameter.grad = kept[index] if index else torch.zeros_like(parameter)
            kept.append(parameter.grad)  # alive, so that no other is put there

    loop.backward = backward  # type: ignore[method-assign]
    assert bench_step.repeated_addresses(loop, 2) == [1 - 1 / len(list(loop.model.parameters()))] * 2


def test_gradients_are_dropped_while_their_addresses_are_compared() -> None:
    """Else the next ones could not be where they were."""
    loop, alive, made = bench_step.Loop(*small()), [], []
    backward = loop.backward

    def watched(scaler: Any) -> None:
        loop.optimizer.zero_grad()
        alive.extend(reference() is not None for reference in made)
        backward(scaler)
        made[:] = [weakref.ref(parameter.grad) for parameter in loop.model.parameters()]

    loop.backward = watched  # type: ignore[method-assign]
    bench_step.repeated_addresses(loop, 2)
    assert alive
    assert not any(alive)


def test_farther_from_none_than_torch_in_either_direction() -> None:
    assert bench_step.farther({"none": [2.0], "torch": [1.0], "ours": [2.5]}) == 0.5
    assert bench_step.farther({"none": [2.0], "torch": [3.0], "ours": [0.5]}) == 1.5
    assert bench_step.farther({"none": [1.0], "torch": [1.0], "ours": [1.0]}) == 0.0


def test_the_gpus_idle_time_is_read(on_cpu: Callable[[bool], None]) -> None:
    on_cpu(True)
    loop = bench_step.Loop(*small())
    assert {found.subject for found in bench_step.idle("case", loop, 6)} >= {"none", "ours / torch", FARTHER}


def test_each_training_of_gpt2_fails_alone_and_keeps_what_it_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpt2(context: Context, size: int, kind: str) -> Iterator[Row]:
        yield row("step", f"{size}, {kind}", "step", "ours", "us", [1.0])
        if (size, kind) == (1, "plain"):
            raise WrongResult("nothing was profiled")

    monkeypatch.setattr(bench_step, "gpt2", gpt2)
    sections = [part for part in bench_step.sections(Context(quick=True, gpu=True)) if "GPT-2" in part.name]
    rows, failed = command.run_all([("step", part) for part in sections])
    assert [found.case for found in rows] == ["1, plain", "1, fused", "4, plain", "4, fused"]
    assert failed == ["step, GPT-2, batch 1, plain"]


def test_a_capture_that_fails_is_told_and_the_others_are_timed(
    on_cpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(True)

    def replay_of(loop: bench_step.Loop, scaler: Any) -> Callable[[], None]:
        if scaler is loop.scalers["ours"]:
            raise RuntimeError("operation not permitted\nwhile capturing")
        return lambda: loop.step(scaler)

    monkeypatch.setattr(bench_step, "replay_of", replay_of)
    context = Context(quick=True, gpu=True)
    rows = list(bench_step.captured(context, "cpu"))
    assert {found.subject for found in rows} == {"none", "torch", "torch / none"}
    assert context.left_out == ["captured step, ours: RuntimeError: operation not permitted"]


def test_a_clipped_step_takes_one_call_of_ours_and_two_of_torchs() -> None:
    loop = bench_step.Loop(*small(), clip=True)
    for name, scaler in loop.scalers.items():
        own = name == "ours"
        clipping = mock.patch.object(GradScaler, "clip_grad_norm_", autospec=True, side_effect=CLIP)
        torchs = mock.patch("torch.nn.utils.clip_grad_norm_", side_effect=torch.nn.utils.clip_grad_norm_)
        with clipping as one, torchs as second:
            loop.step(scaler)
        assert (one.call_count, second.call_count) == (own, not own)
    bench_step.require_no_skips("case", loop)


def test_a_skipped_step_is_refused() -> None:
    loop = bench_step.Loop(*small())
    loop.scalers["ours"].update(2.0)
    with pytest.raises(WrongResult, match="case: ours skipped a step"):
        bench_step.require_no_skips("case", loop)


def small() -> tuple[Any, Any, Any]:
    model = bench_step.transformer(bench_step.ModelSize(1, 16, 1, 8), 10, "cpu")
    return model, bench_step.adamw(model.parameters()), bench_step.tokens(1, 8, 10, "cpu")


def test_a_failing_bench_leaves_the_others_running(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> Iterator[Row]:
        yield row("a", "c", "m", "ours", "us", [1.0])
        raise OSError("no luck")

    def good() -> Iterator[Row]:
        yield row("b", "c", "m", "ours", "us", [1.0])

    rows, failed = command.run_all([("a", Section("first", failing)), ("b", Section("second", good))])
    assert [found.bench for found in rows] == ["a", "b"]
    assert failed == ["first"]
    assert "OSError: no luck" in capsys.readouterr().out


def test_an_interrupt_loses_nothing_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(case: str) -> Iterator[Row]:
        yield row("cpu", case, "m", "ours", "us", [1.0])

    def interrupted() -> Iterator[Row]:
        yield from measured("second")
        assert [found.row.case for found in read_csv(path)] == ["first"]  # it may end worse than by an interrupt
        raise KeyboardInterrupt

    path = tmp_path / f"{here().device}.csv"
    parts = {"1": lambda: measured("first"), "2": interrupted, "3": lambda: measured("third")}
    monkeypatch.setattr(bench_cpu, "sections", lambda context: [Section(*part) for part in parts.items()])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert command.main(["--only", "cpu", "--out", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert [found.row.case for found in read_csv(path)] == ["first", "second"]
    assert path.with_suffix(".svg").exists()
    assert "FAILED: 2, and what comes after it: interrupted" in capsys.readouterr().out


def test_a_gpu_machine_begins_with_what_decides() -> None:
    """Time may run out."""
    found = [section.name for _, section in command.in_order(Context(gpu=True), list(command.BENCHES))]
    captured, explaining = found.index("step, captured"), found.index("clip, cuda path")
    assert found[0] == "step, GPT-2, batch 1, plain"
    assert {"step, FSDP2", "launches", "unscale", "check", "clip, lists on the GPU"} <= set(found[:captured])
    assert found[captured + 1 : explaining + 2] == ["clip, cuda path", "host, cuda path"]
    assert {"clip, cpu path", "host, cpu path", "cpu, check", "import"} <= set(found[explaining + 2 :])
    alone = [name for name, _ in command.in_order(Context(gpu=False), list(command.BENCHES))]
    assert alone == sorted(alone, key=list(command.BENCHES).index)


def test_what_there_is_no_time_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(case: str) -> Iterator[Row]:
        time.sleep(0.2)
        yield row("cpu", case, "m", "ours", "us", [1.0])

    parts = [Section(case, partial(measured, case)) for case in ("first", "second")]
    monkeypatch.setattr(bench_cpu, "sections", lambda context: parts)
    assert command.main(["--only", "cpu", "--minutes", "0.002", "--out", str(tmp_path)]) == 0
    assert [found.row.case for found in read_csv(tmp_path / f"{here().device}.csv")] == ["first"]
    assert "left out: second: 0.002 minutes are over" in capsys.readouterr().out


def test_a_failure_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing() -> Iterator[Row]:
        raise OSError("no luck")

    monkeypatch.setattr(bench_cpu, "sections", lambda context: [Section("cpu", failing)])
    assert command.main(["--only", "cpu", "--out", str(tmp_path)]) == 1


def test_the_command_runs_and_tells_what_it_left_out(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "perf", "--quick", "--only", "cpu,check", "--out", str(tmp_path)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "10 x 64 fp16" in run.stdout
    if not torch.cuda.is_available():
        assert "left out: check before a fused optimizer: needs a GPU" in run.stdout
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".svg"]


def test_an_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "cpu,gpus"])
    assert "unknown: gpus" in capsys.readouterr().err

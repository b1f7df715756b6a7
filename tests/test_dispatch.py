"""Which backend serves which device, said aloud, and what happens where Triton does not work."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, assert_same, grads, places, sgd, started

from scaler_triton import GradScaler, dispatch, ops
from scaler_triton.kernels import probe as probe_module

pytestmark = pytest.mark.usefixtures("undecided")

CPU, FP32 = torch.device("cpu"), torch.float32
ROOT = Path(__file__).parents[1]


def test_cpu_is_torchs_unless_asked_otherwise() -> None:
    assert dispatch.choose(CPU, FP32, "auto") == "torch"
    assert dispatch.reason_for(CPU, FP32, "auto") == "Triton is chosen for CUDA only"
    assert dispatch.choose(CPU, FP32, "torch") == "torch"
    assert dispatch.reason_for(CPU, FP32, "torch") == "asked for"


@pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)
def test_a_trial_is_made_once_and_one_line_says_how_it_went(place: Place, caplog: Any) -> None:
    device = torch.zeros(0, device=place.device).device
    with caplog.at_level(logging.DEBUG, "scaler_triton"):
        for _ in range(3):
            dispatch.choose(device, FP32, "triton")
    assert [record.getMessage() for record in caplog.records] == [
        f"float32 on {device} is served by triton: triton, and a trial run was right"
    ]


@pytest.mark.parametrize(
    ("backend", "reason"), [("auto", "Triton is chosen for CUDA only"), ("torch", "asked for")], ids=["auto", "torch"]
)
def test_one_line_says_why_a_device_is_torchs(backend: str, reason: str, caplog: Any) -> None:
    scaler = GradScaler("cpu", backend=backend)
    with caplog.at_level(logging.DEBUG, "scaler_triton"):
        for _ in range(2):
            optimizer = sgd([torch.tensor([4.0])])
            scaler.scale(torch.ones(()))
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert [record.getMessage() for record in caplog.records] == [f"float32 on cpu is served by torch: {reason}"]


def test_xpu_and_the_rest_are_torchs() -> None:
    assert dispatch.choose(torch.device("xpu", 0), FP32, "auto") == "torch"


@pytest.mark.parametrize("place", places(), ids=str)
def test_what_is_asked_for_is_chosen_and_tried(place: Place) -> None:
    device = torch.zeros(0, device=place.device).device
    assert dispatch.choose(device, FP32, place.backend) == place.backend


def broken(cause: Exception) -> Any:
    def probe(device: torch.device, dtype: torch.dtype) -> None:
        raise cause

    return probe


def test_auto_falls_back_with_one_warning_that_carries_the_cause(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(probe_module, "probe", broken(RuntimeError("Failed to find C compiler")))
    device = torch.device("cuda", 0)
    with (
        pytest.warns(
            RuntimeWarning, match=r"float32 on cuda:0.*torch's own ops.*RuntimeError: Failed to find C compiler"
        ) as warned,
        caplog.at_level(logging.DEBUG, "scaler_triton"),
    ):
        assert dispatch.choose(device, FP32, "auto") == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "float32 on cuda:0 is served by torch: RuntimeError: Failed to find C compiler"
    ]
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (FP32, torch.float16):
            assert dispatch.choose(device, dtype, "auto") == "torch"


@pytest.mark.parametrize("requested", ["auto", "triton"])
def test_a_trial_that_ran_out_of_memory_decides_nothing(requested: str, monkeypatch: Any) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(probe_module, "probe", broken(torch.OutOfMemoryError("CUDA out of memory")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            dispatch.choose(device, FP32, requested)
        monkeypatch.setattr(probe_module, "probe", lambda device, dtype: None)
        assert dispatch.choose(device, FP32, requested) == "triton"


def test_triton_asked_for_raises_before_any_gradient_is_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(probe_module, "probe", broken(OSError("read-only file system")))
    optimizer = sgd([torch.tensor([4.0])])
    scaler = started(GradScaler, "cpu", backend="triton")
    text = r"^backend='triton' does not work for float32 on cpu: OSError: read-only .*=auto takes torch's ops there$"
    with pytest.raises(RuntimeError, match=text):
        scaler.unscale_(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.item() == 4.0


def by_scaler(optimizer: torch.optim.Optimizer, backend: str) -> None:
    started(GradScaler, "cpu", backend=backend).unscale_(optimizer)


def by_op(optimizer: torch.optim.Optimizer, backend: str) -> None:
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    ops.unscale_(gradients, torch.tensor(0.5), torch.zeros(()), backend=backend)


@pytest.mark.parametrize("unscale", [by_scaler, by_op])
@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_every_dtype_is_tried_before_any_gradient_is_written(monkeypatch: Any, backend: str, unscale: Any) -> None:
    def probe(device: torch.device, dtype: torch.dtype) -> None:
        if dtype is torch.float64:
            raise OSError("read-only file system")

    monkeypatch.setattr(probe_module, "probe", probe)
    if backend == "auto":  # whose warning is an error here
        _as_on_a_gpu(monkeypatch, served=FP32)
    optimizer = sgd([torch.tensor([4.0]), torch.tensor([4.0], dtype=torch.float64)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((RuntimeError, RuntimeWarning), match="not work for float64"):
            unscale(optimizer, backend)
    assert grads(optimizer) == [4.0, 4.0]


@pytest.mark.parametrize("place", places(), ids=str)
def test_what_clips_is_tried_when_it_is_first_wanted(place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr(probe_module, "probe_clipping", broken(RuntimeError("ptxas fatal")))
    device = torch.zeros(0, device=place.device).device
    assert dispatch.choose(device, FP32, place.backend) == place.backend
    if place.backend == "triton":
        with pytest.raises(RuntimeError, match=r"does not work for clipping float32 on .*: RuntimeError: ptxas fatal"):
            dispatch.choose(device, FP32, "triton", clips=True)
    else:
        assert dispatch.choose(device, FP32, "torch", clips=True) == "torch"


def test_auto_clips_by_torch_where_only_those_kernels_fail(monkeypatch: Any) -> None:
    monkeypatch.setattr(probe_module, "probe", lambda device, dtype: None)
    monkeypatch.setattr(probe_module, "probe_clipping", broken(RuntimeError("ptxas fatal")))
    device = torch.device("cuda", 0)
    assert dispatch.choose(device, FP32, "auto") == "triton"
    with pytest.warns(RuntimeWarning, match=r"clipping float32 on cuda:0.*torch's own ops.*RuntimeError: ptxas fatal"):
        assert dispatch.choose(device, FP32, "auto", clips=True) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (FP32, torch.float16):
            assert dispatch.choose(device, dtype, "auto", clips=True) == "torch"
            assert dispatch.choose(device, dtype, "auto") == "triton"


def test_a_clip_that_triton_cannot_do_is_torchs_to_the_bit(monkeypatch: Any) -> None:
    """auto's way on a GPU, taken on the CPU."""
    monkeypatch.setattr(probe_module, "probe_clipping", broken(RuntimeError("ptxas fatal")))
    start = [torch.tensor([3.0, 40.0, -0.7]), torch.tensor([1.0, 0.3], dtype=torch.bfloat16)]
    clipped = []
    for backend in ("auto", "torch"):
        optimizer, scaler = sgd(start), started(GradScaler, "cpu", backend=backend)
        if backend == "auto":
            _as_on_a_gpu(monkeypatch)
            with pytest.warns(RuntimeWarning, match="ptxas fatal") as warned:
                norm = scaler.clip_grad_norm_(optimizer, 1e-3)
            assert len(warned) == 1
        else:
            norm = scaler.clip_grad_norm_(optimizer, 1e-3)
        clipped.append([norm, *(p.grad for p in optimizer.param_groups[0]["params"])])
    for mine, theirs in zip(*clipped, strict=True):
        assert_same(mine, theirs)


def _as_on_a_gpu(monkeypatch: Any, served: torch.dtype | None = None) -> None:
    """Have auto try Triton on the CPU, which serves the unscaling there, or that of one dtype."""
    decide = dispatch._decide

    def decided(device: torch.device, dtype: torch.dtype, requested: str, clips: bool) -> Any:
        if not clips and served in (None, dtype):
            return "triton", "it is served"
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            return decide(torch.device("cuda", 0), dtype, requested, clips)

    monkeypatch.setattr(dispatch, "_without_trial", lambda device, requested: requested == "torch")
    monkeypatch.setattr(dispatch, "_decide", decided)


def test_argument_beats_environment_beats_auto(monkeypatch: Any) -> None:
    assert dispatch.check_backend(None) == "auto"
    monkeypatch.setenv(dispatch.ENV_VARIABLE, "torch")
    assert dispatch.check_backend(None) == "torch"
    assert dispatch.check_backend("triton") == "triton"
    monkeypatch.setenv(dispatch.ENV_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=r"^SCALER_TRITON_BACKEND must be one of auto, triton, torch, got 'cuda'$"):
        GradScaler("cpu")
    with pytest.raises(ValueError, match=r"^backend must be one of auto, triton, torch, got 'numpy'$"):
        GradScaler("cpu", backend="numpy")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import warnings
import torch
from scaler_triton import GradScaler, dispatch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert dispatch.choose(torch.device("cuda", 0), torch.float32, "auto") == "torch"
assert ["Triton does not work for float32 on cuda:0" in str(w.message) for w in caught] == [True], caught
scaler = GradScaler("cpu", init_scale=4.0)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=1.0)
scaler.scale(parameter.sum()).backward()
scaler.step(optimizer)
scaler.update()
assert parameter.item() == -1.0
"""


def test_without_triton_everything_works_on_the_torch_path() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, cwd=ROOT, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU is not Triton's natively, with a GPU or without")
def test_natively_triton_refuses_cpu_tensors() -> None:
    code = (
        "import torch; from scaler_triton import dispatch\n"
        "try: dispatch.choose(torch.device('cpu'), torch.float32, 'triton')\n"
        "except RuntimeError as error: print(error)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert "backend='triton' does not work for float32 on cpu" in run.stdout, run.stderr
    assert "without TRITON_INTERPRET=1 the kernels take tensors on a GPU, got cpu" in run.stdout


def test_kernels_read_no_scale_but_a_plain_one_in_fp32() -> None:
    scales = [torch.ones(()), torch.ones(()).double(), torch.nn.Parameter(torch.ones(()))]
    with mock.patch.object(dispatch, "choose", return_value="triton"):
        assert [dispatch.choose_for_scale(scale, "triton") for scale in scales] == ["triton", "torch", "torch"]

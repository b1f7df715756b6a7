"""Which backend serves which device; what happens where Triton does not work; captures, waits and compilers."""

import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import KERNELS, PLACES, Place, assert_all_same, grads, places, sgd, started

from scaler_triton import GradScaler, ops
from scaler_triton.core import dispatch
from scaler_triton.kernels import trial
from scaler_triton.text import one_line

pytestmark = pytest.mark.usefixtures("undecided")
CPU, GPU, FP32 = torch.device("cpu"), torch.device("cuda", 0), torch.float32


def broken(cause: Exception, only: torch.dtype | None = None) -> Callable[..., None]:
    """Return a trial that fails, perhaps for one dtype only."""

    def fail(device: torch.device, dtype: torch.dtype) -> None:
        if only in (None, dtype):
            raise cause

    return fail


def works(device: torch.device, dtype: torch.dtype) -> None:
    """A trial that succeeds."""


# The choice


@pytest.mark.parametrize(
    ("device", "requested", "reason"),
    [
        (CPU, "auto", "Triton is chosen for CUDA only"),
        (CPU, "torch", "asked for"),
        (torch.device("xpu", 0), "auto", "Triton is chosen for CUDA only"),
        (GPU, "torch", "asked for"),
    ],
)
def test_torchs_ops_serve_what_is_not_cuda_or_asks_for_them(device: torch.device, requested: str, reason: str) -> None:
    for task in ("unscaling", "clipping"):
        assert dispatch.choose(device, FP32, requested, task=task) == "torch"
    assert dispatch.reason_for(device, FP32, requested) == reason


@PLACES
def test_what_is_asked_for_is_tried_once_and_one_line_says_how_it_went(place: Place, caplog: Any) -> None:
    device = torch.zeros(0, device=place.device).device
    with caplog.at_level(logging.DEBUG, "scaler_triton"):
        assert [dispatch.choose(device, FP32, place.backend) for _ in range(3)] == [place.backend] * 3
        if place.backend == "torch":  # no other line for clipping
            assert dispatch.choose(device, FP32, "torch", task="clipping") == "torch"
    reason = "asked for" + ", and a trial run was right" * (place.backend == "triton")
    assert [record.getMessage() for record in caplog.records] == [
        f"float32 on {device} is served by {place.backend}: {reason}"
    ]


@KERNELS
def test_clipping_is_tried_when_it_is_first_wanted(place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "clipping", broken(RuntimeError("ptxas fatal")))
    device = torch.zeros(0, device=place.device).device
    assert dispatch.choose(device, FP32, "triton") == "triton"
    with pytest.raises(RuntimeError, match=r"does not work for clipping float32 on .*; RuntimeError: ptxas fatal;"):
        dispatch.choose(device, FP32, "triton", task="clipping")


def test_only_a_plain_scale_in_fp32_is_for_the_kernel() -> None:
    scales = [torch.ones(()), torch.ones(()).double(), torch.nn.Parameter(torch.ones(()))]
    with mock.patch.object(dispatch, "choose", return_value="triton"):
        assert [dispatch.choose_for_scale(scale, "triton") for scale in scales] == ["triton", "torch", "torch"]


# Where Triton does not work


@pytest.mark.parametrize("task", ["unscaling", "clipping", "guarding"])
def test_auto_falls_back_with_one_warning_that_carries_the_cause(task: Any, monkeypatch: Any, caplog: Any) -> None:
    for each in ("unscaling", "clipping", "guarding"):
        monkeypatch.setattr(trial, each, broken(RuntimeError("no such kernel")) if each == task else works)
    place = "float32 on cuda:0" if task == "unscaling" else f"{task} float32 on cuda:0"
    text = f"Triton does not work for {place}, so torch's own ops are used there (RuntimeError: no such kernel)"
    with pytest.warns(RuntimeWarning) as warned, caplog.at_level(logging.DEBUG, "scaler_triton"):
        assert dispatch.choose(GPU, FP32, "auto", task=task) == "torch"
    assert [(str(each.message), each.filename) for each in warned] == [(text, __file__)]
    assert caplog.records[-1].getMessage() == f"{place} is served by torch: RuntimeError: no such kernel"
    for dtype in (FP32, torch.float16):  # a second warning would be an error
        assert dispatch.choose(GPU, dtype, "auto", task=task) == "torch"
        assert dispatch.choose(GPU, dtype, "auto") == ("torch" if task == "unscaling" else "triton")


REMEDIES = [
    (RuntimeError("Failed to find C compiler. Please specify via CC"), "install a C compiler, such as gcc"),
    (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "built without this GPU"),
    (RuntimeError("PTXAS error: Internal Triton PTX codegen error"), "triton 3.6 to 3.9 do from sm_70 on"),
    (ModuleNotFoundError("No module named 'triton'"), "pip install triton"),
]


@pytest.mark.parametrize(("error", "remedy"), REMEDIES)
def test_what_users_can_mend_comes_with_the_remedy(error: Exception, remedy: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "unscaling", broken(error))
    with pytest.warns(RuntimeWarning, match=rf"used there \(.*{remedy}.*; {type(error).__name__}: "):
        assert dispatch.choose(GPU, FP32, "auto") == "torch"
    assert remedy in one_line(dispatch.reason_for(GPU, FP32, "auto"))  # which is what `info` shows
    with pytest.raises(RuntimeError, match=f"{remedy}.*; backend='auto'"):
        dispatch.choose(GPU, FP32, "triton")


TOO_OLD = """
import torch, triton
for package, version, name in ((triton, "3.5.1", "kernels.launch"), (torch, "2.9.1", "core.dispatch")):
    package.__version__ = type(package.__version__)(version)
    try:
        __import__(f"scaler_triton.{name}")
    except ImportError as error:
        print(error)
"""


def test_a_version_below_the_floor_is_told_in_one_sentence() -> None:
    pytest.importorskip("triton")
    kernels, host = subprocess.check_output([sys.executable, "-c", TOO_OLD], text=True, timeout=120).splitlines()
    assert kernels.startswith("the kernels need triton 3.6 or newer, got 3.5.1")
    assert host.startswith("scaler_triton needs torch 2.10 or newer, got 2.9.1")


@pytest.mark.parametrize("requested", ["auto", "triton"])
def test_a_trial_that_ran_out_of_memory_decides_nothing(requested: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "unscaling", broken(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        dispatch.choose(GPU, FP32, requested)
    monkeypatch.setattr(trial, "unscaling", works)
    assert dispatch.choose(GPU, FP32, requested) == "triton"


def by_op(_: GradScaler, optimizer: Any) -> None:
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    ops.unscale_(gradients, torch.tensor(0.5), torch.zeros(()), backend="triton")


@pytest.mark.parametrize("unscale", [GradScaler.unscale_, partial(GradScaler.clip_grad_norm_, max_norm=1.0), by_op])
def test_triton_asked_for_raises_with_the_remedy_before_any_gradient_is_written(unscale: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "unscaling", broken(OSError("read-only"), only=torch.float64))
    monkeypatch.setattr(trial, "clipping", works)
    optimizer = sgd([torch.tensor([4.0]), torch.tensor([4.0], dtype=torch.float64)])
    scaler = started(GradScaler, "cpu", backend="triton")
    remedy = "backend='auto' or SCALER_TRITON_BACKEND=auto takes torch's ops there"
    for _ in range(2):  # it is tried again
        with pytest.raises(RuntimeError) as error:
            unscale(scaler, optimizer)
        assert str(error.value) == f"backend='triton' does not work for float64 on cpu: OSError: read-only; {remedy}"
        assert isinstance(error.value.__cause__, OSError)
    assert grads(optimizer) == [4.0, 4.0]


@pytest.mark.parametrize("place", [place for place in places() if place == Place("cpu", "triton")], ids=str)
def test_where_only_clipping_fails_it_is_torchs_to_the_bit(place: Place) -> None:
    clipped = []
    for backend in ("triton", "torch"):
        optimizer = sgd([torch.tensor([3.0, 40.0, -0.7]), torch.tensor([1.0, 0.3], dtype=torch.bfloat16)])
        scaler = started(GradScaler, "cpu", backend=backend)
        for dtype in (FP32, torch.bfloat16):  # chosen already, as by auto on a GPU
            dispatch._chosen[CPU, dtype, "triton", "clipping"] = ("torch", "ptxas fatal")
        norm = scaler.clip_grad_norm_(optimizer, 1e-3)
        clipped.append([norm, *(parameter.grad for parameter in optimizer.param_groups[0]["params"])])
    assert_all_same(*clipped)


def test_without_the_interpreter_the_kernels_refuse_the_cpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(dispatch.kernels().launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET=1 the kernels take tensors on a GPU, got cpu"):
        dispatch.choose(CPU, FP32, "triton")


def test_without_triton_auto_takes_torchs_ops(monkeypatch: Any) -> None:
    monkeypatch.setattr(dispatch, "kernels", mock.Mock(side_effect=ModuleNotFoundError("No module named 'triton'")))
    with pytest.warns(
        RuntimeWarning, match="used there .pip install .*; ModuleNotFoundError: No module named 'triton'"
    ):
        assert dispatch.choose(GPU, FP32, "auto") == "torch"


@pytest.mark.parametrize("is_private", [True, False])
def test_the_argument_beats_the_environment_which_beats_auto(is_private: bool, monkeypatch: Any) -> None:
    if not is_private:  # a Python whose `os.environ` is made otherwise
        monkeypatch.setattr(dispatch, "_variables", None)
    assert (dispatch.check_backend(None), dispatch.usual_backend()) == ("auto", "auto")
    monkeypatch.setenv(dispatch.ENV_VARIABLE, "torch")
    assert (dispatch.check_backend(None), dispatch.usual_backend()) == ("torch", "torch")
    assert dispatch.check_backend("triton") == "triton"
    monkeypatch.setenv(dispatch.ENV_VARIABLE, "cuda")
    assert dispatch.usual_backend() == "auto"
    for backend, text in ((None, "SCALER_TRITON_BACKEND .* got 'cuda'"), ("numpy", "backend .* got 'numpy'")):
        name, _, got = text.partition(" .* ")
        with pytest.raises(ValueError, match=rf"^{name} must be one of auto, triton, torch, {got}$"):
            GradScaler("cpu", backend=backend)


# Captures and waits


def capturing(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "is_capturing", lambda: True)


def test_what_is_done_once_cannot_be_captured(monkeypatch: Any) -> None:
    dispatch.refuse_capture(GPU, "it")
    capturing(monkeypatch)
    dispatch.refuse_capture(CPU, "it")
    with pytest.raises(RuntimeError, match=r"^it cannot be captured in a graph: take one step like it before$"):
        dispatch.refuse_capture(GPU, "it")
    monkeypatch.setattr(trial, "unscaling", works)
    for requested in ("auto", "triton"):
        with pytest.raises(RuntimeError, match="^the first step with float32 on cuda:0 cannot be captured"):
            dispatch.choose(GPU, FP32, requested)
    assert dispatch._chosen == {}


def test_only_a_gpus_tensors_are_captured(monkeypatch: Any) -> None:
    on_gpu: Any = mock.Mock(is_cuda=True)
    capturing(monkeypatch)
    assert (dispatch.is_captured(on_gpu), dispatch.is_captured(torch.ones(1))) == (True, False)
    monkeypatch.setattr(dispatch, "is_capturing", lambda: False)
    assert not dispatch.is_captured(on_gpu)


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_that_is_made_once_is_not_reported(fails: bool, monkeypatch: Any) -> None:
    modes = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with dispatch.sync_allowed(CPU):
        assert modes == []
    with suppress(ZeroDivisionError), dispatch.sync_allowed(GPU):
        assert modes == [0]
        if fails:
            raise ZeroDivisionError
    assert modes == [0, 2]


def test_a_package_with_a_like_name_is_outside_this_one() -> None:
    scope: dict[str, Any] = {"__name__": "scaler_tritonlike"}
    exec("def level(of):\n    return of()", scope)
    assert scope["level"](dispatch.stacklevel) == 1

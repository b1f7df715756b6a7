"""What `info` says: versions, devices, what serves them and why."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import scaler_triton
from scaler_triton import cli
from scaler_triton.core import dispatch

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.ENV_VARIABLE, raising=False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, for those who only ask what it is, on which bf16 does not work."""

    def choose(device: torch.device, dtype: torch.dtype, requested: str) -> str:
        if device.type == "cuda" and dtype is torch.bfloat16:
            warnings.warn("Triton does not work", RuntimeWarning, stacklevel=2)
            if requested == "triton":
                raise RuntimeError("backend='triton' does not work") from ValueError("no bf16\nhere")
            return "torch"
        return "triton" if device.type == "cuda" else "torch"

    def reason_for(device: torch.device, dtype: torch.dtype, requested: str) -> str:
        return "asked for" if dtype is not torch.bfloat16 else "No C compiler.\n" + "x " * 1000

    facts = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    for name, answer in (("is_available", True), ("device_count", 1), ("get_device_properties", facts)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setattr(dispatch, "reason_for", reason_for)
    monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton", SimpleNamespace(__version__="3.0")))
    config = SimpleNamespace(describe=lambda device: ["unscale, 2 bytes: 8 x 2 x 2, the default"])
    monkeypatch.setitem(sys.modules, "scaler_triton.kernels.config", config)


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["info"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("the driver is too old", UserWarning, 2))
    text = shown(capsys)
    assert f"scaler_triton {scaler_triton.__version__}\n" in text
    assert "backend       auto (SCALER_TRITON_BACKEND is not set)\n" in text
    assert "\nNo GPU here. torch says: the driver is too old\n" in text
    assert text.endswith("\ncpu\n  float16, bfloat16, float32, float64: torch (Triton is chosen for CUDA only)\n")
    monkeypatch.setenv("SCALER_TRITON_BACKEND", "torch")
    assert ": torch (asked for)\n" in shown(capsys)
    monkeypatch.setenv("SCALER_TRITON_BACKEND", "tritn")
    assert cli.main(["info"]) == 2
    assert "SCALER_TRITON_BACKEND must be one of auto, triton, torch, got 'tritn'\n" in capsys.readouterr().err


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)  # pytest makes errors of warnings
    assert "\n1 GPU, driver " in text
    assert "\ncuda:0: Some GPU, capability 9.0, 80.0 GiB\n  float16, float32, float64: triton (asked for)\n" in text
    assert "\n  bfloat16: torch (No C compiler. x x" in text
    assert max(map(len, text.splitlines())) < 250
    assert text.endswith("\n  launch configurations\n    unscale, 2 bytes: 8 x 2 x 2, the default\n")
    monkeypatch.setenv("SCALER_TRITON_BACKEND", "triton")
    text = shown(capsys)
    assert "\nbackend       triton (SCALER_TRITON_BACKEND)\n" in text
    assert "\n  bfloat16: none (ValueError: no bf16 here)\n" in text


def test_without_triton_it_still_answers() -> None:
    program = "import sys; sys.modules['triton'] = None; from scaler_triton import cli; sys.exit(cli.main(['info']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "triton        none (ModuleNotFoundError: " in done.stdout
    assert ": torch's own ops are used\n" in done.stdout

"""What `info` says: versions, devices and what serves them, and where the launch configurations come from."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import scaler_triton
from scaler_triton import cli, dispatch, info
from scaler_triton.kernels import lookup, tuned_file
from scaler_triton.kernels.launch_config import LaunchConfig
from scaler_triton.kernels.tuned_file import Origin, TunedFile

ROOT = Path(__file__).parents[1]
GPU = torch.device("cuda", 0)
ORIGIN = Origin("Some GPU", "9.0", "3.7.1", "0123456789abcdef")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, nothing decided yet, nothing asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv("SCALER_TRITON_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    lookup.forget()


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, for those who only ask what it is."""
    facts = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(lookup, "origin_of", lambda device: ORIGIN)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, whatever there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["info"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = shown(capsys)
    assert f"scaler_triton {scaler_triton.__version__}\n" in text
    assert f"torch         {torch.__version__}\n" in text
    assert "backend       auto (SCALER_TRITON_BACKEND is not set)\n" in text
    assert "\nNo GPU here.\n" in text
    assert "\ncpu\n  float16, bfloat16, float32, float64: torch (Triton is chosen for CUDA only)\n" in text
    assert text.endswith(f"tuned files   {tmp_path}/scaler_triton/tuned (not there yet: `tune` makes it)\n")


@pytest.mark.parametrize(
    ("cuda", "hip", "said"),
    [("12.8", None, "12.8"), (None, "6.4", "ROCm 6.4"), (None, None, "none: this torch is built without it")],
)
def test_what_torch_is_built_with(monkeypatch: pytest.MonkeyPatch, cuda: str, hip: str, said: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert f"\nCUDA          {said}\n" in info.version_lines()


def test_it_says_if_triton_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert info.triton_version() == f"{triton.__version__}, which interprets: TRITON_INTERPRET is set"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert info.triton_version() == triton.__version__


def test_a_folder_that_is_there_needs_no_word(tmp_path: Path) -> None:
    (tmp_path / "scaler_triton" / "tuned").mkdir(parents=True)
    assert info.cache_line() == f"tuned files   {tmp_path}/scaler_triton/tuned"


def test_what_torch_says_of_a_missing_gpu_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("the driver is too old", UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert info.find_gpus() == ([], "No GPU here. torch says: the driver is too old")


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_on_which_triton_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from scaler_triton.kernels import probe

    def fail(device: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("Failed to find C compiler.\n" + "x " * 1000)

    monkeypatch.setattr(probe, "probe", fail)
    text = shown(capsys)  # pytest makes errors of warnings
    assert "\n1 GPU, driver " in text
    assert "\ncuda:0: Some GPU, capability 9.0, 80.0 GiB\n" in text
    assert "\n  float16, bfloat16, float32, float64: torch (RuntimeError: Failed to find C compiler. x x" in text
    assert max(map(len, text.splitlines())) < 250
    assert "\n    unscale, 2, 4, 8 bytes: 8 x 2 x 2, the default\n" in text


@pytest.mark.usefixtures("one_gpu")
def test_a_backend_that_was_asked_for_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scaler_triton.kernels import probe

    def fail(device: torch.device, dtype: torch.dtype) -> None:
        if dtype is torch.bfloat16:
            raise ValueError("no bf16 here")

    monkeypatch.setattr(probe, "probe", fail)
    monkeypatch.setenv("SCALER_TRITON_BACKEND", "triton")
    text = shown(capsys)
    assert "\nbackend       triton (SCALER_TRITON_BACKEND)\n" in text
    assert "\n  float16, float32, float64: triton (triton, and a trial run was right)\n" in text
    assert "\n  bfloat16: none (ValueError: no bf16 here)\n" in text


@pytest.mark.usefixtures("no_gpu")
def test_torch_if_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SCALER_TRITON_BACKEND", "torch")
    assert ": torch (asked for)\n" in shown(capsys)


def test_an_unknown_backend_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SCALER_TRITON_BACKEND", "tritn")
    assert cli.main(["info"]) == 2
    assert "SCALER_TRITON_BACKEND must be one of auto, triton, torch, got 'tritn'\n" in capsys.readouterr().err


@pytest.mark.usefixtures("one_gpu")
def test_the_tuned_file_in_use_is_named() -> None:
    path = lookup.user_file(ORIGIN)
    assert path is not None
    path.parent.mkdir(parents=True)
    tuned_file.write(path, TunedFile(ORIGIN, {("check", size): LaunchConfig(16, 1, 2) for size in (2, 8)}))
    assert info.config_lines(GPU)[1:] == [
        "    unscale, 2, 4, 8 bytes: 8 x 2 x 2, the default",
        f"    check, 2, 8 bytes: 16 x 1 x 2, from {path}",
        "    check, 4 bytes: 8 x 2 x 2, the default",
    ]


@pytest.mark.usefixtures("one_gpu")
def test_files_of_another_triton_are_counted() -> None:
    other = lookup.user_file(Origin(ORIGIN.device, ORIGIN.capability, "3.6.0", ORIGIN.kernels))
    assert other is not None
    other.parent.mkdir(parents=True)
    assert "another Triton" not in "".join(info.config_lines(GPU))
    tuned_file.write(other, TunedFile(ORIGIN, {}))
    assert "another Triton or other kernels" in info.config_lines(GPU)[-1]


def test_without_triton_it_still_answers() -> None:
    program = "import sys; sys.modules['triton'] = None; from scaler_triton import cli; sys.exit(cli.main(['info']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "triton        none (ModuleNotFoundError: " in done.stdout
    assert ": torch's own ops are used\n" in done.stdout

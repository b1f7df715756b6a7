"""No C compiler, a cache that cannot be written or is shared: a warning with the cause, and the right numbers."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sgd, started

from scaler_triton import GradScaler, dispatch
from scaler_triton.kernels import probe as probe_module

pytestmark = pytest.mark.usefixtures("undecided")

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
# What Triton compiles with the machine's compiler before its first launch on a GPU, much shortened.
SOURCE = "#include <Python.h>\nPyMODINIT_FUNC PyInit_{name}(void) {{ return NULL; }}\n"


@contextmanager
def no_compiler(monkeypatch: Any, folder: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    yield


@contextmanager
def file_for_a_cache(monkeypatch: Any, folder: Path) -> Iterator[None]:
    (folder / "cache").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    yield


@contextmanager
def read_only_cache(monkeypatch: Any, folder: Path) -> Iterator[None]:
    # The superuser may write wherever the file system lets him: nobody can make a folder here.
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/cache")
    yield


@contextmanager
def full_cache(monkeypatch: Any, folder: Path) -> Iterator[None]:
    """No file can grow, as on a full disk; Python has the signal of that limit ignored."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


TROUBLES: list[tuple[Callable[..., Any], str]] = [
    (no_compiler, r"RuntimeError: Failed to find C compiler"),
    (file_for_a_cache, r"(NotADirectoryError|FileExistsError): "),
    (read_only_cache, r"(FileNotFoundError|PermissionError|OSError): "),
    (full_cache, r"(OSError: .*too large|CalledProcessError: )"),
]
EACH_TROUBLE = pytest.mark.parametrize(("trouble", "cause"), TROUBLES, ids=lambda value: getattr(value, "__name__", ""))


def really_compile(device: torch.device, dtype: torch.dtype) -> None:
    """Stand for the probe on a GPU: go through Triton's own build and cache."""
    from triton.runtime.build import compile_module_from_src

    compile_module_from_src(src=SOURCE.format(name="fault"), name="fault")


@EACH_TROUBLE
def test_auto_falls_back_and_tells_why(trouble: Any, cause: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(probe_module, "probe", really_compile)
    with (
        trouble(monkeypatch, tmp_path),
        pytest.warns(RuntimeWarning, match=rf"Triton does not work for float32 on cuda:0.*\({cause}") as caught,
    ):
        chosen = [dispatch.choose(DEVICE, dtype, "auto") for dtype in (torch.float32, torch.float16, torch.float32)]
    assert chosen == ["torch"] * 3
    assert len(caught) == 1


@EACH_TROUBLE
def test_triton_asked_for_raises_and_works_once_the_trouble_is_over(
    trouble: Any, cause: str, monkeypatch: Any, tmp_path: Path
) -> None:
    optimizer = sgd([torch.tensor([4.0])])
    parameter = optimizer.param_groups[0]["params"][0]
    scaler = started(GradScaler, "cpu", backend="triton", init_scale=4.0)
    with monkeypatch.context() as patch:
        patch.setattr(probe_module, "probe", really_compile)
        with trouble(patch, tmp_path), pytest.raises(RuntimeError, match=rf"backend='triton' .* float32 .*: {cause}"):
            scaler.step(optimizer)
    assert parameter.grad.item() == 4.0
    assert parameter.item() == 0.0
    if not torch.cuda.is_available():  # else the kernels are not interpreted, and the CPU has none
        scaler.step(optimizer)
        assert parameter.item() == -0.5


TRAIN = """
import json, sys, warnings
import torch
from scaler_triton import GradScaler, dispatch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    parameter = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cuda", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
chosen = sorted({backend for backend, _ in dispatch._chosen.values()})
warned = [str(w.message) for w in caught if "Triton does not work" in str(w.message)]
print(json.dumps([parameter.detach().unique().tolist(), chosen, warned]))
"""


def start(**environment: str) -> subprocess.Popen[str]:
    """Start a program that trains one step on the GPU, in an environment of its own."""
    variables = {k: v for k, v in os.environ.items() if k not in ("CC", "TRITON_INTERPRET")} | environment
    command = [sys.executable, "-c", TRAIN]
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> list[Any]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    result: list[Any] = json.loads(output)
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("trouble", ["no compiler", "a file", "read-only"])
def test_a_step_on_a_gpu_with_trouble(trouble: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {
        "no compiler": {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        "a file": {"TRITON_CACHE_DIR": str(tmp_path / "file")},
        "read-only": {"TRITON_CACHE_DIR": "/proc/cache"},
    }[trouble]
    values, chosen, warned = finished(start(**environment))
    assert values == [-1.0]
    assert (chosen, len(warned)) == (["torch"], 1)


@pytest.mark.gpu
def test_processes_that_compile_into_one_cache(tmp_path: Path) -> None:
    processes = [start(TRITON_CACHE_DIR=str(tmp_path / "cache")) for _ in range(4)]
    assert [finished(process) for process in processes] == [[[-1.0], ["triton"], []]] * 4
    assert finished(start(TRITON_CACHE_DIR=str(tmp_path / "cache"))) == [[-1.0], ["triton"], []]

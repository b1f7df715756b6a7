"""Real builds of Triton's driver and our kernels, for a GPU that is not there: in trouble, and many into one cache."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perf import stub_driver

pytestmark = [
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the stub driver is for Linux on x86-64"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub driver is compiled with gcc"),
]

ROOT = Path(__file__).parents[2]
TROUBLES = {
    "no_compiler": "RuntimeError: Failed to find C compiler",
    "file_for_a_cache": "NotADirectoryError: ",
    "full_disk": "OSError: [Errno 27] File too large",
}
RANKS = 4
KERNELS = 3  # that the trial compiles until a result is wrong
LAUNCHED = "RuntimeError: the Triton kernel for unscale of torch.float32 runs on cpu but gives"


def started(folder: Path, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a process and wait until it only waits to be told to go."""
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    environment |= stub_driver.environment(folder)
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/faults/trial_on_stub.py"), *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def finished(processes: list[subprocess.Popen[str]]) -> list[Any]:
    """Let them go at once, and return what each printed."""
    assert [process.stdout and process.stdout.readline() for process in processes] == ["ready\n"] * len(processes)
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output) for output in outputs]


@pytest.fixture(scope="module")
def in_trouble(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trouble")
    results = finished([started(folder, folder / trouble, trouble, "triton", "auto") for trouble in TROUBLES])
    return dict(zip(TROUBLES, results, strict=True))


def refused(step: dict[str, Any], cause: str) -> bool:
    """Tell whether a step that "triton" was asked for raised for this cause, and had written nothing."""
    untouched = (step["gradients"], step["parameters"], step["warned"]) == ([8.0], [0.0], [])
    return untouched and step["error"].startswith(f"backend='triton' does not work for float32 on cpu: {cause}")


@pytest.mark.parametrize(("trouble", "cause"), TROUBLES.items())
def test_triton_raises_before_any_write_until_the_trouble_is_over(
    trouble: str, cause: str, in_trouble: dict[str, Any]
) -> None:
    before, _, afterwards = in_trouble[trouble]
    assert refused(before, cause)
    assert refused(afterwards, LAUNCHED)


@pytest.mark.parametrize(("trouble", "cause"), TROUBLES.items())
def test_auto_warns_once_of_the_cause_and_torch_takes_the_step(
    trouble: str, cause: str, in_trouble: dict[str, Any]
) -> None:
    _, step, _ = in_trouble[trouble]
    (warning,) = step["warned"]
    assert warning.startswith("Triton does not work for float32 on cpu, so torch's own ops are used there (" + cause)
    assert (step["gradients"], step["parameters"], step["error"]) == ([2.0], [-2.0], "")


def test_ranks_compile_into_one_cache_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    stub_driver.build(tmp_path)
    results = finished([started(tmp_path, cache, "nullcontext") for _ in range(RANKS)])
    assert all(refused(step, LAUNCHED) for (step,) in results)
    assert len(list(cache.rglob("*.cubin"))) == KERNELS
    assert not [path for path in cache.rglob("tmp.*") if any(path.iterdir())]

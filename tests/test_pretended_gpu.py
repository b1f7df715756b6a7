"""The tests marked `gpu` without one: see `pretended_gpu`. A real one also shows how fast, and streams at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pretended_gpu
import pytest
import torch

HERE = Path(__file__).parent
# Timed for minutes where a launch takes milliseconds; and Inductor's own kernels, of which the simulator knows little.
LEFT_OUT = ["tests/test_tune.py", "tests/kernels/test_sweep.py", "tests/frameworks/test_compile_inductor.py"]
ALL = os.environ.get("PRETEND") == "all"
LONG = [] if ALL else ["tests/demo", "tests/frameworks", "tests/soak", "tests/faults/test_compilation.py"]
LEAST = 120 if ALL else 80  # tests

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for a real GPU"),
    pytest.mark.skipif(
        shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
        reason="needs g++ and Python's headers",
    ),
]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a process that has the GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return kept | pretended_gpu.environment(tmp_path_factory.mktemp("pretended_gpu"))


def run(gpu: dict[str, str], *command: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=gpu, cwd=HERE.parent, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_it_is_as_strict_as_a_gpu(gpu: dict[str, str]) -> None:
    found = json.loads(run(gpu, "-W", "error", str(HERE / "pretended_gpu/properties.py"), timeout=60))
    waits, captures = "called a synchronizing CUDA operation", "CUDA error"
    assert found == {
        "device": "cuda:0",
        "garbage": pytest.approx(-2.87e-16, rel=0.01),
        "view shares memory": 4,
        "coalesced": [3.0],
        "mixing": "Expected all tensors to be on the same device",
        "with a number of the CPU": [2.0, 2.0, 2.0],
        "item": waits,
        "pageable copy": waits,
        "pinned copy": "",
        "blocking copy": waits,
        "synchronize": waits,
        "late": [0.0, 1.0],
        "overtaken": "pinned memory was written while the GPU had yet to copy it",
        "replayed": [1.0, 1.0, 3.0, 15.0],
        "item in a capture": captures,
        "seen": ["aten::mul", "Memcpy DtoH"],
    }


def test_what_needs_a_gpu_passes_on_it(gpu: dict[str, str]) -> None:
    left_out = [f"--ignore={name}" for name in LEFT_OUT + LONG]
    options = ["-x", "-m", "gpu", "-k", "not 20000", "-q", "-p", "no:cacheprovider", *left_out]
    said = run(gpu, "-m", "pytest", *options, timeout=900)
    assert int(re.search(r"(\d+) passed", said)[1]) >= LEAST

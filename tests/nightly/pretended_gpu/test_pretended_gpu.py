"""The tests that need a GPU, those of every place and those of ranks, without one: see `pretended_gpu`.

A real GPU also shows how fast, and streams at once.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import pretended_gpu
from perf.__main__ import QUESTIONS

ROOT = Path(__file__).parents[3]
TESTS = ["tests/unit", "tests/parity", "tests/gpu", "tests/nightly/faults"]
# Timed for minutes where a launch takes milliseconds; and Inductor's own kernels, of which the simulator knows little.
LEFT_OUT = ["tests/unit/cli/test_tune.py", "tests/parity/test_compile_inductor.py"]
# This GPU has no CSR tensors, serves no backend behind torch's back, is too slow for the demo, and in torch's own
# PowerSGD hook some buffers lie on the CPU.
NOT_OF_RANKS = "not csr and not keeps_no_list and not demo and not compression and not hook_that_keeps"
ONE, TWO = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "0,1"}

CAN_BUILD = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()
pytestmark = [pytest.mark.host_only, pytest.mark.skipif(not CAN_BUILD, reason="needs g++ and Python's headers")]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a process that has the GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return kept | pretended_gpu.environment(tmp_path_factory.mktemp("pretended_gpu"))


def run(gpu: dict[str, str], *command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    done = subprocess.run(words, env=gpu, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done


def passed(gpu: dict[str, str], *options: str) -> int:
    """Run tests that all have to pass; return how many there were."""
    spread = ["--numprocesses=2", "--dist=loadfile"] if find_spec("xdist") else []
    left_out = [f"--ignore={name}" for name in LEFT_OUT]
    said = run(gpu, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, *left_out, *options, timeout=1800)
    return int(re.search(r"(\d+) passed", said.stdout)[1])


def test_what_needs_a_gpu_passes_on_it(gpu: dict[str, str]) -> None:
    assert passed(gpu | ONE, "-m", "gpu", *TESTS) >= 100


def test_what_runs_on_every_device_passes_on_it(gpu: dict[str, str]) -> None:
    assert passed(gpu | ONE, "-m", "not gpu", "-k", "cuda-", *TESTS) >= 500


def test_what_needs_two_gpus_passes_on_two(gpu: dict[str, str]) -> None:
    which = "two_gpus or its_tensors_device or over_all_devices"
    assert passed(gpu | TWO, "-k", which, "tests/gpu", "tests/unit/kernels") >= 25


@pytest.mark.parametrize("gpus", [TWO, ONE], ids=lambda gpus: gpus["CUDA_VISIBLE_DEVICES"])
def test_ranks_agree_on_it(gpu: dict[str, str], gpus: dict[str, str]) -> None:
    assert passed(gpu | gpus | {"RANKS_ON": "cuda"}, "-k", NOT_OF_RANKS, "tests/ranks") >= 600


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch's own RMSNorm of a GPU has none of the CPU's")
def test_perf_measures_all_of_it(gpu: dict[str, str], tmp_path: Path) -> None:
    said = run(gpu | ONE, "-m", "perf", "--quick", "--out", str(tmp_path), timeout=1200)
    assert not re.findall("^(?:left out|FAILED).*", said.stdout, re.MULTILINE)
    assert {path.stem for path in tmp_path.glob("pretended-h100/*")} == QUESTIONS.keys()

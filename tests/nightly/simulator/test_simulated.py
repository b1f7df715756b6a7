"""The kernel tests once more, without a GPU, on what Triton compiles for one: see `ptx_simulator`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# The oldest, whose PTX has least, and what most tuning is for; `make simulate` takes all of them.
TARGETS = os.environ.get("SIMULATE", "sm_70 sm_90").split()
ROOT = HERE.parents[2]
CASES = ROOT / "tests" / "unit" / "kernels"
NAMES = "table", "unscale", "norm", "clip", "measure", "update_scale", "spike"
SUITE = [HERE / "test_traffic.py", *(CASES / f"test_{name}.py" for name in NAMES)]
LEAST = 300  # tests in it

NATIVELY = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run natively")
pytestmark = [pytest.mark.host_only, NATIVELY]


def start(target, folder):
    variables = {"SCALER_TRITON_SIMULATE": target, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "triton")}
    paths = [HERE, CASES, ROOT, os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, paths)))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "simulated_launches"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen([*command, *map(str, SUITE)], cwd=ROOT, env=os.environ | variables, stdout=log)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By target, its process and what it says; all at once, as there are cores for two."""
    folders = {target: tmp_path_factory.mktemp(target) for target in TARGETS}
    started = {target: (start(target, folder), folder / "log") for target, folder in folders.items()}
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_kernels_pass_the_kernel_tests(runs, target):
    process, log = runs[target]
    status = process.wait(timeout=200 * len(runs))  # they may share one core
    said = log.read_text()
    assert status == 0, said[-5000:]
    assert int(re.search(r"(\d+) passed", said)[1]) >= LEAST

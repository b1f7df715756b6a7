"""The kernel tests once more, without a GPU, on what Triton compiles for one: see `ptx_simulator`."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

# The oldest, whose PTX has least, and what most tuning is for; `make simulate` takes all of them.
TARGETS = os.environ.get("SIMULATE", "sm_70 sm_90").split()
CASES = Path(__file__).parents[2] / "unit/kernels"
NAMES = "table", "chunks", "unscale", "norm", "clip", "measure", "update_scale", "spike"
SUITE = ["test_traffic.py", *(str(CASES / f"test_{name}.py") for name in NAMES)]
LEAST = 300  # tests in it

NATIVELY = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels run natively")
pytestmark = [pytest.mark.host_only, NATIVELY]


@pytest.fixture(scope="module")
def runs(run_compiled):
    """By target, what its tests say; two at once."""
    command = "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "simulated_launches", *SUITE
    with ThreadPoolExecutor(2) as pool:
        yield {target: pool.submit(run_compiled, *command, SCALER_TRITON_SIMULATE=target) for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_kernels_pass_the_kernel_tests(runs, target):
    assert int(re.search(r"(\d+) passed", runs[target].result())[1]) >= LEAST

"""No C compiler, a cache that cannot be written, a full disk, many processes into one cache; on a GPU.

With "auto" a warning names the cause and torch takes the step; "triton" raises, and nothing has been written.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
# Steps in trouble, by the backends that are given, and one with "triton" after it; of each: what was raised and warned,
# and what gradients and parameters are then.
STEPS = """
import json, os, resource, sys, warnings
import torch
from scaler_triton import GradScaler

def step(backend):
    parameter = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    parameter.grad, error = torch.full_like(parameter, 8.0), ""
    scaler = GradScaler("cuda", init_scale=4.0, backend=backend)
    scaler.scale(torch.ones((), device="cuda"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scaler.step(torch.optim.SGD([parameter], lr=1.0))
        except RuntimeError as raised:
            error = str(raised)
    warned = [str(each.message) for each in caught if "Triton does not work" in str(each.message)]
    return [error, warned, parameter.grad.unique().tolist(), parameter.unique().tolist()]

before = dict(os.environ)
os.environ.update(json.loads(sys.argv[1]))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
if "full" in sys.argv:  # no file can grow beyond a block, so that some of what is compiled is kept
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
steps = [step(backend) for backend in sys.argv[2].split()]
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
os.environ.update(before)
print(json.dumps([*steps, step("triton")]))
"""
RIGHT = ["", [], [2.0], [-2.0]]
TROUBLES = {
    "no compiler": ({"PATH": "/nowhere"}, "RuntimeError: Failed to find C compiler"),
    "a file for a cache": ({"TRITON_CACHE_DIR": __file__}, "(NotADirectoryError|FileExistsError): "),
    "read-only": ({"TRITON_CACHE_DIR": "/proc/cache"}, "(FileNotFoundError|PermissionError|OSError): "),
    "full": ({}, "(OSError: .*too large|CalledProcessError: )"),
}


def steps(folder: Path, variables: dict[str, str], backends: str, trouble: str = "") -> Any:
    """Return what the steps printed in a process with a cache in `folder`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    kept |= {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", STEPS, json.dumps(variables), backends, trouble]
    return json.loads(subprocess.check_output(command, cwd=ROOT, env=kept, text=True, timeout=300))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_kernel_that_cannot_be_compiled(trouble: str, tmp_path: Path) -> None:
    variables, cause = TROUBLES[trouble]
    refused, fallen_back, afterwards = steps(tmp_path, variables, "triton auto", trouble)
    assert refused[1:] == [[], [8.0], [0.0]]
    assert re.match(rf"backend='triton' does not work for float32 on cuda:0: (.*; )?{cause}", refused[0])
    (warning,) = fallen_back[1]
    assert warning.startswith("Triton does not work for float32 on cuda:0, so torch's own ops are used there (")
    assert [fallen_back[0], *fallen_back[2:]] == [RIGHT[0], *RIGHT[2:]]
    assert afterwards == RIGHT


def test_processes_that_compile_into_one_cache(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(steps, [tmp_path] * 4, [{}] * 4, ["auto"] * 4)) == [[RIGHT, RIGHT]] * 4
    assert steps(tmp_path, {}, "auto") == [RIGHT, RIGHT]
    left = [path for path in (tmp_path / "cache").rglob("tmp.*") if path.is_dir() and any(path.iterdir())]
    assert not left

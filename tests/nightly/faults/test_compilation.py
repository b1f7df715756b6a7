"""No C compiler, a cache that cannot be written, a full disk; on a GPU.

With "auto" a warning names the cause and torch takes the step; "triton" raises, and nothing has been written.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
# Two steps in trouble, one after it; of each: what was raised and warned, what gradients and parameters are then.
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
steps = [step("triton"), step("auto")]
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
os.environ.update(before)
print(json.dumps([*steps, step("triton")]))
"""
TROUBLES = {
    "no compiler": ({"PATH": "/nowhere"}, "RuntimeError: Failed to find C compiler"),
    "a file for a cache": ({"TRITON_CACHE_DIR": __file__}, "(NotADirectoryError|FileExistsError): "),
    "read-only": ({"TRITON_CACHE_DIR": "/proc/cache"}, "(FileNotFoundError|PermissionError|OSError): "),
    "full": ({}, "(OSError: .*too large|CalledProcessError: )"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_kernel_that_cannot_be_compiled(trouble: str, tmp_path: Path) -> None:
    variables, cause = TROUBLES[trouble]
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    kept |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", STEPS, json.dumps(variables), trouble]
    said = subprocess.check_output(command, cwd=ROOT, env=kept, text=True, timeout=300)
    refused, fallen_back, afterwards = json.loads(said)
    assert refused[1:] == [[], [8.0], [0.0]]
    assert re.match(rf"backend='triton' does not work for float32 on cuda:0: (.*; )?{cause}", refused[0])
    (warning,) = fallen_back[1]
    assert warning.startswith("Triton does not work for float32 on cuda:0, so torch's own ops are used there (")
    assert [fallen_back[0], *fallen_back[2:]] == ["", [2.0], [-2.0]]
    assert afterwards == ["", [], [2.0], [-2.0]]

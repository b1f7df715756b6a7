"""Frameworks that build the scaler themselves build ours after `patch_torch()`, and their own code steps with it.

Ultralytics, whose import needs OpenCV, is not among them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import STRICT

HERE = Path(__file__).parent

pytestmark = pytest.mark.heavy


def isolated(*arguments: str) -> str:
    """Run Python in a process of its own, where every warning is an error; return what it printed last."""
    command = [sys.executable, *STRICT, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("framework", "module"),
    [
        ("timm", "scaler_triton.grad_scaler"),
        ("MONAI", "scaler_triton.patching"),
        ("mmengine", "scaler_triton.patching"),
        ("mmengine for FSDP", "scaler_triton.sharded"),
        ("open_clip", "scaler_triton.grad_scaler"),
    ],
)
def test_its_scaler_is_ours_and_skips_only_the_step_that_overflows(framework: str, module: str) -> None:
    printed = json.loads(isolated(str(HERE / "patched_run.py"), framework))
    assert printed["module"] == module
    assert printed["steps"] == [[True, 2.0**16], [False, 2.0**15], [True, 2.0**15]]


IMPORTED_FIRST = """
import warnings
with warnings.catch_warnings(action="ignore"):
    import mmengine.optim, monai.engines
import scaler_triton
with warnings.catch_warnings(action="always", record=True) as caught:
    scaler_triton.patch_torch()
print(*[warning.message for warning in caught])
"""


def test_a_framework_that_took_torchs_class_before_is_named() -> None:
    """mmengine has; MONAI looks the class up when it builds one."""
    warned = isolated("-c", IMPORTED_FIRST)
    assert "mmengine.optim.optimizer.amp_optimizer_wrapper" in warned
    assert "monai" not in warned

"""What the tests with other packages share: their import, programs, and random runs in which some steps overflow."""

import importlib
import json
import os
import random
import subprocess
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

OPS = torch.library.Library("torchvision", "FRAGMENT")


def imported(module: str) -> Any:
    """Import a module of theirs, without its warnings; without it the test is left out, but with HEAVY=1 it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("HEAVY"):
            return importlib.import_module(module)
        return pytest.importorskip(module, reason=f"needs {module}: runs with make test-frameworks")


def make_importable() -> None:
    """Stand in for what Composer and others import and nothing here uses: a client, torchvision's operators."""
    sys.modules.setdefault("mcli", ModuleType("mcli"))
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # built for another torch
        for name in ("nms", "qnms"):
            OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def printed_by(*command: str, **variables: str) -> Any:
    """Run Python; return what it prints last, which is JSON."""
    options: Any = {"capture_output": True, "text": True, "timeout": 300, "env": os.environ | variables}
    done = subprocess.run([sys.executable, *command], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def trace(draw: random.Random, length: int = 60) -> list[bool]:
    """Return which steps overflow: few, some or many of them."""
    share = draw.choice([0.05, 0.2, 0.5])
    return [draw.random() < share for _ in range(length)]

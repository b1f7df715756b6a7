"""What the tests with other packages share: their import, random runs in which some steps overflow, torchvision."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
import warnings
from types import ModuleType

import pytest
import torch

PACKAGES = "runs with make test-frameworks, which installs packages.txt beside it"
OPS = torch.library.Library("torchvision", "FRAGMENT")


def imported(module: str) -> ModuleType:
    """Import a module of theirs, without its warnings.

    Without it the test is left out, but with HEAVY=1 it fails: `make test-frameworks` has installed it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("HEAVY"):
            return importlib.import_module(module)
        found: ModuleType = pytest.importorskip(module, reason=f"needs {module}: {PACKAGES}")
    return found


def make_importable() -> None:
    """Stand in for what Composer and others import and nothing here uses: torchvision's operators, a client."""
    if importlib.util.find_spec("mcli") is None:
        sys.modules.setdefault("mcli", ModuleType("mcli"))
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # built for another torch
        for name in ("nms", "qnms"):
            OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ModuleNotFoundError:
        pass


def trace(draw: random.Random, length: int = 60) -> list[bool]:
    """Return which steps overflow: few, some or many of them."""
    share = draw.choice([0.05, 0.2, 0.5])
    return [draw.random() < share for _ in range(length)]

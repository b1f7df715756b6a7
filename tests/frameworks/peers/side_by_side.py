"""Random runs in which some steps overflow, and scalers of others imported without what their packages warn of."""

from __future__ import annotations

import importlib
import os
import random
import warnings
from types import ModuleType

import pytest

PACKAGES = "runs with make test-frameworks, which installs packages.txt beside it"


def imported(module: str) -> ModuleType:
    """Import a module of theirs; what it would be faster with, it may say to others.

    Without it the test is left out, but with HEAVY=1 it fails: `make test-frameworks` has installed it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("HEAVY"):
            return importlib.import_module(module)
        found: ModuleType = pytest.importorskip(module, reason=f"needs {module}: {PACKAGES}")
    return found


def trace(draw: random.Random, length: int = 60) -> list[bool]:
    """Return which steps overflow: few, some or many of them."""
    share = draw.choice([0.05, 0.2, 0.5])
    return [draw.random() < share for _ in range(length)]

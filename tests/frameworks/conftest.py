"""Tests with the real packages; without them they are left out. HEAVY=1 adds those that take long."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Spawned ranks import the cases of this folder, and those of the ranks' own tests, by these paths.
for folder in (Path(__file__).parent, Path(__file__).parents[1] / "distributed"):
    sys.path.insert(0, str(folder))

# No test asks a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the heavy ones to `make test-frameworks`."""
    for item in items:
        if item.get_closest_marker("heavy") and not os.environ.get("HEAVY"):
            item.add_marker(pytest.mark.skip(reason="runs with make test-frameworks"))

"""The long soak is `make soak`; the default run takes the short one."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes minutes unless SOAK=1."""
    if os.environ.get("SOAK") != "1":
        for item in items:
            if "soak" in item.path.parts and item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: make soak"))

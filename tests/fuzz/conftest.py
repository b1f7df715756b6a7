"""Four ranks for the programs that need them, from the pools that all tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def pool(pools: Callable[[int], Any]) -> Any:
    """Four ranks of gloo."""
    return pools(4)

"""Four ranks for the programs that need them, from the pools of the session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_pool import RankPool


@pytest.fixture
def pool(pools: Callable[[int], RankPool]) -> RankPool:
    """Four ranks of gloo."""
    return pools(4)

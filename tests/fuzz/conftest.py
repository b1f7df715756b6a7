"""Four ranks for the programs that need them, from the pools of the session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scaler_triton.demo.ranks import RankPool

# Ranks import `rank_programs` and what it shares with the distributed tests: they start with this path.
# An Accelerator's programs share theirs with the frameworks' tests.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("fuzz", "distributed", "frameworks")]


@pytest.fixture
def pool(pools: Callable[[int], RankPool]) -> RankPool:
    """Four ranks of gloo."""
    return pools(4)

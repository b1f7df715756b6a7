"""Four ranks for the programs that need them, started once a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaler_triton.demo.ranks import RankPool

# Ranks import `rank_programs` and what it shares with the distributed tests: they start with this path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

GROUP_LIMIT = 10.0  # What one collective may take.


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks of gloo."""
    with RankPool(4, group_timeout=GROUP_LIMIT) as opened:
        yield opened

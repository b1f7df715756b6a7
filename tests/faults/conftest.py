"""Pools of ranks that these tests break: they share the cases of tests/distributed, not its pools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankPool

HERE = Path(__file__).parent
# The ranks import `fault_cases` and `cases` by these paths: a spawned process starts with its parent's sys.path.
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]

GROUP_LIMIT = 10.0  # Seconds; where a case fails on purpose it sets a shorter limit itself.


class StrictPool(RankPool):
    """Ranks in which a warning is an error."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[RankResult]:
        import cases

        return super().run(cases.strictly, fn, args, {}, timeout=timeout)


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], RankPool]]:
    """Pools by world size, started when first asked for, gone after the module."""
    opened: dict[int, RankPool] = {}
    yield lambda size: opened.setdefault(size, StrictPool(size, group_timeout=GROUP_LIMIT))
    for each in opened.values():
        each.close()

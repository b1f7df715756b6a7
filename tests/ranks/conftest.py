"""Two and four ranks for the tests in this folder, from the pools of the session."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool

from ranks import cases
from scaler_triton.core import dispatch

CASE_LIMIT = 30.0  # Seconds; a case takes milliseconds, and a hang is a failure.


class Ranks:
    """The pool of one world size: a case returns on every rank or the test fails."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool
        self.world_size = pool.world_size

    def run(self, case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run `case(rank, *args, **options)` with warnings as errors; return one value a rank."""
        results = self.pool.run(cases.strictly, case, args, options, timeout=CASE_LIMIT)
        failures = [f"rank {result.rank}: {result.traceback}" for result in results if not result.ok]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return [result.value for result in results]


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile the kernels before there are ranks, which would wait in a collective for one that compiles."""
    if torch.cuda.is_available():  # some ranks use it where the others stay on the CPU
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for task in ("measuring", "clipping", "guarding"):
                dispatch.choose(torch.device("cuda", 0), dtype, "auto", task=task)


@pytest.fixture
def two(pools: Callable[[int], RankPool]) -> Ranks:
    return Ranks(pools(2))


@pytest.fixture
def four(pools: Callable[[int], RankPool]) -> Ranks:
    return Ranks(pools(4))


@pytest.fixture(params=[2, 4], ids=["world2", "world4"])
def ranks(request: pytest.FixtureRequest, pools: Callable[[int], RankPool]) -> Ranks:
    """Two ranks, then four."""
    return Ranks(pools(request.param))

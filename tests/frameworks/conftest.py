"""Tests with the real packages; without them they are left out. HEAVY=1 adds those that take long.

With HEAVY=1 those of optimizers/, peers/ and notebook/, whose packages `make test-frameworks` installs, fail without
them.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rank_pool import RankPool

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # spawned ranks import the tests by this path
CASE_LIMIT = 60.0  # seconds, for a case that imports a framework on a busy machine

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub for anything


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the heavy ones to `make test-frameworks`; ignore what the frameworks warn of."""
    import jobs

    for item in items:
        if HERE in item.path.parents:
            for message, category in jobs.WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}:{category}"))
            if "two" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.distributed)
            if item.get_closest_marker("heavy") and not os.environ.get("HEAVY"):
                item.add_marker(pytest.mark.skip(reason="runs with make test-frameworks"))


@pytest.fixture(scope="session")
def _pool() -> Iterator[RankPool]:
    with RankPool(2, group_timeout=20.0) as pool:
        yield pool


@pytest.fixture
def two(_pool: RankPool) -> Callable[..., list[Any]]:
    """Run `case(rank, *args, **options)` on two ranks with warnings as errors; return one value a rank."""
    import jobs

    def run(case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        # The ranks start within: there may be fewer GPUs than ranks.
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
            results = _pool.run(jobs.strictly, case, args, options, timeout=CASE_LIMIT)
        failures = [f"rank {result.rank}: {result.traceback}" for result in results if not result.ok]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return [result.value for result in results]

    return run


@pytest.fixture
def first_accelerator() -> Iterator[None]:
    """Start a test without an Accelerator's state, and leave none."""
    from test_accelerate import forget

    forget()
    yield
    forget()

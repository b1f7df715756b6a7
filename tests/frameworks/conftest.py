"""Tests with the real packages; without them they are left out. HEAVY=1 adds those that take long.

With HEAVY=1 those of peers/, whose packages `make test-frameworks` installs, fail without them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from scaler_triton.demo.ranks import RankPool

# Spawned ranks import the cases of this folder, and those of the ranks' own tests, by these paths.
for folder in (Path(__file__).parent, Path(__file__).parents[1] / "distributed"):
    sys.path.insert(0, str(folder))

CASE_LIMIT = 60.0  # Seconds, for a case that imports a framework on a busy machine.

# No test asks a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the heavy ones to `make test-frameworks`."""
    for item in items:
        if item.get_closest_marker("heavy") and not os.environ.get("HEAVY"):
            item.add_marker(pytest.mark.skip(reason="runs with make test-frameworks"))


@pytest.fixture
def two(pools: Callable[..., RankPool]) -> Callable[..., list[Any]]:
    """Run `case(rank, *args, **options)` on two ranks with warnings as errors; return one value a rank."""
    import cases

    def run(case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        # The ranks start within: there may be fewer GPUs than ranks.
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
            results = pools(2, "frameworks").run(cases.strictly, case, args, options, timeout=CASE_LIMIT)
        failures = [f"rank {result.rank}: {result.traceback}" for result in results if not result.ok]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return [result.value for result in results]

    return run


@pytest.fixture
def first_accelerator() -> Iterator[None]:
    """Start a test without an Accelerator's state, and leave none."""
    import accelerate_cases

    accelerate_cases.forget()
    yield
    accelerate_cases.forget()


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def name(request: pytest.FixtureRequest) -> str:
    """Each of Lightning's namespaces that is installed."""
    import lightning_cases

    pytest.importorskip(lightning_cases.NAMESPACES[request.param][0])
    return request.param

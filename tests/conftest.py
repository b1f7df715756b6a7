"""Without a GPU the kernels run under Triton's interpreter, which must be asked for before they are imported."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from no_fp64 import WithoutFp64, applies
from rank_pool import RankPool

from scaler_triton.core import dispatch
from scaler_triton.core.ranks import Ranks

GROUP_LIMIT = 10.0  # Seconds one collective may take.
PLACES = os.environ.get("PLACES", "")
END = time.monotonic() + float(os.environ.get("TEST_SECONDS", "inf"))
# Not for a pytest that a test starts.
NEEDS_GPU = bool(os.environ.pop("NEEDS_GPU", ""))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """End at once where NEEDS_GPU asks for a GPU in vain: all tests would pass by being skipped."""
    if NEEDS_GPU and not torch.cuda.is_available():
        pytest.exit("NEEDS_GPU is set, but this process reaches no GPU", returncode=3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what needs a GPU, as time may run out; without one leave it out."""
    if PLACES == "mps":
        items[:] = [item for item in items if applies(item)]
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.get_closest_marker("gpu") is None)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Stop after the first test that ends beyond TEST_SECONDS: a tool around all of them can still sum up."""
    if time.monotonic() > END:
        item.session.shouldstop = "out of time, TEST_SECONDS are over"


@pytest.fixture(autouse=PLACES == "mps")
def without_fp64() -> Iterator[WithoutFp64]:
    """A device without fp64, "mps", which is pretended."""
    with WithoutFp64() as mode:
        yield mode


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[..., Any]]:
    """Pools of ranks by world size, started when first asked for."""
    opened: dict[int, RankPool] = {}
    yield lambda world_size: opened.setdefault(world_size, RankPool(world_size, group_timeout=GROUP_LIMIT))
    for each in opened.values():
        each.close()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two, of which the other is pretended: reductions change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def world() -> Iterator[Callable[[int, int], None]]:
    """Make this process one rank of several, of which the others are pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(size: int, rank: int = 0) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def reductions(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What this rank, one of two, reduces to a maximum or a sum."""
    seen: list[list[float]] = []
    monkeypatch.setattr(Ranks, "reduce_", lambda self, values, op: seen.append(values.tolist()))
    return seen


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which backend serves what, before and after the test."""
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.delenv(dispatch.ENV_VARIABLE, raising=False)

"""Without a GPU the kernels run under Triton's interpreter, which must be asked for before they are imported."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import in_shards
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from scaler_triton import dispatch

GROUP_LIMIT = 10.0  # Seconds one collective may take.
SECONDS = float(os.environ.get("TEST_SECONDS", "inf"))
GRACE = 10.0  # Seconds that the test which is running then may take.
# Not for a pytest that a test starts.
SHARD = os.environ.pop("SHARD", "")  # "1/7", from in_shards.py
NEEDS_GPU = bool(os.environ.pop("NEEDS_GPU", ""))
END = time.monotonic() + SECONDS
LAST = 5  # the turn of what uses no GPU

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what needs a GPU, as time may run out; without one leave it out, and begin with what takes long."""
    if SHARD:
        number, count = map(int, SHARD.split("/"))
        shards = shards_of(items, count)
        config.hook.pytest_deselected(items=[item for item in items if shards[item] != number])
        items[:] = [item for item in items if shards[item] == number]
    if torch.cuda.is_available():
        items.sort(key=turn)
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # whole files: begun last, one keeps the other processes idle


def shards_of(items: list[pytest.Item], count: int) -> dict[pytest.Item, int]:
    """Return each test's shard: the first ones for what uses a GPU, then those for processes that do and for the rest.

    Files stay whole, but for tests with and without the GPU.
    """
    own, first = in_shards.by_itself(count), in_shards.on_gpu(count)
    alone, starting, rest = (
        [item for item in items if turn(item) in turns] for turns in ((0, 1), range(2, LAST), (LAST,))
    )
    processes = range(min(own, first - 1), first)
    return _spread(alone, range(own)) | _spread(starting, processes) | _spread(rest, range(first, count))


def _spread(items: list[pytest.Item], shards: range) -> dict[pytest.Item, int]:
    """Give each file to the shard that has least tests so far, the largest files first."""
    load = dict.fromkeys(shards, 0)
    found: dict[Path, int] = {}
    for path, tests in Counter(item.path for item in items).most_common():
        found[path] = shard = min(shards, key=load.__getitem__)
        load[shard] += tests
    return {item: found[item.path] for item in items}


def pytest_configure() -> None:
    """Interrupt a test that runs for long beyond TEST_SECONDS: whoever would end the process loses the report.

    And end at once where NEEDS_GPU asks for a GPU in vain: all tests would pass by being skipped.
    """
    if NEEDS_GPU and not torch.cuda.is_available():
        pytest.exit("NEEDS_GPU is set, but this process reaches no GPU", returncode=3)
    if not math.isinf(SECONDS):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, max(SECONDS + GRACE, 1e-3))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Stop after the first test that ends beyond TEST_SECONDS: a tool around all of them can still sum up."""
    if time.monotonic() > END:
        item.session.shouldstop = "out of time, TEST_SECONDS are over"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Let the report be written, and the process end, however long that takes."""
    if not math.isinf(SECONDS):
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(*args: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one, from around the process, would hit the report
    raise KeyboardInterrupt("out of time, TEST_SECONDS are over")


def turn(item: pytest.Item) -> int:
    """Return when a test's turn comes on a GPU machine: what runs there alone first, and of that late what may hang."""
    folders, only_there = item.path.parts, item.get_closest_marker("gpu")
    if not only_there and not _uses_gpu(item):
        return LAST
    if only_there and item.get_closest_marker("distributed"):
        return 4 if "demo" in folders else 3
    if "frameworks" in folders:
        return 2
    return 0 if only_there else 1


def _uses_gpu(item: pytest.Item) -> bool:
    """Tell whether a test that runs without a GPU, too, uses one where there is one."""
    if item.get_closest_marker("distributed") and os.environ.get("RANKS_ON") == "cuda":
        return True
    if item.get_closest_marker("native") or _is_placed_on_gpu(item):
        return True
    return "kernels" in item.path.parts and not item.get_closest_marker("host_only")


def _is_placed_on_gpu(item: pytest.Item) -> bool:
    """Tell whether a test that runs on every device of a machine is about to run on its GPU."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return getattr(params.get("place"), "device", "") == "cuda"


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[..., RankPool]]:
    """Pools by world size and by what their ranks are for, started when first asked for."""
    opened: dict[tuple[int, str], RankPool] = {}

    def pool(world_size: int, purpose: str = "") -> RankPool:
        return opened.setdefault((world_size, purpose), RankPool(world_size, group_timeout=GROUP_LIMIT))

    yield pool
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
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which backend serves what, before and after the test."""
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.delenv(dispatch.ENV_VARIABLE, raising=False)

"""The pool of ranks: it answers in order, tells errors, never hangs, and recovers from what breaks it."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, RankTimeout
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import cases
from ranks.cases import CollectiveCounter

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own: these tests break it on purpose."""
    with RankPool(2, group_timeout=3.0) as opened:
        yield opened


def process(rank: int) -> tuple[int, float]:
    """Which process this is, and what it draws."""
    return os.getpid(), torch.rand(()).item()


def break_on(rank: int, bad_rank: int, how: str) -> int:
    """Have one rank fail, perhaps with the others waiting for it."""
    if rank == bad_rank and how == "raises":
        raise KeyError("lost")
    if rank == bad_rank and how == "dies":
        os._exit(3)
    if rank == bad_rank and how == "hangs":
        time.sleep(60)
    if rank == bad_rank and how == "leaves open":
        dist.all_reduce(torch.ones(1), async_op=True)
    if how in ("dies", "hangs"):
        dist.all_reduce(torch.ones(1))
    return rank


def test_ranks_are_reused_and_reseeded(pool):
    first, second = ([result.value for result in pool.run(process)] for _ in range(2))
    assert first == second
    assert len({os.getpid(), *(pid for pid, _ in first)}) == 3
    assert first[0][1] == first[1][1]


@pytest.mark.parametrize(
    ("how", "error"),
    [("raises", "KeyError: 'lost'"), ("dies", "RankDied: exit code 3"), ("leaves open", "OutOfStep: ")],
)
def test_a_broken_rank_is_told_and_all_are_replaced(pool, how, error):
    before = {result.value[0] for result in pool.run(process)}
    good, bad = pool.run(break_on, 1, how)
    assert error in (bad.error or good.error)
    assert good.ok == (how == "raises")
    assert not before & {result.value[0] for result in pool.run(process)}


def test_a_hang_ends_in_time_and_says_where(pool):
    pool.run(process)
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="break_on") as caught:
        pool.run(break_on, 1, "hangs", timeout=1.0)
    assert time.monotonic() - start < 3.0
    assert caught.value.results[1].error == "RankTimeout: no answer within 1.0 s"


def count_kinds(rank: int) -> list[list[str]]:
    """A plain collective, one within a DTensor (functional), and none."""
    sharded = distribute_tensor(torch.ones(4), cases.line(), [Shard(0)])
    with CollectiveCounter() as plain:
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    with CollectiveCounter() as functional:
        sharded.sum().full_tensor()
    with CollectiveCounter() as none:
        sharded.to_local().sum()
    return [plain.calls, functional.calls, none.calls]


def test_the_counter_sees_plain_and_functional_collectives(two):
    assert two.run(count_kinds) == [[["c10d::allreduce_"], ["_c10d_functional::all_reduce"], []]] * 2

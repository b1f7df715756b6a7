"""The pool of ranks: it answers in order, tells errors, never hangs, and recovers from what breaks it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

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


def describe(rank: int) -> tuple[Any, ...]:
    """Say who and where this rank is, and what it draws."""
    return os.getpid(), (rank, dist.get_rank(), dist.get_world_size()), torch.rand(2).tolist()


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


def test_ranks_answer_in_order_in_one_group_and_are_reused_and_reseeded(pool):
    first, second = ([result.value for result in pool.run(describe)] for _ in range(2))
    assert first == second
    pids, places, drawn = zip(*first, strict=True)
    assert len({*pids, os.getpid()}) == 3
    assert places == ((0, 0, 2), (1, 1, 2))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("how", "error"),
    [("raises", "KeyError: 'lost'"), ("dies", "RankDied: exit code 3"), ("leaves open", "OutOfStep: ")],
)
def test_a_broken_rank_is_told_and_all_are_replaced(pool, how, error):
    before = {result.value[0] for result in pool.run(describe)}
    good, bad = pool.run(break_on, 1, how)
    assert error in (bad.error or good.error)
    assert good.ok == (how == "raises")
    assert not before & {result.value[0] for result in pool.run(describe)}


def test_a_hang_ends_in_time_and_says_where(pool):
    pool.run(describe)
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="break_on") as caught:
        pool.run(break_on, 1, "hangs", timeout=1.0)
    assert time.monotonic() - start < 3.0
    assert caught.value.results[1].error == "RankTimeout: no answer within 1.0 s"


def count_kinds(rank: int) -> list[list[str]]:
    """A plain collective, one within a DTensor (functional), and none."""
    sharded = distribute_tensor(torch.ones(4), cases.line(), [Shard(0)])
    calls = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
        lambda: sharded.sum().full_tensor(),
        lambda: sharded.to_local().sum(),
    ):
        with CollectiveCounter() as counter:
            call()
        calls.append(counter.calls)
    return calls


def test_the_counter_sees_plain_and_functional_collectives(two):
    assert two.run(count_kinds) == [[["c10d::allreduce_"], ["_c10d_functional::all_reduce"], []]] * 2

"""Measuring over ranks: every rank knows the largest gradient of all, in the collective that the check makes anyway."""

import math
from typing import Any

import pytest
import torch

from ranks import cases
from ranks.cases import new_scaler, plain_param

pytestmark = pytest.mark.distributed

BITS = 2
HOWS = pytest.mark.parametrize("how", ["step", "fused", "unscale_", "clip", "clip together"])


def trained(rank: int, kind: str, how: str, sizes: list[list[float]], bad: int = -1, **options: Any) -> Any:
    """Give each rank gradients of its own; return scales, collectives and headroom after each step."""
    scaler = new_scaler(kind, scale_policy="headroom", headroom_bits=BITS, **options)
    params = [plain_param(4) for _ in range(2 if how == "clip together" else 1)]
    optimizers = [cases.new_optimizer("adamw-fused" if how == "fused" else "sgd", [param]) for param in params]
    seen = []
    for number, of_ranks in enumerate(sizes):
        scaler.scale(torch.ones(()))
        size = of_ranks[rank] * scaler.get_scale()
        for param in params:
            param.grad = torch.tensor([0.0, size, -size / 2, math.nan if (number, rank) == (bad, 1) else 2.0**-20])
        with cases.CollectiveCounter() as counter:
            if how.startswith("clip"):
                scaler.clip_grad_norm_(optimizers, 1.0)
            for optimizer in optimizers:
                if how == "unscale_":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
        headroom = scaler.headroom()
        assert scaler.was_skipped(optimizers[0]) == (number == bad)
        scaler.update()
        seen.append((scaler.get_scale(), counter.count, headroom))
    return seen


@HOWS
@pytest.mark.parametrize("kind", ["sharded", "world"])
def test_the_largest_of_all_ranks_sets_the_scale_of_each(ranks, kind, how):
    n = ranks.world_size
    sizes = [[2.0**-10] * n, [2.0**-9] * (n - 1) + [1.5 * 2.0**-4], [0.0] * n, [2.0**-12] * n]
    results = ranks.run(trained, kind, how, sizes, headroom_window=2)
    assert all(result == results[0] for result in results)
    scales, counts, headrooms = zip(*results[0], strict=True)
    assert scales == tuple(2.0 ** (15 - BITS + binade) for binade in (10, 4, 4, 12))
    assert counts == (1,) * 4
    several = 2 if how == "clip together" else 1
    assert [each.seen for each in headrooms] == [4 * n * several] * 4
    assert [each.zeros for each in headrooms] == [1 / 4, 1 / 4, 3 / 4, 1 / 4]
    largest = [2.0**-10, 2.0**-4, 2.0**-20 / scales[1], 2.0**-12]
    assert [each.largest for each in headrooms] == largest


@HOWS
def test_an_overflow_on_one_rank_lowers_the_cap_of_all(ranks, how):
    sizes = [[2.0**-10] * ranks.world_size] * 4
    results = ranks.run(trained, "sharded", how, sizes, bad=1)
    assert all(repr(result) == repr(results[0]) for result in results)
    high = 2.0 ** (15 - BITS + 10)
    # After two good updates the cap has doubled.
    assert [scale for scale, _, _ in results[0]] == [high, high / 2, high / 2, high]


def without_gradients(rank: int, how: str) -> Any:
    """Only rank 1 has gradients."""
    scaler, param = new_scaler("sharded", measure=True, init_scale=2.0), plain_param(4)
    optimizer = cases.new_optimizer("sgd", [param])
    scaler.scale(torch.ones(()))
    if rank == 1:
        param.grad = torch.tensor([8.0, 0.0, 2.0**-15, 1.0])
    if how == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    return scaler.headroom()


@pytest.mark.parametrize("how", ["step", "clip"])
def test_ranks_without_gradients_know_it_too(ranks, how):
    want = (4.0, math.log2(65504 / 8), 1 / 4, 1 / 4, 4)
    for found in ranks.run(without_gradients, how):
        assert (found.largest, found.bits, found.zeros, found.subnormal, found.seen) == want


def attempted(rank: int, name: str, good_below: float) -> Any:
    """Repeat a batch whose gradients overflow on rank 1 alone, unless the scale is small enough."""
    scaler, parameter, attempts = new_scaler("sharded"), plain_param(2), []
    optimizer, before = cases.new_optimizer(name, [parameter]), parameter.detach().clone()
    for attempt in scaler.attempts(optimizer, max_attempts=3):
        attempts.append(attempt)
        scaler.scale(torch.ones(()))
        overflows = rank == 1 and scaler.get_scale() >= good_below
        parameter.grad = torch.full((2,), math.inf if overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
    return attempts, scaler.get_scale(), torch.equal(parameter, before)


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_all_ranks_repeat_a_batch_or_none_does(ranks, name):
    start = cases.INIT_SCALE
    assert ranks.run(attempted, name, 2 * start) == [([1], start, False)] * ranks.world_size
    assert ranks.run(attempted, name, start / 2) == [([1, 2, 3], start / 4, False)] * ranks.world_size
    assert ranks.run(attempted, name, 0.0) == [([1, 2, 3], start / 8, True)] * ranks.world_size

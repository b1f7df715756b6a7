"""DTensor parameters in every layout: who must agree follows from the meshes, and costs one collective."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from ranks import cases
from ranks.cases import KINDS, LAYOUTS, UNSCALE, Fault, assert_agreed, laid_out, line, new_optimizer, new_scaler, placed

pytestmark = pytest.mark.distributed

FUSED = pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
LINES = [name for name in LAYOUTS if "line" in name]
SQUARES = [name for name in LAYOUTS if "line" not in name and name != "plain"]


@KINDS
# Fused SGD and Adagrad have no DTensor rule in torch itself.
@pytest.mark.parametrize(
    ("name", "unscale"), [("sgd", False), ("adamw", True), ("adamw-fused", False), ("adamw-fused", True)]
)
@pytest.mark.parametrize(
    ("world", "layout"), [*itertools.product(["two", "four"], LINES), *(("four", layout) for layout in SQUARES)]
)
def test_one_overflow_is_everybodys_in_every_layout(request, kind, world, layout, name, unscale):
    ranks = request.getfixturevalue(world)
    # An inf in the parameter that is sharded the most hits one rank alone.
    most = 0 if layout in ("line-replicated-last", "line-beside-plain") else -1
    fault = Fault(1, ranks.world_size - 1, most)
    assert_agreed(ranks.run(laid_out, kind, layout, name, [fault], unscale=unscale), [1])


# Which ranks the meshes name.


def on_meshes(rank: int, kind: str, what: str, name: str, faults: Sequence[Fault], unscale: bool = False) -> Any:
    """Parameters of one optimizer on a mesh that is not the world's, or on several."""
    scaler = new_scaler(kind)
    if what == "a slice":
        params = [cases.dtensor_param(cases.square()["tp"], [Shard(0)])]
    if what.startswith("the world beside a pair"):  # dense layers, and experts on a mesh that knows no larger one
        pairs = [cases.mesh((2,), ("pair",), order) for order in ((0, 2), (1, 3))]
        params = [cases.dtensor_param(on, [Shard(0)]) for on in (pairs[rank % 2], line())]
        params = params if rank % 2 == 0 or not what.endswith("on some") else params[1:]
    if what == "a part":  # the other ranks have no scaler at all
        pair = cases.mesh((1, 2), ("replica", "shard"), (0, 1))
        if rank > 1:
            return None
        params = [cases.dtensor_param(pair, [Replicate(), Shard(0)])]
    optimizer = new_optimizer(name, params)
    return cases.train(rank, scaler, optimizer, cases.giving(scaler, params), faults, unscale=unscale)


@FUSED
def test_one_1d_mesh_asks_its_own_group_only_unless_process_group_names_another(four, name):
    reports = four.run(on_meshes, "grad", "a slice", name, [Fault(1, 1)])
    assert_agreed(reports[:2], [1])
    assert_agreed(reports[2:], [])
    assert_agreed(four.run(on_meshes, "world", "a slice", name, [Fault(1, 1)]), [1])


@UNSCALE
@FUSED
@pytest.mark.parametrize("what", ["the world beside a pair", "the world beside a pair on some"])
def test_a_mesh_of_all_ranks_decides_for_a_smaller_one_beside_it(four, name, what, unscale):
    assert_agreed(four.run(on_meshes, "grad", what, name, [Fault(1, 2, -1)], unscale), [1])


def part_beside_uneven_groups(rank: int, name: str, uneven: bool) -> tuple[cases.Report | None, float]:
    """A part of the world, perhaps after a group that rank 0 has alone; how many ranks a later group reaches."""
    if uneven:  # torch names groups by counting: one that not all ranks made, or are in, may leave the names apart
        dist.new_group([0])
    report = on_meshes(rank, "grad", "a part", name, [Fault(1, 1)])
    dist.all_reduce(ranks := torch.ones(()), group=dist.new_group())
    return report, ranks.item()


@FUSED
@pytest.mark.parametrize("uneven", [False, True])
def test_a_mesh_over_a_part_of_the_world_leaves_the_rest_alone(four, name, uneven):
    results = four.run(part_beside_uneven_groups, name, uneven)
    assert_agreed([report for report, _ in results[:2]], [1])
    assert [report for report, _ in results[2:]] == [None, None]
    assert [ranks for _, ranks in results] == [4.0] * 4


def square_in_a_larger_world(rank: int, order: float, faults: Sequence[Fault]) -> tuple[float, cases.Report]:
    """A norm of shards on a 2 x 2 mesh that is a part of the world, rank n's of n + 1; and some steps with such."""
    scaler, params, size = new_scaler("grad"), LAYOUTS["square-shards"](), dist.get_world_size
    for param in params:
        param.grad = placed(scaler.scale(torch.full((2, 3), rank + 1.0)), Shard(0), Shard(1), on=cases.square())
    # Only a mesh's own groups reach just those that must agree.
    with mock.patch.object(dist, "get_world_size", lambda group=None: 8 if group is None else size(group)):
        norm = scaler.clip_grad_norm_(new_optimizer("sgd", params), 1e6, order).item()
        return norm, laid_out(rank, "grad", "square-shards", "adamw", faults)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("order", "norm"), [(2.0, 360.0**0.5), (float("inf"), 4.0), (1.0, 120.0)])
def test_a_square_mesh_over_a_part_of_the_world_reduces_along_both_sides(four, order, norm, rank):
    norms, reports = zip(*four.run(square_in_a_larger_world, order, [Fault(1, rank)]), strict=True)
    assert norms == pytest.approx([norm] * 4, rel=1e-6)
    assert_agreed(reports, [1], collectives=2)


# Gradients that are not placed as their parameter is.


def one_step(rank: int, kind: str, name: str, unscale: bool) -> tuple[cases.Report, list[float]]:
    """A replicated parameter whose gradient is a sum to be taken, of 2^27 on every rank."""
    scaler, param = new_scaler(kind, init_scale=2.0**100), cases.dtensor_param(line(), [Replicate()])

    def backward(_step: int) -> None:
        param.grad = placed(scaler.scale(torch.ones(2, 3)) * 2.0**27, Partial())

    report = cases.train(rank, scaler, new_optimizer(name, [param]), backward, steps=1, unscale=unscale)
    return report, cases.numbers(param)


@KINDS
@UNSCALE
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
def test_partial_gradients_whose_sum_overflows_spare_the_weights(two, kind, name, unscale):
    """Difference 17 from torch."""
    # 2^127 on every rank is finite, their sum is not: it must be skipped, or unscaled before it is summed.
    (first, weights), second = two.run(one_step, kind, name, unscale)
    assert first.finite
    assert (first, weights) == second

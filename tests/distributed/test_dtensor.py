"""DTensor parameters in every layout: who must agree follows from the meshes, and costs one collective."""

import cases
import dtensor_cases
import pytest
from cases import Fault
from checks import assert_agreed

pytestmark = pytest.mark.distributed

KINDS = pytest.mark.parametrize("kind", ["grad", "sharded"])
UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])
# Fused SGD and Adagrad have no DTensor rule in torch itself.
WAYS = pytest.mark.parametrize(
    ("name", "unscale"),
    [("sgd", False), ("adamw", True), ("adamw-fused", False), ("adamw-fused", True)],
    ids=["sgd", "adamw-unscale_", "fused", "fused-unscale_"],
)

LINES = [name for name in dtensor_cases.LAYOUTS if "line" in name]
SQUARES = [name for name in dtensor_cases.LAYOUTS if "line" not in name]


def sharded_param(layout):
    """The index of the parameter that is sharded the most: what an inf hits on one rank alone."""
    return 0 if layout in ("line-replicated-last", "line-beside-plain") else -1


@KINDS
@WAYS
@pytest.mark.parametrize("layout", LINES)
def test_on_a_line(two, kind, layout, name, unscale):
    faults = [Fault(1, 1, param=sharded_param(layout))]
    assert_agreed(two.run(dtensor_cases.laid_out, kind, layout, name, faults, unscale=unscale), [1])


@KINDS
@WAYS
@pytest.mark.parametrize("layout", SQUARES)
def test_on_a_square(four, kind, layout, name, unscale):
    assert_agreed(four.run(dtensor_cases.laid_out, kind, layout, name, [Fault(1, 3, -1)], unscale=unscale), [1])


@KINDS
@pytest.mark.parametrize("layout", ["line-shards", "plain-beside-line", "line-dtypes"])
def test_on_a_line_of_four(four, kind, layout):
    assert_agreed(four.run(dtensor_cases.laid_out, kind, layout, "adamw-fused", [Fault(1, 2)]), [1])


@KINDS
@pytest.mark.parametrize("layout", ["line-beside-plain", "line-beside-plain-double"])
def test_an_inf_in_the_plain_parameter_beside_dtensors(two, kind, layout):
    assert_agreed(two.run(dtensor_cases.laid_out, kind, layout, "adamw", [Fault(1, 1, param=1)]), [1])


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", ["square-half-replicated-first", "two-slices", "expert-parallel-slice"])
def test_an_inf_on_any_rank_of_a_square(four, layout, rank):
    for param in (0, 1):
        assert_agreed(four.run(dtensor_cases.laid_out, "grad", layout, "adamw", [Fault(1, rank, param)]), [1])


@KINDS
@UNSCALE
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("gradless", [0, 1])
def test_a_rank_without_gradients_follows(two, kind, name, gradless, unscale):
    faults = [Fault(1, 1 - gradless)]
    reports = two.run(dtensor_cases.laid_out, kind, "line-shards", name, faults, unscale=unscale, gradless=[gradless])
    assert_agreed(reports, [1])


@KINDS
def test_ranks_without_gradients_on_a_square(four, kind):
    faults = [Fault(1, 2)]
    reports = four.run(dtensor_cases.laid_out, kind, "fsdp-then-tp", "adamw", faults, gradless=[0, 1, 3])
    assert_agreed(reports, [1])


@KINDS
@pytest.mark.parametrize("bad", [0, 1])
def test_an_optimizer_for_each_mesh(four, kind, bad):
    reports = four.run(dtensor_cases.two_optimizers_two_meshes, kind, [Fault(1, 1, param=bad)])
    assert_agreed(reports, *([1] if index == bad else [] for index in range(2)))


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_one_1d_mesh_asks_its_own_group_only(four, name):
    reports = four.run(dtensor_cases.one_slice, "grad", name, [Fault(1, 1)])
    assert_agreed(reports[:2], [1])
    assert_agreed(reports[2:], [])


def test_parameters_that_are_placed_anew_ask_their_new_mesh(four):
    """Unseen, the norm would be that of a slice, and an inf on one rank would split the slices."""
    assert four.run(dtensor_cases.placed_anew, False) == [(4.0, False, 8.0)] * 4
    assert [result[1:] for result in four.run(dtensor_cases.placed_anew, True)] == [(True, 2.0)] * 4


@UNSCALE
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("holders", [range(4), [0, 2]])
def test_a_mesh_of_all_ranks_tells_for_a_smaller_one_beside_it(four, name, holders, unscale):
    faults = [Fault(1, 2, -1)]
    assert_agreed(four.run(dtensor_cases.world_beside_a_pair, name, faults, unscale, holders), [1])


def test_optimizers_that_agree_over_other_ranks_are_warned_of_once(four):
    for rank, texts in enumerate(four.run(dtensor_cases.an_optimizer_each, "grad", "expert-parallel-slice")):
        (text,) = texts
        assert "Use scaler_triton.ShardedGradScaler, or pass process_group=" in text
        assert f"here {[[0, 2], [1, 3]][rank % 2]} and [0, 1, 2, 3]:" in text
    for kind, layout in (("sharded", "expert-parallel-slice"), ("world", "two-slices"), ("grad", "expert-parallel")):
        assert four.run(dtensor_cases.an_optimizer_each, kind, layout) == [[]] * 4


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_process_group_overrides_the_mesh(four, name):
    assert_agreed(four.run(dtensor_cases.one_slice, "world", name, [Fault(1, 1)]), [1])


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_mesh_over_a_part_of_the_world_leaves_the_rest_alone(four, name):
    reports = four.run(dtensor_cases.part_of_the_world, name, [Fault(1, 1)])
    assert_agreed(reports[:2], [1])
    assert reports[2:] == [None, None]


def test_groups_that_only_some_ranks_are_in_keep_nobody_waiting(four):
    """torch names groups by counting: one that not all ranks made, or are in, may leave the names apart."""
    results = four.run(dtensor_cases.part_beside_uneven_groups, "adamw-fused", [Fault(1, 1)])
    assert_agreed([report for report, _ in results[:2]], [1])
    assert [ranks for _, ranks in results] == [4.0] * 4


@pytest.mark.parametrize("rank", range(4))
@WAYS
def test_a_square_mesh_over_a_part_of_the_world_reduces_along_both_sides(four, name, unscale, rank):
    reports = four.run(dtensor_cases.square_in_a_larger_world, name, [Fault(1, rank)], unscale)
    assert_agreed(reports, [1], collectives=2)


@pytest.mark.parametrize(("order", "norm"), [(2.0, 360.0**0.5), (float("inf"), 4.0), (1.0, 120.0)])
def test_a_norm_is_summed_along_both_sides(four, order, norm):
    assert four.run(dtensor_cases.norm_in_a_larger_world, order) == pytest.approx([norm] * 4, rel=1e-6)


@KINDS
@UNSCALE
def test_partial_gradients_step_by_their_sum(two, kind, unscale):
    for report, values in two.run(dtensor_cases.partial_grads, kind, "sgd", scale=8.0, value=1.0, unscale=unscale):
        assert report.stepped == [(True,)]
        assert values == [1.0 - 2 * cases.LEARNING_RATE] * 6


@KINDS
@UNSCALE
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
def test_partial_gradients_whose_sum_overflows_spare_the_weights(two, kind, name, unscale):
    """Difference 17 from torch."""
    # 2^127 on every rank is finite, their sum is not: it must be skipped, or unscaled before it is summed.
    results = two.run(dtensor_cases.partial_grads, kind, name, scale=2.0**100, value=2.0**27, unscale=unscale)
    assert all(report.finite for report, _ in results)
    (first, weights), (second, same_weights) = results
    assert (first.scales, first.stepped, weights) == (second.scales, second.stepped, same_weights)


@KINDS
def test_gradients_still_under_way_are_waited_for(two, kind):
    for report, values in two.run(dtensor_cases.async_grads, kind, "sgd"):
        assert report.stepped == [(True,)]
        assert values == [1.0 - 2 * cases.LEARNING_RATE] * 6


def test_of_a_gradient_still_under_way_an_op_gets_what_has_arrived(two):
    assert two.run(dtensor_cases.async_shards) == [["AsyncCollectiveTensor", "Tensor"]] * 2


@KINDS
def test_plain_gradients_of_a_distributed_parameter_are_what_this_rank_holds(two, kind):
    for flags, values in two.run(dtensor_cases.plain_grads, kind):
        assert flags == [[1.0], [0.0]]
        assert values == [3.0] * 6

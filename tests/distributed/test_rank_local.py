"""Ranks with parameters of their own (FSDP1 shards, pipeline stages): one bad gradient, and nobody steps."""

import cases
import pytest
import rank_local_cases
from cases import Fault
from checks import assert_agreed

pytestmark = pytest.mark.distributed

OPTIMIZERS = ["sgd", "adam", "adamw", "adagrad", "adamw-foreach"]
FUSED = ["sgd-fused", "adam-fused", "adamw-fused", *cases.FUSED_ADAGRAD]
UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])


def last(ranks):
    """The highest rank: a bug that listens to rank 0 alone must not pass."""
    return ranks.world_size - 1


@UNSCALE
@pytest.mark.parametrize("name", OPTIMIZERS + FUSED)
def test_one_overflow_skips_everywhere(ranks, name, unscale):
    reports = ranks.run(rank_local_cases.rank_local, "sharded", [name], [Fault(1, last(ranks))], unscale=unscale)
    assert_agreed(reports, [1])


@UNSCALE
@pytest.mark.parametrize("name", ["sgd", "adamw", *FUSED])
def test_several_overflows_at_once_are_one(ranks, name, unscale):
    faults = [Fault(2, rank, param=rank % 2) for rank in range(ranks.world_size)]
    reports = ranks.run(rank_local_cases.rank_local, "sharded", [name], faults, unscale=unscale)
    assert_agreed(reports, [2])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_every_nonfinite_value_travels(two, value):
    reports = two.run(rank_local_cases.rank_local, "sharded", ["adamw-fused"], [Fault(1, 1, value=value)])
    assert_agreed(reports, [1])


@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_without_overflow_all_step(ranks, name):
    assert_agreed(ranks.run(rank_local_cases.rank_local, "sharded", [name], []), [])


@UNSCALE
@pytest.mark.parametrize("names", [("sgd", "adamw-fused"), ("adamw-fused", "sgd"), ("adam", "adamw")])
@pytest.mark.parametrize("bad", [0, 1])
def test_several_optimizers_skip_each_for_itself(ranks, names, bad, unscale):
    faults = [Fault(1, last(ranks), param=2 * bad)]
    reports = ranks.run(rank_local_cases.rank_local, "sharded", names, faults, unscale=unscale)
    assert_agreed(reports, *([1] if index == bad else [] for index in range(2)))


@pytest.mark.parametrize("bad", [0, 1])
def test_fused_on_one_rank_and_plain_on_another(two, bad):
    reports = two.run(rank_local_cases.differing_optimizers, "sharded", ["adamw", "adamw-fused"], [Fault(1, bad)])
    assert_agreed(reports, [1])


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_explicit_unscale_on_some_ranks_only(ranks, name):
    reports = ranks.run(rank_local_cases.unscale_on_some, "sharded", name, [Fault(1, last(ranks))])
    assert_agreed(reports, [1])


@UNSCALE
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("gradless", [0, 1])
def test_a_rank_without_gradients_follows(ranks, name, gradless, unscale):
    faults = [Fault(1, 1 - gradless)]
    reports = ranks.run(rank_local_cases.rank_local, "sharded", [name], faults, unscale=unscale, gradless=[gradless])
    assert_agreed(reports, [1])
    assert reports[gradless].stepped == [(None,)] * cases.STEPS


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_nobody_with_gradients_is_a_good_step(two, name):
    assert_agreed(two.run(rank_local_cases.rank_local, "sharded", [name], [], gradless=[0, 1]), [])


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_pipeline_stages_share_nothing_but_the_flag(ranks, name):
    reports = ranks.run(rank_local_cases.pipeline_stages, "sharded", name, [Fault(1, last(ranks))])
    assert_agreed(reports, [1])


@pytest.mark.skipif(cases.DEVICE == "cuda", reason="gloo sends no GPU's tensors from rank to rank")
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_pipeline_whose_last_stage_alone_has_a_loss_trains_as_one_process_does(ranks, name):
    outcomes = ranks.run(rank_local_cases.pipeline_schedule, name, [Fault(1, 0)])
    assert_agreed([report for report, _ in outcomes], [1])
    for _, distance in outcomes:
        assert distance <= 1e-6  # sums of four microbatches in another order


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_ranks_with_only_frozen_and_empty_parameters_follow(ranks, name):
    assert_agreed(ranks.run(rank_local_cases.frozen_on_some, "sharded", name, [Fault(1, 0)]), [1])


@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_gradients_that_come_and_go(ranks, name):
    assert_agreed(ranks.run(rank_local_cases.grads_come_and_go, "sharded", name, [Fault(2, last(ranks))]), [2])


@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_a_grad_scaler_with_a_process_group_agrees(ranks, name):
    assert_agreed(ranks.run(rank_local_cases.rank_local, "world", [name], [Fault(1, last(ranks))]), [1])


def test_sparse_gradients_on_some_ranks(ranks):
    assert_agreed(ranks.run(rank_local_cases.sparse_on_some, "sharded", "sgd", [Fault(1, 1)]), [1])


@UNSCALE
@pytest.mark.parametrize("name", ["sgd", "sgd-fused"])
def test_a_patched_unscale_agrees_too(two, name, unscale):
    assert_agreed(two.run(rank_local_cases.patched_unscale, "sharded", name, [Fault(1, 1)], unscale=unscale), [1])


@UNSCALE
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_plain_grad_scaler_asks_nobody(two, name, unscale):
    # Equal faults on all ranks, as DDP's reduced gradients have: right without a collective.
    reports = two.run(rank_local_cases.rank_local, "grad", [name], [Fault(1, 0), Fault(1, 1)], unscale=unscale)
    assert_agreed(reports, [1], collectives=0)

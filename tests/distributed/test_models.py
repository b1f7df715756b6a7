"""Whole training runs: ranks under every wrapper do what one process does that skips the same steps."""

from itertools import pairwise

import model_cases
import pytest
from cases import Fault
from checks import assert_agreed
from model_cases import STEPS

pytestmark = pytest.mark.distributed

# Gradients are averaged over ranks in another order than over one batch: an ulp of fp32 each, which Adam's
# division by sqrt(v) carries into 8 updates of 2^-4.
FP32_DISTANCE = 2e-5
# fp16 weights and activations in forward and backward against fp32 ones: 2^-11 relative, the same amplification.
FP16_DISTANCE = 2e-2

BAD_STEPS = [2, 5]
ANYWHERE = ["fsdp1-full", "fsdp1-full-flat", "fsdp1-grad-op", "fsdp1-grad-op-flat"]
FSDP1_TWO = [*ANYWHERE, "fsdp1-no-shard", "fsdp1-no-shard-flat"]
FSDP1_FOUR = ["fsdp1-full", "fsdp1-full-flat", "fsdp1-hybrid", "fsdp1-hybrid-flat"]
NAMES = pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
CLIP = pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])


def assert_like_one_process(outcomes, limit=FP32_DISTANCE, collectives=1):
    """The ranks agree, took the reference's steps, and ended where it did."""
    assert_agreed([outcome.report for outcome in outcomes], BAD_STEPS, collectives=collectives, steps=STEPS)
    assert_agreed([outcome.reference for outcome in outcomes], BAD_STEPS, collectives=0, steps=STEPS)
    assert max(outcome.distance for outcome in outcomes) <= limit


def one_rank_at_a_time(world_size):
    """An inf on rank 1 alone, later on the last rank alone."""
    return [Fault(BAD_STEPS[0], 1), Fault(BAD_STEPS[1], world_size - 1)]


def everywhere(world_size):
    """The same inf on every rank, as gradients have it once they are reduced."""
    return [Fault(step, rank) for step in BAD_STEPS for rank in range(world_size)]


@CLIP
@NAMES
@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_ddp(two, kind, name, clip):
    faults = everywhere(2) if kind == "grad" else one_rank_at_a_time(2)
    outcomes = two.run(model_cases.against_one_process, kind, "ddp", name, faults, clip=clip)
    assert_like_one_process(outcomes, collectives=0 if kind == "grad" else 1)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_ddp_with_optimizer_states_split_over_the_ranks(two, kind, fused):
    """`ZeroRedundancyOptimizer`: each rank steps its part of the parameters, and sends it to the others."""
    results = two.run(model_cases.zero_beside_whole, kind, fused=fused)
    scales, _, _ = results[0]
    assert [later < earlier for earlier, later in pairwise(scales)].count(True) == len(BAD_STEPS)
    for ours, theirs, same in results:
        assert ours == theirs == scales
        assert same


@CLIP
@NAMES
@pytest.mark.parametrize("wrapper", FSDP1_TWO)
def test_fsdp1_on_two_ranks(two, wrapper, name, clip):
    faults = one_rank_at_a_time(2)
    assert_like_one_process(two.run(model_cases.against_one_process, "sharded", wrapper, name, faults, clip=clip))


@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused", "adam"])
@pytest.mark.parametrize("wrapper", FSDP1_FOUR)
def test_fsdp1_on_four_ranks(four, wrapper, name):
    faults = one_rank_at_a_time(4)
    assert_like_one_process(four.run(model_cases.against_one_process, "sharded", wrapper, name, faults))


@CLIP
@NAMES
@pytest.mark.parametrize("kind", ["sharded", "grad"])
def test_fsdp2(ranks, kind, name, clip):
    faults = one_rank_at_a_time(ranks.world_size)
    assert_like_one_process(ranks.run(model_cases.against_one_process, kind, "fsdp2", name, faults, clip=clip))


@NAMES
@pytest.mark.parametrize("kind", ["sharded", "grad"])
@pytest.mark.parametrize("wrapper", ["hsdp2", "fsdp2-tp"])
def test_fsdp2_on_two_dimensions(four, kind, wrapper, name):
    faults = one_rank_at_a_time(4)
    assert_like_one_process(four.run(model_cases.against_one_process, kind, wrapper, name, faults))


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat", "fsdp1-no-shard", "fsdp2"])
@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_fp16_compute(two, wrapper, name):
    faults = one_rank_at_a_time(2)
    outcomes = two.run(model_cases.against_one_process, "sharded", wrapper, name, faults, half=True)
    assert_like_one_process(outcomes, limit=FP16_DISTANCE)
    assert max(outcome.distance for outcome in outcomes) > FP32_DISTANCE, "nothing was computed in fp16"


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat"])
def test_grad_scaler_on_fsdp1_warns_once_naming_the_fix(two, wrapper):
    """Difference 10 from torch."""
    for warnings_given, _ in two.run(model_cases.warned_about_fsdp1, "grad", wrapper):
        assert len(warnings_given) == 1
        assert "ShardedGradScaler" in warnings_given[0]
        assert "process_group" in warnings_given[0]


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat"])
def test_grad_scaler_on_fsdp1_is_right_with_a_process_group(two, wrapper):
    results = two.run(model_cases.warned_about_fsdp1, "world", wrapper)
    assert [warnings_given for warnings_given, _ in results] == [[], []]
    for reports in zip(*(reports for _, reports in results), strict=True):
        assert_agreed(reports, [2], steps=STEPS)


def test_grad_scaler_does_not_warn_about_ddp_or_fsdp2(two):
    for wrapper in ("ddp", "fsdp2"):
        results = two.run(model_cases.warned_about_fsdp1, "grad", wrapper)
        assert [warnings_given for warnings_given, _ in results] == [[], []]

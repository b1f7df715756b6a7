"""Ranks whose scales have come apart are told, all of them, at the next step: the flag's reduction carries scales."""

from importlib.util import find_spec

import pytest
import split_cases
import torch
from cases import INIT_SCALE

pytestmark = pytest.mark.distributed


INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the CPU has Triton's interpreter without a GPU"
)
DIFFERENT = "The ranks hold different scales, some below "
FARTHEST = f"The ranks hold different scales, from {INIT_SCALE} to 64.0: "


def means(ranks):
    """What a sum tells: all but one rank hold the initial scale, that one 64."""
    mean, harmonic = ((ranks - 1) * INIT_SCALE + 64.0) / ranks, ranks / ((ranks - 1) / INIT_SCALE + 1 / 64.0)
    return f"The ranks hold different scales, some below {harmonic:g}, some above {mean:g}: "


@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
@pytest.mark.parametrize(("kind", "layout"), [("sharded", "line-shards"), ("grad", "line-shards"), ("grad", "hsdp")])
def test_different_scales_raise_on_every_rank(four, kind, layout, how):
    for said in four.run(split_cases.stepped_with_different_scales, kind, layout, how):
        assert said[0] == said[2] == ""
        assert said[1].startswith(means(4) if how == "clip" else FARTHEST)


def test_different_scales_raise_for_each_optimizer_that_was_clipped(two):
    for said in two.run(split_cases.clipped_together_with_different_scales):
        assert all(text.startswith(means(2)) for text in said)


def test_steps_and_clips_in_turn_compare_nothing_stale(two):
    assert two.run(split_cases.stepped_and_clipped_in_turn) == [True, True]


@pytest.mark.parametrize("how", ["step", "clip"])
def test_who_asks_about_a_fused_step_is_told(two, how):
    """It reads no flag itself."""
    for before, after, good in two.run(split_cases.asked_with_different_scales, how):
        assert before.startswith(means(2) if how == "clip" else FARTHEST)
        assert after == before
        assert good == "False"


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one dtype", "two"])
def test_scales_that_differ_by_little_raise_wherever_they_are_compared(two, dtypes, backend):
    for factor, told in ((1.0, "False"), (1.001, DIFFERENT), (1.00001, DIFFERENT), (8.0, DIFFERENT)):
        for said in two.run(split_cases.clipped_with_scales_a_factor_apart, backend, dtypes, factor):
            assert len(said) == 6
            assert all(text.startswith(told) for text in said), (factor, said)


@INTERPRETED
def test_a_rank_that_failed_to_clip_is_not_taken_for_one_with_another_scale(two):
    first, second = two.run(split_cases.asked_after_another_rank_failed)
    assert first[0].startswith("Another rank failed to check its gradients")
    assert first[1] == "True"
    assert second == ["True", "True"]

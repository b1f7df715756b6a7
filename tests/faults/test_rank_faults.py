"""A rank that raises, dies or is cut off: the others get torch's error in time, and nothing of theirs is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cases
import fault_cases
import pytest
import torch
from checks import scale_model
from fault_cases import LIMIT, VARIANTS, Outcome, Variant
from helpers import assert_same

from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankPool

pytestmark = pytest.mark.distributed

Pool = Callable[[int], RankPool]
LATE = 3.0  # Seconds that a busy machine may add to a limit.
# What gloo says, in every version: its own words, not ours.
TORCHS_ERROR = re.compile(r"^(RuntimeError|DistBackendError|DistNetworkError): .*(gloo|imed out|closed|reset)", re.S)
AFTER_ONE_STEP = (cases.INIT_SCALE, 1)


def values(results: list[RankResult]) -> list[Any]:
    """Return what the ranks returned; all had to."""
    assert [result.error for result in results] == [None] * len(results), results
    return [result.value for result in results]


def assert_untouched(outcome: Outcome) -> None:
    """Assert torch's own error in time, and parameters, scale and tracker as they were; the step is to be skipped."""
    assert outcome.error is not None
    assert TORCHS_ERROR.match(outcome.error), outcome.error
    assert outcome.seconds < LIMIT + LATE
    assert_skips(outcome)


def assert_skips(outcome: Outcome) -> None:
    assert not outcome.params_changed
    assert outcome.finite
    assert not outcome.lent
    assert (outcome.scale, outcome.tracker) == AFTER_ONE_STEP
    assert outcome.flags == (1.0,)


def test_a_rank_raises_between_scale_and_step(pool: Pool) -> None:
    survivor, raiser = values(pool(2).run(fault_cases.raises_between))
    assert list(survivor) == [str(variant) for variant in VARIANTS]
    assert all(outcomes == [] for outcomes in raiser.values())
    for failed, again in survivor.values():
        assert_untouched(failed)
        assert failed.stage == "UNSCALED"
        assert again.error is None
        assert_skips(again)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_reduction_fails_half_way_on_all_ranks(pool: Pool, variant: Variant) -> None:
    """Whatever it left in the tensor: every rank skips and backs off alike, and the next step is right."""
    for runs in values(pool(2).run(fault_cases.fails_half_way, variant, False)):
        for (failed, again, good), scale in runs:
            assert failed.error == "ConnectionError: link lost"
            assert_skips(failed)
            assert again.error is None
            assert_skips(again)
            assert scale == cases.INIT_SCALE / 2
            assert (good.error, good.params_changed, good.flags) == (None, True, (0.0,))


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
def test_the_reduction_fails_half_way_on_one_rank(pool: Pool, variant: Variant) -> None:
    """That rank never steps on what it cannot know, the others hang on nothing, and at the next step all are told."""
    sound, hit = values(pool(2).run(fault_cases.fails_half_way, variant, True))
    for (failed, again, good), scale in hit:
        assert failed.error == "ConnectionError: link lost"
        assert_skips(failed)
        assert_skips(again)
        assert scale == cases.INIT_SCALE / 2
        assert_told(good, variant)
    for (*before, good), scale in sound:
        assert [outcome.error for outcome in before] == [None] * len(before)
        assert scale == cases.INIT_SCALE * 2
        assert_told(good, variant)


def assert_told(outcome: Outcome, variant: Variant) -> None:
    """Assert that the ranks' scales were found to differ, unless the step, a fused one, reads no flag on the host."""
    if variant.name.endswith("fused"):
        assert outcome.error is None
        return
    assert outcome.error is not None
    assert outcome.error.startswith("RuntimeError: The ranks hold different scales, from 4.0 to 16.0")
    assert not outcome.params_changed


def test_four_ranks_lose_one_and_two_go_on_from_the_checkpoint(pool: Pool) -> None:
    """Bit for bit what one process gets with torch's scaler and no loss: no sum here depends on the world."""
    bad, name = (1, 4), "adamw-fused"
    *lost, dead = pool(4).run(fault_cases.train_on, "sharded", name, range(4), bad, None, 3)
    assert dead.error == "RankDied: exit code 7"
    for result in lost:
        assert TORCHS_ERROR.match(result.value["error"])
        assert result.value["untouched"]
    checkpoint = lost[0].value["last"]
    before, scales = fault_cases.train_alone(name, range(3), bad)
    assert_equal(checkpoint, before)
    after, all_scales = fault_cases.train_alone(name, range(6), bad)
    for result in values(pool(2).run(fault_cases.train_on, "sharded", name, range(3, 6), bad, checkpoint)):
        assert_equal(result["last"], after)
        assert scales + result["scales"] == all_scales


def assert_equal(tree: Any, other: Any) -> None:
    """Assert that nested dicts and lists are equal, tensors to the bit."""
    if isinstance(tree, torch.Tensor):
        assert_same(tree, other)
    elif isinstance(tree, dict):
        assert tree.keys() == other.keys()
        for key, value in tree.items():
            assert_equal(value, other[key])
    elif isinstance(tree, list):
        for value, match in zip(tree, other, strict=True):
            assert_equal(value, match)
    else:
        assert tree == other


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_ranks_that_fork_go_on(pool: Pool, variant: Variant) -> None:
    """So do their children, each with a scaler of its own."""
    results = values(pool(2).run(fault_cases.forks, variant))
    expected = [float.fromhex(scale) for scale in scale_model([1])[0][1:]]
    for digests, scales, child in results:
        assert scales == expected
        assert len(set(digests)) == len(digests)  # the first is after the skipped step
        assert child == b"4.0 [False, True]"
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize("how", ["kill", "during"])
def test_a_rank_dies_in_the_reduction(pool: Pool, how: str) -> None:
    variant = {"kill": VARIANTS[2], "during": VARIANTS[0]}[how]
    survivor, dead = pool(2).run(fault_cases.killed, variant, how)
    assert dead.error == "RankDied: exit code -9"
    failed, again = survivor.value
    if how == "during" and failed.error is None:
        assert failed.params_changed  # all had been sent: the step was agreed
        assert failed.flags == (0.0,)
    else:
        assert_untouched(failed)
        assert again.error is None
        assert_skips(again)

"""The verdict: every way in which a run can be bad makes it bad."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import nan

import numpy as np
import pytest

from scaler_triton.demo.checks import TOLERANCE, judge
from scaler_triton.demo.trace import Trace

REFERENCE = Trace(
    enabled=True,
    losses=[4.0, 3.0, 2.0],
    scales=[8.0, 4.0, 4.0, 4.0],
    skipped=[True, False, False],
    step_counts=(2,),
    start=np.zeros(4, np.float32),
    end=np.ones(4, np.float32),
)


def failures(change: Callable[[list[Trace]], None]) -> list[str]:
    """What the verdict finds in two good ranks after a change to them."""
    ranks = [deepcopy(REFERENCE), deepcopy(REFERENCE)]
    change(ranks)
    return [check.text for check in judge(ranks, REFERENCE) if not check.ok]


def test_good_ranks_pass() -> None:
    assert failures(lambda ranks: None) == []


def disable(ranks: list[Trace]) -> None:
    ranks[1].enabled = False


def split_scales(ranks: list[Trace]) -> None:
    ranks[1].scales[-1] = 8.0


def move_all_scales(ranks: list[Trace]) -> None:
    for rank in ranks:
        rank.scales[-1] = 8.0


def miss_a_step(ranks: list[Trace]) -> None:
    ranks[1].step_counts = (1,)


def split_within_a_rank(ranks: list[Trace]) -> None:
    for rank in ranks:
        rank.step_counts = (1, 2)


def take_the_bad_step(ranks: list[Trace]) -> None:
    for rank in ranks:
        rank.skipped[0] = False


def skip_a_good_step(ranks: list[Trace]) -> None:
    ranks[0].skipped[2] = True


def move_a_parameter(ranks: list[Trace]) -> None:
    ranks[1].end[0] += np.float32(4 * TOLERANCE)


def lose_a_parameter_to_nan(ranks: list[Trace]) -> None:
    ranks[0].end[0] = nan


def learn_nothing(ranks: list[Trace]) -> None:
    for rank in ranks:
        rank.losses = [4.0, 4.0, 3.9]


def lose_the_loss_to_nan(ranks: list[Trace]) -> None:
    ranks[0].losses[-1] = nan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (disable, "the scaler is disabled on rank 1"),
        (split_scales, "the scales of the ranks split after step 3; at the end: 4, 8"),
        (move_all_scales, "no other; scales do NOT match a single process"),
        (miss_a_step, "optimizer step counts differ: 2, 1"),
        (split_within_a_rank, "optimizer step counts differ: 1/2, 1/2"),
        (take_the_bad_step, "wrongly skipped or wrongly taken: step 1"),
        (skip_a_good_step, "wrongly skipped or wrongly taken: step 3"),
        (move_a_parameter, "gathered parameters do NOT match"),
        (lose_a_parameter_to_nan, "gathered parameters do NOT match"),
        (learn_nothing, "the loss did NOT fall"),
        (lose_the_loss_to_nan, "the loss did NOT fall"),
    ],
)
def test_a_bad_run_fails(change: Callable[[list[Trace]], None], said: str) -> None:
    assert any(said in text for text in failures(change))


def test_rounding_passes_and_is_measured() -> None:
    ranks = [deepcopy(REFERENCE), deepcopy(REFERENCE)]
    ranks[0].end[0] += np.float32(TOLERANCE / 4)
    checks = judge(ranks, REFERENCE)
    assert all(check.ok for check in checks)
    assert any("relative distance" in check.text for check in checks)
    assert any("bitwise" in check.text for check in judge([REFERENCE], REFERENCE))

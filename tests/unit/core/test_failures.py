"""An error in a check: what it means for this rank and others."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import sgd, started

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.clipping import norm
from scaler_triton.core.check import Checks

SCALE = 4.0
TOLD = [1.0, 1.0, -math.inf, -math.inf]  # the status of a rank that failed


def a_scaler(cls: type = GradScaler, **options: Any) -> Any:
    return started(cls, "cpu", init_scale=SCALE, **options)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_is_told_to_the_others_and_an_interrupt_is_not(error: Any, reductions: Any) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), sgd([torch.ones(1)])
    with mock.patch.object(Checks, "take_looks", side_effect=error), pytest.raises(error):
        scaler.unscale_(optimizer)
    assert reductions == ([TOLD] if error is MemoryError else [])


@pytest.mark.parametrize("group", [None, "illegal"])
def test_an_error_before_the_ranks_are_known_is_told_to_those_that_wait(group: Any, reductions: Any) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), sgd([torch.ones(1)])
    scaler.process_group = group  # an illegal one fails on every rank: nobody waits
    with mock.patch.object(Checks, "plan", side_effect=MemoryError), pytest.raises(MemoryError):
        scaler.unscale_(optimizer)
    assert reductions == ([TOLD] if group is None else [])


def test_the_others_are_told_even_if_this_rank_has_no_room_for_a_flag(reductions: Any) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), sgd([torch.ones(1)])
    with (
        mock.patch.object(Checks, "take_looks", side_effect=KeyError),
        mock.patch.object(torch, "ones", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        scaler.unscale_(optimizer)
    assert reductions == [TOLD]


def test_where_the_check_is_by_a_norm_an_error_joins_the_sum(reductions: Any) -> None:
    with mock.patch.object(norm, "norm_batch", side_effect=MemoryError), pytest.raises(MemoryError):
        StepGuard("cpu", spike_sigma=6.0).unscale_(sgd([torch.ones(1)]))
    assert reductions == [pytest.approx([math.nan, 1.0, 1.0, 0.0, 0.0], nan_ok=True)]

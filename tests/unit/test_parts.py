"""A scaler's parts: what a rank does that is asked for a step before its first scale."""

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import sgd, values
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.core import failures
from scaler_triton.core.check import Checks
from scaler_triton.core.ranks import Ranks
from scaler_triton.measuring.measure import PACKED

SCALE = 4.0
TOLD = [1.0, 1.0, -math.inf, -math.inf]  # the status of a rank that failed


def test_a_step_before_any_scale_is_over_with_the_next_loss(two_ranks: None) -> None:
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=SCALE), sgd([torch.tensor([2 * SCALE])])
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


CALLS = pytest.mark.parametrize(("name", "given"), [("unscale_", ()), ("clip_grad_norm_", (1.0,)), ("step", ())])


@CALLS
def test_without_a_scale_a_rank_that_cannot_reach_the_others_raises_the_same(
    name: str, given: Any, two_ranks: None
) -> None:
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=SCALE), sgd([torch.ones(1)])
    scaler.process_group = "illegal"
    with pytest.raises(AssertionError, match=f"^Attempted {name} but _scale is None"):
        getattr(scaler, name)(optimizer, *given)
    scaler.process_group = None
    with mock.patch.object(Ranks, "reduce_", side_effect=KeyError), pytest.raises(AssertionError):
        getattr(scaler, name)(optimizer, *given)


@CALLS
def test_without_a_scale_and_other_ranks_none_is_made(name: str, given: Any) -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(AssertionError, match=f"^Attempted {name} but _scale is None"):
        getattr(scaler, name)(sgd([torch.ones(1)]), *given)
    assert scaler._scale is None


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("name", ["unscale_", "step"])
def test_without_a_scale_a_rank_tells_the_others_and_backs_off_with_them(
    name: str, measure: bool, reductions: Any
) -> None:
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=SCALE, measure=measure), sgd([torch.ones(1)])
    with pytest.raises(AssertionError, match=f"^Attempted {name} but _scale is None"):
        getattr(scaler, name)(optimizer)
    sums = [math.nan, 1.0, 1.0, 0.0, 0.0, *[0.0] * PACKED]  # as strings, for NaN is no NaN
    assert str(reductions) == str([sums if measure else TOLD])
    scaler.step(optimizer)
    scaler.update()
    assert (values(optimizer), scaler.get_scale()) == ([0.0], SCALE / 2)


def test_without_a_scale_a_clip_joins_the_reduction_of_the_norm_and_spends_all_steps(reductions: Any) -> None:
    scaler, both = ShardedGradScaler("cpu", init_scale=SCALE), [sgd([torch.ones(1)]) for _ in "ab"]
    with pytest.raises(AssertionError, match="^Attempted clip_grad_norm_ but _scale is None"):
        scaler.clip_grad_norm_(both, 1.0)
    assert str(reductions) == str([[math.nan, 1.0, 1.0, 0.0, 0.0]])
    for optimizer in both:
        scaler.step(optimizer)
        assert values(optimizer) == [0.0]


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs or none")
@pytest.mark.parametrize(
    ("devices", "home"), [(["cpu", "cuda:1"], "cuda:1"), (["cuda:1", "cpu"], "cuda:1"), (["cpu"], "cuda"), ([], "cuda")]
)
def test_it_meets_the_others_where_their_scale_is(devices: list[str], home: str) -> None:
    """Offloaded parameters lie elsewhere, and another backend may serve that place."""
    scaler = ShardedGradScaler("cpu")
    scaler._device = "cuda"
    with FakeTensorMode():
        params = [torch.ones(1, device=device) for device in devices]
    optimizer: Any = SimpleNamespace(param_groups=[{"params": params}])

    def make(device: Any) -> None:
        scaler._scale = scaler._growth_tracker = torch.ones(())

    with (
        mock.patch.object(scaler, "_lazy_init_scale_growth_tracker", side_effect=make) as made,
        mock.patch.object(Checks, "find_peers", return_value=object()),
        mock.patch.object(failures, "tell_failure") as met,
        mock.patch.object(failures, "spend"),
        pytest.raises(AssertionError),
    ):
        scaler.unscale_(optimizer)
    made.assert_called_once_with(torch.device(home))
    assert met.called

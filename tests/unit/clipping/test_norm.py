"""The norm of batches and the clip that follows: by kernels, by torch's ops, and by a subclass's own."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from batches import batch_of, number
from helpers import DTYPES, KERNELS, PLACES, Place, assert_same, parameters, randn, sum_of_squares, wide
from tensor_pair import Pair
from torch import Tensor, nn

from scaler_triton.clipping import norm
from scaler_triton.clipping.norm import Norm, backend_of, clip_batch_, norm_batch
from scaler_triton.core import plan
from scaler_triton.core.flag import make_flag
from scaler_triton.core.plan import Batch, GradPlan, choose_backends, group
from scaler_triton.core.ranks import Ranks
from scaler_triton.kernels.abi import OVERFLOWS, SQUARES, STATUS, TOTALS

# A kernel sums rows of 512 squares in fp32: their random roundings stay far below this.
TOLERANCE = 1e-6


def with_gaps(dtype: torch.dtype) -> Tensor:
    return randn(80, dtype, 9).view(8, 10)[:, ::3]


def measured(batch: Batch, place: Place, weights: list[float] | None = None, scale: float = 1.0) -> tuple[float, float]:
    """Return sum of squares and flag, the rest of the totals checked."""
    flag, factor = number(0.0, place), number(scale, place)
    totals = norm_batch(batch, factor, flag, weights, place.backend)
    assert backend_of(batch.layout, "auto") == ("torch" if not batch.layout.key.dense else place.backend)
    assert (totals.dtype, totals.shape, totals.device) == (wide(place), (TOTALS,), batch.layout.key.device)
    assert totals[OVERFLOWS:].tolist() == [flag.item(), 0.0, scale, 1 / scale]
    return totals[SQUARES].item(), flag.item()


def test_each_gradient_has_the_weight_of_its_parameter_whichever_batch_holds_it(monkeypatch: Any) -> None:
    params = parameters([torch.full((4,), 2.0), torch.full((4,), 3.0).double()], "cpu")
    made, scale, flag = GradPlan(params, "torch"), torch.tensor(1.0), make_flag(torch.zeros(STATUS))
    for replicas in ([2, 4], [4, 1]):  # another group, or model
        monkeypatch.setattr(norm, "replicas_in", mock.Mock(return_value=replicas))
        look = Norm(flag.device)
        look.begin(made, params, None, flag, scale)
        for batch in made.collect(params):
            look.run(batch, scale, flag)
        assert look.totals[SQUARES].item() == 16.0 / replicas[0] + 36.0 / replicas[1]


@pytest.mark.parametrize("guess", [False, True])
def test_replicas_are_counted_anew_for_other_ranks(guess: bool) -> None:
    params = parameters([torch.ones(1)], "cpu")
    made = GradPlan(params, "torch")
    for count in (2, 4, 4, 2):
        assert norm.replicas_in(made, params, Ranks((), tuple(range(count))), None, guess=guess) == [count]


@pytest.mark.parametrize(("guess", "times"), [(False, 2), (True, 1)])
def test_another_model_is_asked_for_replicas_unless_a_guess_will_do(
    guess: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, params, one, other = mock.Mock(return_value=[1]), parameters([torch.ones(1)], "cpu"), nn.ReLU(), nn.ReLU()
    made = GradPlan(params, "torch")
    monkeypatch.setattr(norm, "replicas_of", asked)
    for model in (one, one, other):
        norm.replicas_in(made, params, None, model, guess=guess)
    assert asked.call_count == times


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_empty_slots(place: Place, dtype: torch.dtype) -> None:
    first, second, third = randn(700, dtype), randn(30, dtype, 1), randn(5, dtype, 2)
    batch, weights = batch_of([first, None, second, third], place), [0.5, 9.0, 1.0, 0.25]
    for given, of_present in ((weights, [0.5, 1.0, 0.25]), (None, None), (weights, [0.5, 1.0, 0.25])):
        want = sum_of_squares([first, second, third], of_present) / 16
        assert measured(batch, place, given, scale=4.0) == (pytest.approx(want, rel=TOLERANCE), 0.0)


def clip(batch: Batch, place: Place, scale: float, max_norm: float, norm: float = 1.0, flag: float = 0.0) -> None:
    totals = torch.tensor([norm**2, flag, 0.0, scale, 1 / scale], dtype=wide(place), device=place.device)
    returned, wrote = clip_batch_(batch, number(scale, place), totals, max_norm, None, 0)
    assert (returned.dtype, returned.shape, returned.device, wrote) == (torch.float32, (), totals.device, False)
    assert_same(returned.cpu(), torch.tensor(norm))


def coefficient(max_norm: float, norm: float) -> float:
    """Return what torch's clipping multiplies by."""
    return (max_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0).item()


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_with_gaps_are_measured_and_clipped(place: Place, dtype: torch.dtype) -> None:
    batch = batch_of([with_gaps(dtype)], place)
    assert measured(batch, place)[0] == pytest.approx(sum_of_squares([with_gaps(dtype)]), rel=TOLERANCE)
    clip(batch, place, 4.0, 0.3)
    want = [with_gaps(dtype) / 4.0]
    torch._foreach_mul_(want, torch.tensor(coefficient(0.3, 1.0)))  # which keeps the dtype
    assert_same(batch.present[0], want[0])


@PLACES
def test_a_batch_without_elements_has_a_norm(place: Place) -> None:
    batch = batch_of([torch.ones(0)], place)
    assert measured(batch, place) == (0.0, 0.0)
    clip(batch, place, 2.0, 0.5, 3.0)


@KERNELS
def test_a_clip_writes_the_status_from_the_totals_of_several_ranks(place: Place) -> None:
    batch, status = batch_of([torch.ones(3)], place), torch.zeros(STATUS, device=place.device)
    backend_of(batch.layout, place.backend)
    totals = torch.tensor([9.0, 2.0, 1.0, 16.0, 0.25], dtype=torch.float64, device=place.device)
    _, wrote = clip_batch_(batch, number(8.0, place), totals, 1.0, status, 2)
    assert (wrote, status.tolist()) == (True, [1.0, 1.0, 16.0, 0.0])


@PLACES
@pytest.mark.parametrize(("right", "bad"), [(16.0, 0.0), (math.inf, 1.0)])
def test_a_subclass_is_measured_and_clipped_by_its_own_ops(place: Place, right: float, bad: float) -> None:
    zero = torch.zeros(3, device=place.device)
    gradient: Any = Pair(torch.full_like(zero, 8.0), torch.full_like(zero, right))
    (batch,) = group({0: gradient})
    choose_backends([batch], place.backend)
    assert measured(batch, place, [0.5])[1] == bad
    clip(batch, place, 4.0, 2.0)
    assert (gradient.left.tolist(), gradient.right.tolist()) == ([2.0] * 3, [right / 4] * 3)
    clip(batch, place, 1.0, 0.5)
    assert gradient.left.tolist() == [2.0 * coefficient(0.5, 1.0)] * 3


@pytest.mark.parametrize("broken", ["", "unscaling", "clipping"])
def test_a_backend_is_chosen_once_for_each_layout_and_is_torchs_where_that_checks(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choose(device: Any, dtype: Any, requested: str, task: str = "unscaling") -> str:
        asked.append((dtype, requested, task))
        return "torch" if task == broken else "triton"

    for module in (norm, plan):
        monkeypatch.setattr(module, "choose", choose)
    batches = group({0: torch.ones(3), 1: torch.ones(9)[::3]})
    choose_backends(batches, "triton")
    for _ in range(2):
        chosen = [backend_of(batch.layout, "triton") for batch in batches]
    assert chosen == ["torch" if broken else "triton", "torch"]
    assert asked[1:] == ([] if broken == "unscaling" else [(torch.float32, "triton", "clipping")])

"""A prepared check: when one is left behind, and what it does not take for the same."""

import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, Wrapper, flags, grads, params_of, sgd, started, take_step, values
from torch import nn

from scaler_triton import GradScaler, StepGuard
from scaler_triton.core.check import Checks


def warmed(place: Place, cls: Any = GradScaler, how: str = "step", **options: Any) -> tuple[Any, Any]:
    """Return a scaler and an optimizer whose check is prepared."""
    known = {"init_scale": 4.0} if cls is GradScaler else {}
    scaler = started(cls, place.device, backend=place.backend, growth_interval=1000, **known) if known else None
    scaler = scaler or started(cls, place.device, backend=place.backend)
    optimizer = sgd([torch.full((3,), 8.0), torch.full((2,), 8.0)], place.device, **options)
    for _ in range(4):
        give(optimizer)
        take_step(scaler, optimizer, how)
    return scaler, optimizer


def give(optimizer: Any, value: float = 8.0) -> None:
    for each in params_of(optimizer):
        if each.grad is not None:
            each.grad.fill_(value)


def in_general(call: Any) -> int:
    """Return how many checks went the general way in a call."""
    with mock.patch.object(Checks, "take_looks", autospec=True, side_effect=Checks.take_looks) as looks:
        call()
    return looks.call_count


@PLACES
@pytest.mark.parametrize("how", ["step", "unscale_"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [GradScaler, StepGuard])
def test_a_steady_check_is_the_prepared_one_and_finds_what_the_first_one_found(
    place: Place, how: str, fused: bool, cls: Any
) -> None:
    scaler, optimizer = warmed(place, cls, how, fused=fused)
    before, size = values(optimizer), 1.0 if cls is GradScaler else 4.0
    give(optimizer)
    assert in_general(lambda: take_step(scaler, optimizer, how)) == 0
    assert values(optimizer) == [each - size for each in before]
    give(optimizer, math.inf)
    assert in_general(lambda: take_step(scaler, optimizer, how)) == 0
    assert scaler.was_skipped(optimizer)
    assert values(optimizer) == [each - size for each in before]
    report = scaler.overflow_report([("a", params_of(optimizer)[0]), ("b", params_of(optimizer)[1])])
    assert [(each.name, each.kinds) for each in report.bad] == [("a", "Inf"), ("b", "Inf")]


def another_parameter(scaler: Any, optimizer: Any) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 8.0)
    optimizer.param_groups[0]["params"][0] = parameter


def another_group(scaler: Any, optimizer: Any) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 8.0)
    optimizer.add_param_group({"params": [parameter]})


def no_gradient(scaler: Any, optimizer: Any) -> None:
    params_of(optimizer)[1].grad = None


def another_dtype(scaler: Any, optimizer: Any) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.full((3,), 8.0, dtype=torch.float64)
    params_of(optimizer)[0].data = parameter.data
    params_of(optimizer)[0].grad = parameter.grad


def strided(scaler: Any, optimizer: Any) -> None:
    params_of(optimizer)[0].grad = torch.full((6,), 8.0)[::2]


def sparse(scaler: Any, optimizer: Any) -> None:
    params_of(optimizer)[0].grad = torch.full((3,), 8.0).to_sparse()


def another_scale(scaler: Any, optimizer: Any) -> None:
    scaler._scale = scaler._scale.clone()


def a_carried_flag(scaler: Any, optimizer: Any) -> None:
    scaler._check_inf_per_device(optimizer)


def another_look(scaler: Any, optimizer: Any) -> None:
    scaler._ours.checks.dividing = list(scaler._ours.checks.dividing)


def another_group_of_ranks(scaler: Any, optimizer: Any) -> None:
    scaler.process_group = object()


CHANGES = [another_parameter, another_group, no_gradient, another_dtype, strided, sparse, another_scale]


@pytest.mark.parametrize("change", [*CHANGES, a_carried_flag, another_look])
def test_whatever_changes_is_checked_the_general_way(change: Any) -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer)
    change(scaler, optimizer)
    assert in_general(lambda: scaler.unscale_(optimizer)) == 1
    assert flags(scaler, optimizer) == [0.0]
    divided = [each.grad.to_dense()[0].item() for each in params_of(optimizer) if each.grad is not None]
    assert divided == [2.0] * (len(params_of(optimizer)) - (change is no_gradient))


def test_a_group_that_comes_later_is_asked() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer)
    another_group_of_ranks(scaler, optimizer)
    with pytest.raises(Exception, match="process_group"):
        scaler.unscale_(optimizer)
    assert grads(optimizer) == [8.0, 8.0]


def test_a_guard_that_gets_a_group_is_no_longer_alone() -> None:
    guard, optimizer = warmed(Place("cpu", "torch"), StepGuard)
    with mock.patch("scaler_triton.core.ranks.is_in_a_group", return_value=True):
        assert not guard._ours.checks.repeat(
            guard._ours.steps.open(optimizer), optimizer, guard._scale, None, divide=True
        )


def test_a_replaced_method_is_called() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer)
    with mock.patch.object(scaler, "_unscale_grads_", side_effect=MemoryError, create=True), pytest.raises(MemoryError):
        scaler.unscale_(optimizer)


def test_the_scale_is_read_in_each_run_and_a_wrapper_is_its_optimizer() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer)
    scaler._scale.fill_(16.0)
    assert in_general(lambda: scaler.unscale_(Wrapper(optimizer))) == 0
    assert grads(optimizer) == [0.5, 0.5]


@PLACES
def test_an_error_in_a_pass_spends_the_step(place: Place) -> None:
    scaler, optimizer = warmed(place)
    give(optimizer)
    prepared = scaler._ours.steps.open(optimizer).plan.prepared
    prepared.passes = [mock.Mock(side_effect=MemoryError)]
    before = values(optimizer)
    with pytest.raises(MemoryError):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
    assert values(optimizer) == before


def test_parameters_are_not_kept_alive() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    gradient = weakref.ref(params_of(optimizer)[0].grad)
    optimizer.zero_grad()
    assert gradient() is None
    assert scaler._ours.steps.open(optimizer).plan.prepared is not None

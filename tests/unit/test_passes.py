"""Gradients of a type of their own: what unscaling and checking mean is for that type to say, on every path."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from helpers import Place, flags, places, started
from tensor_pair import Pair
from torch import Tensor

from scaler_triton import GradScaler

PLACES = pytest.mark.parametrize("place", places(), ids=str)


def pair(device: str, right: float) -> tuple[Any, Tensor, Pair]:
    """Return an optimizer of a plain parameter and a pair, the plain one, and the pair's gradient: 8 and `right`."""
    parameter = torch.nn.Parameter(Pair(torch.zeros(3, device=device), torch.zeros(3, device=device)))
    parameter.grad = Pair(torch.full((3,), 8.0, device=device), torch.full((3,), right, device=device))
    plain = torch.nn.Parameter(torch.zeros(2, device=device))
    plain.grad = torch.full((2,), 8.0, device=device)
    return torch.optim.SGD([plain, parameter], lr=1.0, foreach=False), plain, parameter.grad


@PLACES
def test_one_line_says_that_torch_serves_them(place: Place, caplog: Any) -> None:
    scaler = started(GradScaler, place.device, backend=place.backend)
    with caplog.at_level(logging.DEBUG, "scaler_triton"):
        optimizer = pair(place.device, 8.0)[0]
        for _ in range(2):
            scaler.step(optimizer)
            scaler.update()
    device = torch.zeros(0, device=place.device).device
    lines = [record.getMessage() for record in caplog.records if "subclass" in record.getMessage()]
    assert lines == [f"a tensor subclass of float32 on {device} is served by torch: it implements these ops itself"]


class Unscalable(Pair):
    """A pair that knows nothing but unscaling, as a subclass may that was made for training."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
            torch.ops.aten.detach.default,
        ):
            raise NotImplementedError(f"{func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


@PLACES
@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
def test_an_overflow_asks_nothing_of_a_type_that_torch_would_not_ask(place: Place, method: str) -> None:
    optimizer, plain, gradient = pair(place.device, math.inf)
    optimizer.param_groups[0]["params"][1].grad = Unscalable(gradient.left, gradient.right)
    plain.grad[0] = math.nan
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    getattr(scaler, method)(optimizer)
    assert flags(scaler, optimizer) == [1.0]
    report = scaler.overflow_report()
    reported = [] if place == Place("cuda", "torch") else ["NaN"]  # torch's op on a GPU does not say which
    assert [bad.kinds for bad in report.bad] == reported
    assert "gradients on " in str(report)  # which torch's own op served


@PLACES
@pytest.mark.parametrize(("right", "bad"), [(16.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_unscaling_reaches_every_part(place: Place, right: float, bad: float) -> None:
    optimizer, plain, gradient = pair(place.device, right)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [bad]
    assert gradient.left.tolist() == [2.0] * 3
    assert plain.grad.tolist() == [2.0] * 2
    if not bad:
        assert gradient.right.tolist() == [4.0] * 3


@PLACES
@pytest.mark.parametrize(("right", "bad"), [(16.0, 0.0), (math.inf, 1.0)])
def test_a_check_sees_every_part_and_changes_none(place: Place, right: float, bad: float) -> None:
    optimizer, plain, gradient = pair(place.device, right)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [bad]
    assert (gradient.left.tolist(), gradient.right.tolist()) == ([8.0] * 3, [right] * 3)
    assert plain.grad.tolist() == [8.0] * 2


@pytest.mark.parametrize("updated", [False, True])
@PLACES
def test_they_can_be_swapped_before_their_step(place: Place, updated: bool) -> None:
    """As torch's modules always swap them; it refuses where a gradient has a weak reference."""
    optimizer, plain, _ = pair(place.device, 8.0)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    scaler.unscale_(optimizer)
    if updated:
        scaler.update()
    parameter = optimizer.param_groups[0]["params"][1]
    torch.nn.ParameterList([parameter, plain]).to(torch.float64)
    assert parameter.grad.left.tolist() == parameter.grad.right.tolist() == [2.0] * 3
    assert parameter.grad.dtype is torch.float64

"""Gradients whose form changes at every step, on a torch with its private guards and on one without them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import Place, places
from scaler_triton.known_forms import KnownForms
from torch import Tensor

from scaler_triton import GradScaler

STEPS = 40  # more than there is patience for


@pytest.fixture(params=["guards", "no guards"])
def guards(request: pytest.FixtureRequest, monkeypatch: Any) -> bool:
    """Whether torch has its guards."""
    if request.param == "no guards":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    return request.param == "guards"


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("missing", [False, True])
def test_every_form_is_unscaled_once(place: Place, missing: bool, guards: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4, device=place.device))
    other = torch.nn.Parameter(torch.zeros(3, device=place.device))
    optimizer = torch.optim.SGD([parameter, other], lr=1.0)
    scaler = GradScaler(place.device, init_scale=4.0, growth_interval=1000, backend=place.backend)
    for step in range(STEPS):
        scaler.scale(torch.ones((), device=place.device))
        gradient = torch.full((2, 4), 8.0, device=place.device)
        parameter.grad = gradient.t().contiguous().t() if step % 2 else gradient
        other.grad = None if missing else torch.full((3,), 8.0, device=place.device)
        if step % 7 == 3:
            parameter.grad[1, 2] = torch.nan
        scaler.step(optimizer)
        scaler.update(4.0)
    taken = sum(step % 7 != 3 for step in range(STEPS))
    assert parameter.detach().unique().tolist() == [-2.0 * taken]
    assert other.detach().unique().tolist() == [0.0 if missing else -2.0 * taken]


def _with_gaps(device: str) -> tuple[Tensor, Tensor]:
    """A gradient of eights, and the memory beside it."""
    base = torch.full((4, 8), 8.0, device=device)
    return base[:, :4], base[:, 4:]


def _filled(device: str) -> tuple[Tensor, Tensor]:
    return torch.full((4, 4), 8.0, device=device), torch.full((1,), 8.0)


def _transposed(device: str) -> tuple[Tensor, Tensor]:
    return _filled(device)[0].t(), torch.full((1,), 8.0)


FORMS = (_with_gaps, _filled, _transposed)


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_forms_and_absences_that_change_together(place: Place, number: int, guards: bool) -> None:
    """What was known of a form before another took its place must not pass for the new one."""
    chance = random.Random(number)
    parameters = [torch.nn.Parameter(torch.zeros(4, 4, device=place.device)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = GradScaler(place.device, init_scale=8.0, growth_interval=1000, backend=place.backend)
    scaler.scale(torch.ones((), device=place.device))
    for _ in range(STEPS):
        around = []
        for parameter in parameters:
            parameter.grad = None
            if chance.random() > 0.3:
                gradient, rest = chance.choice(FORMS)(place.device)
                parameter.grad = gradient
                around.append(rest)
        if not around:
            continue
        if chance.random() < 0.5:
            scaler.unscale_(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1e9)
        for parameter in parameters:
            assert parameter.grad is None or parameter.grad.unique().tolist() == [1.0]
        assert all(rest.unique().tolist() == [8.0] for rest in around)
        scaler.update(8.0)


def test_a_form_is_known_again_only_by_guards(guards: bool) -> None:
    """Without them every gradient is compared by hand."""
    known, gradients = KnownForms(2), [torch.ones(2, 3), torch.ones(4)]
    known.learn(gradients)
    assert known.match_all([torch.zeros(2, 3), torch.zeros(4)]) is guards
    for other in (torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.float64)):
        assert not known.match_all([other, gradients[1]])


def test_patience_ends_and_what_was_known_stays_right() -> None:
    known, one, two = KnownForms(1), [torch.ones(2)], [torch.ones(3)]
    for _ in range(STEPS):
        known.learn(one)
    known.learn(two)
    assert known.match_all(one)
    assert not known.match_all(two)

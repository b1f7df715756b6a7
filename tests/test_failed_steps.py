"""Difference 23: after a step that did not return, the gradients of a later loss are unscaled, `update` or not."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, places, sgd, started
from torch.amp.grad_scaler import OptState
from unstepped_setup import SCALE, only, optimizer_of

from scaler_triton import GradScaler, lending

TRAINED = [-0.5 * 8.0 / SCALE] * 3
KINDS = pytest.mark.parametrize("kind", ["plain", "fused"])


def fail(scaler: Any, optimizer: torch.optim.Optimizer, error: type[BaseException] = KeyboardInterrupt) -> None:
    with mock.patch.object(optimizer, "step", side_effect=error), pytest.raises(error):
        scaler.step(optimizer)


def next_batch(scaler: Any, optimizer: torch.optim.Optimizer, value: float = 8.0, *, to_none: bool = True) -> None:
    """`zero_grad`, and backward of another loss."""
    parameter = only(optimizer)
    optimizer.zero_grad(set_to_none=to_none)
    scaler.scale(torch.ones((), device=parameter.device))
    if parameter.grad is None:
        parameter.grad = torch.full_like(parameter, value)
    else:
        parameter.grad.add_(value)


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("value", [8.0, math.inf])
@KINDS
def test_23_the_next_batch_is_unscaled_and_checked(
    kind: str, value: float, to_none: bool, explicit: bool, place: Place
) -> None:
    optimizer = optimizer_of(kind, place.device)
    scaler = started(GradScaler, place.device, init_scale=SCALE, growth_interval=100, backend=place.backend)
    if explicit:
        scaler.unscale_(optimizer)
    fail(scaler, optimizer)
    next_batch(scaler, optimizer, value, to_none=to_none)
    scaler.step(optimizer)
    scaler.update()
    assert only(optimizer).tolist() == (TRAINED if value == 8.0 else [0.0] * 3)
    assert scaler.get_scale() == (SCALE if value == 8.0 else SCALE / 2)


def test_23_torch_steps_with_scaled_gradients() -> None:
    optimizer, scaler = optimizer_of("plain", "cpu"), started(torch.amp.GradScaler, "cpu", init_scale=SCALE)
    fail(scaler, optimizer)
    next_batch(scaler, optimizer)
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [-0.5 * 8.0] * 3


@KINDS
def test_23_a_second_try_on_the_same_gradients_does_not_divide_again(kind: str) -> None:
    """Even if another loss was scaled meanwhile; what a fused step has divided, nobody knows."""
    optimizer, scaler = optimizer_of(kind, "cpu"), started(GradScaler, "cpu", init_scale=SCALE)
    fail(scaler, optimizer)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert only(optimizer).tolist() == ([0.0] * 3 if kind == "fused" else TRAINED)


def test_23_a_loss_before_the_step_is_no_later_one() -> None:
    """What was clipped by hand after it is not taken for its backward."""
    optimizer, scaler = optimizer_of("plain", "cpu"), started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizer)
    scaler.scale(torch.ones(()))
    only(optimizer).grad.mul_(0.5)
    fail(scaler, optimizer)
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [0.5 * each for each in TRAINED]


def test_23_a_step_that_returned_at_a_second_try_is_over() -> None:
    optimizer, scaler = optimizer_of("plain", "cpu"), started(GradScaler, "cpu", init_scale=SCALE)
    fail(scaler, optimizer)
    scaler.step(optimizer)
    next_batch(scaler, optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)\."):
        scaler.step(optimizer)


def test_23_until_the_step_the_calls_before_it_raise_torchs_error() -> None:
    optimizer, scaler = optimizer_of("plain", "cpu"), started(GradScaler, "cpu", init_scale=SCALE)
    fail(scaler, optimizer)
    next_batch(scaler, optimizer)
    called = r"^unscale_\(\) has already been called on this optimizer since the last update\(\)\."
    with pytest.raises(RuntimeError, match=called + "$"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=called + r" clip_grad_norm_ .*, and update\(\) after one left out\.$"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.update()
    scaler.clip_grad_norm_(optimizer, 1e9)
    scaler.step(optimizer)
    assert only(optimizer).tolist() == TRAINED


def test_23_a_wrapper_is_the_optimizer_in_it() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self) -> None:
            self.optimizer.step()

    optimizer, scaler = optimizer_of("plain", "cpu"), started(GradScaler, "cpu", init_scale=SCALE)
    wrapper = Wrapper(optimizer)
    fail(scaler, wrapper)  # type: ignore[arg-type]
    next_batch(scaler, optimizer)
    scaler.step(wrapper)
    assert only(optimizer).tolist() == TRAINED
    states = [scaler._per_optimizer_states[id(each)] for each in (wrapper, optimizer)]
    assert states[0] is states[1]
    assert states[0]["stage"] is OptState.STEPPED


@pytest.mark.parametrize("updated", [False, True])
def test_a_scale_that_an_interrupt_left_on_a_fused_optimizer_is_not_the_users(updated: bool) -> None:
    optimizer, scaler = optimizer_of("fused", "cpu"), started(GradScaler, "cpu", init_scale=SCALE)
    with mock.patch.object(lending, "take_back", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    assert optimizer.grad_scale is scaler._scale  # type: ignore[attr-defined]
    if updated:
        scaler.update()
    next_batch(scaler, optimizer)
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [2 * each for each in TRAINED]


def test_23_one_optimizer_that_failed_leaves_another_alone() -> None:
    """A GAN's: the second is unscaled, and steps after the first one's next batch."""
    first, second = optimizer_of("plain", "cpu"), sgd([torch.full((3,), 8.0)])
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(second)
    fail(scaler, first)
    next_batch(scaler, first)
    for optimizer in (first, second):
        scaler.step(optimizer)
        assert only(optimizer).tolist() == TRAINED

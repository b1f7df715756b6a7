"""Difference 18: gradients that came after `unscale_`, new or written into the old ones, are unscaled by the step."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import started
from unstepped_setup import SCALE, only, optimizer_of, postpone

from scaler_triton import GradScaler


def replaced(parameter: torch.Tensor) -> None:
    parameter.grad = torch.full((3,), 8.0)


def zeroed_and_accumulated(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()
    parameter.grad.add_(8.0)


def freed_and_replaced(parameter: torch.Tensor) -> None:
    parameter.grad = None  # whose memory the next one takes
    parameter.grad = torch.full((3,), 8.0)


@pytest.mark.parametrize("backward", [replaced, zeroed_and_accumulated, freed_and_replaced])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_after_a_skipped_step_new_gradients_are_unscaled(
    kind: str, backward: Callable[[torch.Tensor], None]
) -> None:
    optimizer = optimizer_of(kind, "cpu", value=math.inf)
    scaler = started(GradScaler, "cpu", init_scale=2 * SCALE)
    scaler.unscale_(optimizer)
    scaler.update()  # the user looked at the norm and skipped this one
    backward(only(optimizer))
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [-0.5 * 8.0 / SCALE] * 3


@pytest.mark.parametrize("after", ["unscale_", "clip_grad_norm_", "a step that raises"])
@pytest.mark.parametrize("value", [24.0, math.nan])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_gradients_that_came_between_unscaling_and_update_are_scaled(kind: str, value: float, after: str) -> None:
    """A batch that was given up, and another one in its place."""
    optimizer = optimizer_of(kind, "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    if after == "unscale_":
        scaler.unscale_(optimizer)
    elif after == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 1.0)
    else:
        with mock.patch.object(optimizer, "step", side_effect=KeyError), pytest.raises(KeyError):
            scaler.step(optimizer)
    optimizer.zero_grad()
    only(optimizer).grad = torch.full((3,), value)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert only(optimizer).tolist() == [0.0 if math.isnan(value) else -0.5 * value / SCALE] * 3


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("value", [24.0, math.inf])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_gradients_that_backward_wrote_into_the_same_tensors_are_scaled(
    kind: str, value: float, clips: bool, losses: int
) -> None:
    """As under DDP's `gradient_as_bucket_view`, or where gradients are set to zero."""
    optimizer = optimizer_of(kind, "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizer)
    if clips:
        torch.nn.utils.clip_grad_norm_(only(optimizer), 1.0)
    optimizer.zero_grad(set_to_none=False)
    for number in range(losses):
        loss = scaler.scale((only(optimizer) * value / SCALE).sum())
        if number == 0:
            loss.backward()
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert only(optimizer).tolist() == [0.0 if math.isinf(value) else -0.5 * value / SCALE] * 3


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_gradients_that_were_clipped_before_another_loss_are_divided_once(kind: str) -> None:
    """Another optimizer's whole step may come in between."""
    optimizer, other = optimizer_of(kind, "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(only(optimizer), 1.0)
    clipped = only(optimizer).grad.clone()  # type: ignore[union-attr]
    other.zero_grad()
    scaler.scale(only(other).sum()).backward()
    scaler.step(other)
    scaler.update()
    scaler.step(optimizer)
    assert only(optimizer).tolist() == (-0.5 * clipped).tolist()


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_clipping_after_another_loss_is_no_sign_of_new_gradients(kind: str) -> None:
    optimizer, other = optimizer_of(kind, "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    scaler.unscale_(optimizer)
    other.zero_grad()
    scaler.scale(only(other).sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0, parameters=[only(optimizer)])
    clipped = only(optimizer).grad.clone()  # type: ignore[union-attr]
    scaler.step(other)
    scaler.update()
    scaler.step(optimizer)
    assert only(optimizer).tolist() == (-0.5 * clipped).tolist()


def test_18_gradients_that_came_before_some_were_clipped_are_scaled() -> None:
    optimizer = optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizer)
    only(optimizer).grad = torch.full((3,), 24.0)
    scaler.clip_grad_norm_(optimizer, 1e6, parameters=[only(optimizer)])
    scaler.update()
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [-0.5 * 24.0 / SCALE] * 3


def test_18_gradients_that_came_after_there_was_none_are_scaled() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    late.zero_grad()
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(late)
    only(late).grad = torch.full((3,), math.nan)
    scaler.step(early)
    scaler.update()
    scaler.step(late)
    assert only(late).tolist() == [0.0] * 3


def assert_next_gradients_are_divided(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    only(optimizer).grad = torch.full((3,), 8.0)
    scaler.unscale_(optimizer)
    assert only(optimizer).grad.tolist() == [8.0 / SCALE] * 3  # type: ignore[union-attr]


class AskingByArgument(torch.optim.SGD):
    """Takes the scaler, the older way, and raises before it asks for the flag."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
        raise OSError("no step")


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_18_a_step_that_raised_says_nothing_of_the_next_gradients() -> None:
    late = AskingByArgument([torch.nn.Parameter(torch.zeros(3))], lr=0.5)
    only(late).grad = torch.full((3,), 8.0)
    early, scaler = optimizer_of("plain", "cpu"), started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    with pytest.raises(OSError, match="no step"):
        scaler.step(late)
    assert_next_gradients_are_divided(scaler, late)


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_a_step_that_was_refused_says_nothing_of_the_next_gradients(kind: str) -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of(kind, "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    scaler.process_group = "no group"
    with pytest.raises((TypeError, ValueError)):
        scaler.step(late)
    scaler.process_group = None
    assert_next_gradients_are_divided(scaler, late)


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_a_step_that_ran_out_of_memory_says_nothing_of_the_next_gradients(kind: str) -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of(kind, "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    with (
        mock.patch.object(GradScaler, "_check_grads", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        scaler.step(late)
    assert_next_gradients_are_divided(scaler, late)


def test_18_only_the_next_step_counts_and_nothing_is_kept_alive() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    gradient = weakref.ref(only(late).grad)
    only(late).grad = None
    gc.collect()
    assert gradient() is None
    only(late).grad = torch.full((3,), 8.0)
    scaler.step(late)
    scaler.update()
    assert not any(record.left_unscaled for record in scaler._records.all())

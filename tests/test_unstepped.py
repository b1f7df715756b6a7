"""Difference 18: `update` between `unscale_` and the same optimizer's step does not make the step unscale again."""

from __future__ import annotations

import gc
import math
from unittest import mock

import pytest
import torch
from helpers import Place, places, sgd, started
from torch.amp.grad_scaler import OptState
from unstepped_setup import SCALE, only, optimizer_of, postpone

from scaler_triton import GradScaler


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_a_postponed_step_divides_once(kind: str, place: Place) -> None:
    early, late = optimizer_of("plain", place.device), optimizer_of(kind, place.device)
    scaler = started(GradScaler, place.device, init_scale=SCALE, growth_interval=1, backend=place.backend)
    postpone(scaler, late, early)
    scaler.step(late)
    assert only(late).tolist() == only(early).tolist() == [-0.5 * 8.0 / SCALE] * 3
    scaler.update()


@pytest.mark.parametrize("came", [False, True])
def test_18_a_parameter_without_a_gradient_is_no_sign_of_new_ones_until_it_gets_one(came: bool) -> None:
    early, late = optimizer_of("plain", "cpu"), sgd([torch.full((3,), 8.0), torch.full((3,), 8.0)], "cpu")
    first, second = late.param_groups[0]["params"]
    second.grad = None
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    if came:
        second.grad = torch.full((3,), 8.0)
    scaler.step(late)
    assert first.tolist() == [-0.5 * 8.0 / SCALE / (SCALE if came else 1.0)] * 3
    assert second.tolist() == [-0.5 * 8.0 / SCALE if came else 0.0] * 3


def test_18_a_call_that_was_refused_does_not_end_the_wait() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    scaler.step(early)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.clip_grad_norm_([early, late], 1.0)
    scaler.update()
    scaler.step(late)
    assert only(late).tolist() == [-0.5 * 8.0 / SCALE] * 3


def test_18_a_check_after_the_wait_looks_at_the_gradients() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    postpone(scaler, late, early)
    scaler._unscale_once(late)
    only(late).grad[0] = math.nan
    assert [flag.item() for flag in scaler._check_inf_per_device(late).values()] == [1.0]
    scaler.step(late)
    assert only(late).tolist() == [0.0] * 3


def test_18_that_there_are_no_gradients_is_no_sign_of_the_same_ones() -> None:
    """An optimizer that somebody else unscaled had none, and has none again."""
    late = optimizer_of("plain", "cpu")
    only(late).grad = None
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler._check_inf_per_device(late)
    flags = {torch.device("cpu"): torch.ones(())}
    scaler._per_optimizer_states[id(late)].update(stage=OptState.UNSCALED, found_inf_per_device=flags)
    scaler.update()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(late)


def test_18_gradients_without_a_count_of_writes_are_known_by_themselves() -> None:
    """As inference tensors are."""
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    with torch.inference_mode():
        only(late).grad = torch.full((3,), 8.0)
        postpone(scaler, late, early)
        scaler.step(late)
    assert only(late).tolist() == only(early).tolist()


def test_18_torch_divides_twice() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(torch.amp.GradScaler, "cpu", init_scale=SCALE, growth_interval=1)
    postpone(scaler, late, early)
    scaler.step(late)
    assert only(late).tolist() == [-0.5 * 8.0 / SCALE / (2 * SCALE)] * 3


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_a_postponed_step_is_skipped_for_the_overflow_of_its_gradients(kind: str) -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of(kind, "cpu", value=math.inf)
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    postpone(scaler, late, early)
    scaler.step(late)
    assert only(late).tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_an_update_that_raises_forgets_nothing(kind: str) -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of(kind, "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=1)
    postpone(scaler, late, early)
    assert scaler._found_inf_per_device(late) == {}  # asking is allowed, and checks nothing
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.step(late)
    assert only(late).tolist() == only(early).tolist()


def test_18_after_a_fused_step_that_raised_the_same_gradients_are_skipped() -> None:
    """Nobody can tell which of them it divided."""
    optimizer = optimizer_of("fused", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    step, optimizer.step = optimizer.step, failing  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        scaler.step(optimizer)
    optimizer.step = step  # type: ignore[method-assign]
    scaler.update()
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [0.0] * 3


def failing() -> None:
    raise ArithmeticError


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_18_a_postponed_step_looks_at_its_gradients_again(kind: str) -> None:
    """What no counter tells of may be wrong by a factor, but never goes into the weights as an Inf."""
    early, late = optimizer_of("plain", "cpu"), optimizer_of(kind, "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    only(late).grad.data.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(late)
    assert scaler.was_skipped(late)
    assert only(late).tolist() == [0.0] * 3


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("chosen", [False, True], ids=["all", "some parameters"])
def test_18_gradients_that_clipping_summed_are_the_same_ones(norm_type: float, chosen: bool) -> None:
    gradient = torch.sparse_coo_tensor([[0, 0, 1, 2]], [4.0, 4.0, 8.0, 8.0], check_invariants=True)
    optimizer = sgd([gradient])
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    parameters = [only(optimizer)] if chosen else None
    norm = scaler.clip_grad_norm_(optimizer, 1e6, norm_type, parameters=parameters)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.full((3,), 8.0 / SCALE), norm_type))
    scaler.update()
    scaler.step(optimizer)
    assert only(optimizer).tolist() == [-0.5 * 8.0 / SCALE] * 3


def test_18_unscale_by_hand_is_obeyed() -> None:
    """Whoever replays a captured backward writes gradients that no counter tells of, and says so by unscaling."""
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    scaler.unscale_(late)
    assert only(late).grad is not None
    assert only(late).grad.tolist() == [8.0 / SCALE / SCALE] * 3  # type: ignore[union-attr]


def test_18_an_entry_dies_with_its_optimizer() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    del late
    gc.collect()
    only(early).grad = torch.ones(3)
    scaler.step(early)
    scaler.update()
    assert [record.owner() for record in scaler._records.all()] == [early]


def test_18_entries_die_with_the_last_optimizer() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    only(early).grad = torch.ones(3)
    scaler.step(early)
    del early, late
    gc.collect()
    scaler.update()
    assert scaler._records.all() == []


def test_18_optimizers_that_are_equal_are_two() -> None:
    """As dataclasses with the same settings are."""

    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 8.0)
    late, early = (Equal([parameter], lr=0.5) for parameter in parameters)
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    scaler.step(late)
    assert only(late).tolist() == [-0.5 * 8.0 / SCALE] * 3


def test_18_an_optimizer_at_a_freed_id_starts_anew() -> None:
    """Difference 11: although its gradients are those that another one had unscaled."""
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=100)
    postpone(scaler, late, early)
    parameter, records = only(late), scaler._records._records
    record = records.pop(id(late))
    del late
    gc.collect()
    heir = torch.optim.SGD([parameter], lr=0.5)
    records[id(heir)] = record
    scaler.step(heir)
    assert parameter.tolist() == [-0.5 * 8.0 / SCALE / SCALE] * 3


def test_18_without_gradients_the_next_step_raises_as_ever() -> None:
    optimizer = optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizer)
    scaler.update()
    only(optimizer).grad = None
    with pytest.raises(AssertionError, match="^No inf checks were recorded for this optimizer.$"):
        scaler.step(optimizer)


def test_18_a_step_that_is_refused_forgets_nothing() -> None:
    early, late = optimizer_of("plain", "cpu"), optimizer_of("plain", "cpu")
    scaler = started(GradScaler, "cpu", init_scale=SCALE, growth_interval=1)
    postpone(scaler, late, early)
    with (
        mock.patch.object(scaler, "_agreement", side_effect=ValueError("process_group")),
        pytest.raises(ValueError, match="process_group"),
    ):
        scaler.step(late)
    scaler.step(late)
    assert only(late).tolist() == only(early).tolist()

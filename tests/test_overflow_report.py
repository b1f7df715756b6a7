"""`overflow_report`: which gradients made the last step be skipped, on every path, and nothing of earlier ones."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, places, started
from scaler_triton.overflow_marks import INF, NAN, OverflowMarks
from torch import nn

from scaler_triton import GradScaler

PLACES = pytest.mark.parametrize("place", places(), ids=str)
CLIPS = pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


def setup(place: Place, fused: bool) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    return started(GradScaler, place.device, init_scale=8.0, backend=place.backend), model, optimizer


def give_gradients(model: nn.Module, **bad: list[float]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        for index, value in enumerate(bad.get("_" + name.replace(".", "_"), [])):
            parameter.grad.view(-1)[index] = value


def step(scaler: Any, model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool, **bad: list[float]) -> None:
    optimizer.zero_grad()
    give_gradients(model, **bad)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


def told(scaler: Any, model: nn.Module) -> list[tuple[str, str, int]]:
    if scaler._records.plans() and scaler._backend == "torch" and next(model.parameters()).is_cuda:
        pytest.skip("torch's op on a GPU does not tell")
    return [(each.name, each.kinds, each.numel) for each in scaler.overflow_report(model).bad]


@PLACES
@FUSED
@CLIPS
def test_the_last_skip_is_told_and_survives_good_steps(place: Place, fused: bool, clip: bool) -> None:
    scaler, model, optimizer = setup(place, fused)
    assert str(scaler.overflow_report(model)) == "No step was skipped."
    step(scaler, model, optimizer, clip, _0_bias=[math.inf])
    assert told(scaler, model) == [("0.bias", "Inf", 7)]
    step(scaler, model, optimizer, clip, _1_weight=[math.nan, -math.inf], _1_bias=[math.nan])
    want = [("1.weight", "NaN and Inf", 21), ("1.bias", "NaN", 3)]
    assert told(scaler, model) == want
    for _ in range(3):
        step(scaler, model, optimizer, clip)
        optimizer.zero_grad()
        assert told(scaler, model) == want
    assert scaler.overflow_report(model).update == 2
    step(scaler, model, optimizer, clip, _0_weight=[math.nan])
    assert told(scaler, model) == [("0.weight", "NaN", 35)]


@PLACES
def test_before_the_update_the_current_step_is_told(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan if parameter.numel() == 3 else 1.0)
    scaler.unscale_(optimizer)
    assert told(scaler, model) == [("1.bias", "NaN", 3)]
    assert scaler.overflow_report(model).update is None


@PLACES
@FUSED
def test_a_step_that_comes_after_an_update_is_told_of_too(place: Place, fused: bool) -> None:
    """As where a framework updates after each of several optimizers that were unscaled together."""
    scaler, model, optimizer = setup(place, fused)
    step(scaler, model, optimizer, False, _0_weight=[math.nan])
    parameter = nn.Parameter(torch.ones(2, device=place.device))
    parameter.grad = torch.ones_like(parameter)
    other = torch.optim.SGD([parameter], lr=0.1)
    give_gradients(model, _0_bias=[math.inf])
    for each in (optimizer, other):
        scaler.unscale_(each)
    for each in (other, optimizer):
        scaler.step(each)
        scaler.update()
    assert scaler.stats().skipped == 3
    assert told(scaler, model) == [("0.bias", "Inf", 7)]
    step(scaler, model, optimizer, False)
    assert told(scaler, model) == [("0.bias", "Inf", 7)]
    step(scaler, model, optimizer, False, _1_bias=[math.nan])
    assert told(scaler, model) == [("1.bias", "NaN", 3)]


@PLACES
def test_such_a_step_tells_nothing_of_skips_before(place: Place) -> None:
    """Its flag may be another rank's."""
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, False, _0_weight=[math.nan])
    give_gradients(model)
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.stats().skipped == 3
    assert told(scaler, model) == []


@PLACES
def test_a_good_step_after_an_update_leaves_what_was_told(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    for bad in ({"_0_bias": [math.inf]}, {}):
        give_gradients(model, **bad)
        scaler.unscale_(optimizer)
        scaler.update()
        scaler.step(optimizer)
        scaler.update()
    assert told(scaler, model) == [("0.bias", "Inf", 7)]


@PLACES
def test_an_overflow_behind_a_good_step_after_an_update_is_told(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    _, other_model, other = setup(place, fused=False)
    give_gradients(model)
    give_gradients(other_model, _0_bias=[math.inf])
    for each in (optimizer, other):
        scaler.unscale_(each)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    step(scaler, model, optimizer, False, _1_bias=[math.nan])
    assert told(scaler, model) == [("1.bias", "NaN", 3)]


@PLACES
def test_an_overflow_behind_a_step_that_somebody_let_pass_is_told(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    give_gradients(model, _0_bias=[math.inf])
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(0.0)
    scaler.update()
    step(scaler, model, optimizer, False, _1_bias=[math.nan])
    assert ("1.bias", "NaN", 3) in told(scaler, model)


@PLACES
def test_a_step_that_failed_after_one_update_is_told_of_after_the_next(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=True)
    give_gradients(model, _0_bias=[math.inf])
    scaler.unscale_(optimizer)
    scaler.update()
    with mock.patch.object(optimizer, "step", side_effect=RuntimeError("no")), pytest.raises(RuntimeError):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert told(scaler, model) == [("0.bias", "Inf", 7)]


def test_as_a_person_reads_it() -> None:
    scaler, model, optimizer = setup(Place("cpu", "torch"), fused=False)
    step(scaler, model, optimizer, False)
    step(scaler, model, optimizer, False, _0_weight=[math.nan], _1_bias=[math.inf])
    assert str(scaler.overflow_report(model.named_parameters())) == (
        "The last skip, at update 2: 2 bad gradients on rank 0.\n"
        "rank  parameter  holds  numel\n"
        "----  ---------  -----  -----\n"
        "   0  0.weight   NaN       35\n"
        "   0  1.bias     Inf        3"
    )
    assert [each.name for each in scaler.overflow_report().bad] == [
        "optimizer 0, parameter 0",
        "optimizer 0, parameter 3",
    ]


def test_wrappers_are_left_out_of_names() -> None:
    scaler, model, optimizer = setup(Place("cpu", "torch"), fused=False)
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    named = [
        (f"_orig_mod.a._fsdp_wrapped_module.b._checkpoint_wrapped_module.{n}", p) for n, p in model.named_parameters()
    ]
    assert [each.name for each in scaler.overflow_report(named).bad] == ["a.b.0.bias"]


@PLACES
def test_a_skip_by_somebody_elses_flag_is_nothing_here(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.overflow_report(model).bad == ()
    assert "nothing known on any rank." in str(scaler.overflow_report(model))


@PLACES
def test_good_steps_mark_nothing(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    for _ in range(3):
        step(scaler, model, optimizer, False)
    (plan,) = scaler._records.plans()
    assert plan.marks.of(0) == {}
    assert all(not table.bits.any() for layout in plan.layouts for table in layout.tables.values())


@PLACES
def test_marks_go_by_the_counters_wherever_these_have_moved(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    scaler._counters.on_host()  # as an update there does
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    step(scaler, model, optimizer, False, _1_bias=[math.nan])
    assert told(scaler, model) == [("1.bias", "NaN", 3)]


def test_marks_of_long_ago_are_dropped() -> None:
    scaler, model, optimizer = setup(Place("cpu", "torch"), fused=False)
    for _ in range(9):
        step(scaler, model, optimizer, False, _0_bias=[math.inf])
    (plan,) = scaler._records.plans()
    assert [generation for generation in range(9) if plan.marks.of(generation)] == [5, 6, 7, 8]


@PLACES
def test_an_overflow_that_skips_no_step_leaves_the_last_skip(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    for _ in range(2):
        give_gradients(model, _0_bias=[math.nan], _1_bias=[math.nan])
        scaler._check_inf_per_device(optimizer)
        step(scaler, model, optimizer, False)  # with other gradients
        assert told(scaler, model) == [("0.bias", "Inf", 7)]


@PLACES
@CLIPS
def test_gradients_of_a_new_form_leave_the_last_skip(place: Place, clip: bool) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, clip, _0_bias=[math.inf], _1_weight=[math.nan])
    want = told(scaler, model)
    for turn in range(3):  # each plans anew
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        weight = model[turn % 2].weight
        weight.grad = torch.ones(weight.shape[::-1], device=place.device).t()
        scaler.step(optimizer)
        scaler.update()
        assert told(scaler, model) == want
    step(scaler, model, optimizer, clip, _1_bias=[math.nan])
    assert told(scaler, model) == [("1.bias", "NaN", 3)]


@PLACES
def test_kinds_of_one_parameter_add_up_over_forms(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    weight = model[0].weight
    forms = [torch.ones(7, 5), torch.ones(5, 7).t(), torch.ones(7, 10)[:, ::2]]
    for form, value in zip(forms, (math.nan, math.inf, 1.0), strict=True):
        weight.grad = form.to(place.device)
        weight.grad[0, 0] = value
        scaler._check_inf_per_device(optimizer)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {}  # and again, in the same step
    weight.grad[0, 0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert told(scaler, model) == [("0.weight", "NaN and Inf", 35)]


@PLACES
def test_a_step_that_ends_with_a_new_scale_is_told_of_as_others_are(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    give_gradients(model, _1_bias=[math.nan])
    scaler.step(optimizer)
    scaler.update(8.0)
    assert told(scaler, model) == [("1.bias", "NaN", 3)]
    assert scaler.overflow_report(model).update == 2
    step(scaler, model, optimizer, False, _1_weight=[math.nan])
    assert told(scaler, model) == [("1.weight", "NaN", 21)]


@PLACES
def test_a_step_after_an_update_that_ends_with_a_new_scale_is_told_of(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    give_gradients(model, _0_bias=[math.inf])
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler.update(8.0)
    assert told(scaler, model) == [("0.bias", "Inf", 7)]
    step(scaler, model, optimizer, False, _1_bias=[math.nan])
    assert told(scaler, model) == [("1.bias", "NaN", 3)]


@PLACES
@CLIPS
@FUSED
def test_what_only_unscaling_makes_infinite_is_not_to_blame(place: Place, clip: bool, fused: bool) -> None:
    scaler, model, optimizer = setup(place, fused)
    scaler._scale.fill_(2.0**-100)
    step(scaler, model, optimizer, clip, _0_bias=[math.inf], _1_bias=[1e30])
    assert told(scaler, model) == [("0.bias", "Inf", 7)]


@PLACES
def test_parameters_that_come_and_go_leave_the_last_skip(place: Place) -> None:
    scaler, model, _ = setup(place, fused=False)
    first, second = model[0], model[1]
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first.weight.grad, first.bias.grad = torch.ones_like(first.weight), torch.full_like(first.bias, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert told(scaler, model) == [("0.bias", "Inf", 7)]
    optimizer.add_param_group({"params": list(second.parameters())})
    optimizer.param_groups.reverse()  # every position changes
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)
    scaler.update()
    assert told(scaler, model) == [("0.bias", "Inf", 7)]


@PLACES
def test_a_loaded_checkpoint_begins_without_marks(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    saved = scaler.state_dict()
    step(scaler, model, optimizer, False, _0_bias=[math.inf])
    scaler.load_state_dict(saved)
    assert told(scaler, model) == []
    step(scaler, model, optimizer, False, _1_bias=[math.nan])
    assert told(scaler, model) == [("1.bias", "NaN", 3)]


@PLACES
def test_a_step_that_comes_after_a_loaded_checkpoint_tells_what_its_gradients_hold(place: Place) -> None:
    scaler, model, optimizer = setup(place, fused=False)
    give_gradients(model, _0_bias=[math.inf])
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
    assert [each[:2] for each in told(scaler, model)] == [("0.bias", "Inf")]


@PLACES
def test_sparse_gradients_are_told_or_said_not_to_be(place: Place) -> None:
    parameter = nn.Parameter(torch.zeros(4, 2, device=place.device))
    scaler = started(GradScaler, place.device, init_scale=8.0, backend=place.backend)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step(value: float) -> None:
        values, index = torch.full((1, 2), value, device=place.device), torch.tensor([[1]], device=place.device)
        parameter.grad = torch.sparse_coo_tensor(index, values, parameter.shape, check_invariants=True)
        scaler.step(optimizer)

    step(1.0)
    assert str(scaler.overflow_report()) == "No step was skipped."
    scaler.update()
    step(math.inf)
    report = scaler.overflow_report([("table", parameter)])
    if place == Place("cpu", "torch"):
        assert [(each.name, each.kinds) for each in report.bad] == [("table", "Inf")]
    elif place.backend == "triton":
        assert report.untold == (f"sparse and Partial gradients on {parameter.device}",)


def test_archived_marks_of_two_generations_stay_apart() -> None:
    marks = OverflowMarks(1)
    for generation, kind in ((5, INF), (9, NAN)):  # which share a place
        marks._archive([0], torch.tensor([[0, generation << 2 | kind, 0, 0]], dtype=torch.int32))
    assert [marks.of(generation) for generation in (5, 9, 13)] == [{}, {0: NAN}, {}]

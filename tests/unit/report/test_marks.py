"""Marks: what every path leaves of gradients that are not finite, and in which generation."""

import math
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Place, parameters, sgd, started
from report_cases import CPU, PLACES, Run
from torch import nn

from scaler_triton import GradScaler, StepGuard
from scaler_triton.core.passes import table_of
from scaler_triton.core.plan import GradPlan
from scaler_triton.core.step import parameters_of
from scaler_triton.core.update import Counters
from scaler_triton.kernels.abi import COUNTERS, INF, NAN, SKIPPED
from scaler_triton.report.marks import Marks, marks_of


@PLACES
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", ["step", "clip"])
def test_the_last_skip_is_reported_and_survives_good_steps(place: Place, fused: bool, how: str) -> None:
    run = Run(place, fused)
    for _ in range(2):
        run.step(how)
        assert str(run.scaler.overflow_report(run.model)) == "No step was skipped."
    assert not any(table.bits.any() for layout in run.plan().layouts for table in layout.tables.values())
    run.step(how, _0_bias=[math.inf])
    assert run.found() == [("0.bias", "Inf")]
    counters = run.scaler._ours.counters
    run.plan().home, counters.values = None, counters.on(torch.device(place.device)) * 1  # as where the scale has moved
    run.scaler._scale = run.scaler._scale.clone()
    for _ in range(3):
        run.step(how)
    bad = {"_1_weight": [math.nan, -math.inf], "_1_bias": [math.nan]}
    run.step(how, **bad)
    for _ in range(3):
        assert run.found() == [("1.weight", "NaN and Inf"), ("1.bias", "NaN")]
        run.step(how)
    last = run.scaler.overflow_report(run.model)
    assert str(last).startswith("The last skip, at update 7: 2 bad gradients on rank 0.\n")
    assert [each.numel for each in last.bad] == [21, 3]
    run.step(how, _0_weight=[math.nan])
    assert run.found() == [("0.weight", "NaN")]


@PLACES
@pytest.mark.parametrize("how", ["step", "clip"])
def test_what_only_unscaling_makes_infinite_is_reported_at_most_beside_what_was(place: Place, how: str) -> None:
    """On the CPU gradients are looked at after torch's op, which divides by a scale far below 1."""
    run = Run(place)
    run.scaler._scale.fill_(2.0**-100)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(4):
            if place.device == "cuda":  # it is read when it has arrived on the host
                torch.cuda.synchronize()
            run.step(how, _1_bias=[1e30])
    (text,) = (str(each.message) for each in caught)
    assert text.startswith("[ST06] A step of SGD by finite gradients has left 1 parameter")
    assert str(run.scaler.overflow_report(run.model)) == "No step was skipped."
    run.step(how, _0_bias=[math.inf], _1_bias=[1e30])
    beside = [("1.bias", "Inf")] if (place.backend, how) == ("torch", "step") else []
    assert run.found() == [("0.bias", "Inf"), *beside]


@PLACES
@pytest.mark.parametrize("change", ["form", "parameters", "checkpoint"])
def test_after_a_change_nothing_is_known_of_earlier_steps(place: Place, change: str) -> None:
    run = Run(place)
    saved = run.scaler.state_dict()
    run.step(_0_bias=[math.inf])
    run.give()
    if change == "form":
        weight = run.model[0].weight
        weight.grad = torch.ones(weight.shape[::-1], device=place.device).t()
    elif change == "parameters":
        run.optimizer.add_param_group({"params": parameters([torch.ones(1)], place.device)})
    else:
        run.scaler.load_state_dict(saved)
        assert run.found() == []
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if place.backend == "triton" or change != "form":
        assert run.found() == []
    run.step(_1_bias=[math.nan])
    assert run.found() == [("1.bias", "NaN")]


@PLACES
def test_sparse_gradients_are_marked_or_said_not_to_be(place: Place) -> None:
    run, table = Run(place), nn.Parameter(torch.zeros(4, 2, device=place.device))
    optimizer = torch.optim.SGD([table], lr=0.1)
    for value in (1.0, math.inf):
        values, index = torch.full((1, 2), value, device=place.device), torch.tensor([[1]], device=place.device)
        table.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=True)
        run.scaler.step(optimizer)
        if value == 1.0:
            assert str(run.scaler.overflow_report()) == "No step was skipped."
            run.scaler.update()
    last = run.scaler.overflow_report([("table", table)])
    if place.backend == "torch":
        assert [(each.name, each.kinds) for each in last.bad] == [("table", "Inf")]
    else:
        assert last.not_covered == (f"sparse and Partial gradients on {table.device}",)


@PLACES
def test_a_carried_step_is_named_for_the_skip_that_it_caused_and_no_later_one(place: Place) -> None:
    scaler = started(GradScaler, place.device, backend=place.backend)
    carried, other = (sgd([torch.tensor([math.inf])], place.device) for _ in range(2))
    scaler.unscale_(carried)
    scaler.update()
    scaler._check_inf_per_device(carried)
    scaler.step(carried)
    scaler.update()
    assert [each.name for each in scaler.overflow_report().bad] == ["optimizer 0, parameter 0"]
    scaler.step(other)
    assert [each.name for each in scaler.overflow_report().bad] == ["optimizer 1, parameter 0"]
    marks = marks_of(scaler._ours.steps.open(carried).plan)
    assert (marks.cause(1), marks.cause(0)) == (0, None)
    marks.forget()
    assert marks.cause(1) is marks.cause(-1) is None  # with no skip counted


@PLACES
def test_a_carried_step_is_not_named_with_what_it_was_skipped_for_before(place: Place) -> None:
    run = Run(place)
    run.step(_0_bias=[math.inf])
    run.give(_1_bias=[math.inf])
    run.scaler.unscale_(run.optimizer)
    run.scaler.update()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.found() == [("1.bias", "Inf")]


def test_a_carried_step_that_another_ranks_gradient_skips_is_no_fault_of_another_optimizer() -> None:
    scaler = started(GradScaler, "cpu")
    carried, *others = (sgd([torch.tensor([number])]) for number in (1.0, 1.0, math.inf))
    scaler.clip_grad_norm_([carried, others[0]], 1.0)
    scaler._found_inf_per_device(carried)[CPU].fill_(1.0)
    for optimizer in (others[1], carried):
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.stats().skipped, scaler.overflow_report().bad) == (2, ())


def test_the_host_keeps_a_few_generations() -> None:
    run = Run(Place("cpu", "torch"))
    for _ in range(9):
        run.step(_0_bias=[math.inf])
    assert [generation for generation in range(9) if marks_of(run.plan()).of([generation])] == [5, 6, 7, 8]


def marked(home: torch.device = CPU, counters: Counters | None = None) -> tuple[Marks, Any, GradPlan]:
    """Return marks, the layout of gradients on the CPU, and the plan that holds it, which the caller keeps alive."""
    skip_count = (counters or Counters()).skip_count_on(home)
    plan = GradPlan(parameters([torch.ones(3), torch.ones(3)], "cpu"), "torch", home=home, skip_count=skip_count)
    (layout,) = plan.layouts
    return marks_of(plan), layout, plan


def test_a_kernel_reads_the_generation_on_the_scales_device_only() -> None:
    """One that reads another GPU's memory ends the process."""
    counters = Counters()
    _marks, layout, plan = marked(CPU, counters)
    layout.backend = "triton"
    (batch,) = plan.collect(params := parameters([torch.ones(3), torch.ones(3)], "cpu"))
    for mode in ("check", "norm"):
        for values in ([7] * COUNTERS, [8] * COUNTERS):
            counters.set(values)
            table = table_of(batch, mode)
            assert table.generation.data_ptr() == counters.on(CPU)[SKIPPED].data_ptr()
            assert table.generation.tolist() == values[:1]
    del params
    marks, layout, _plan = marked(torch.device("cuda", 0))
    layout.backend = "triton"
    assert layout.skip_count is None
    layout.device = torch.device("cuda", 1)
    assert list(marks.not_covered(torch.device("cuda", 0))) == ["gradients on cuda:1, where the scale is not"]


def test_the_same_plan_has_the_same_marks_and_does_not_outlive_it() -> None:
    marks, _layout, plan = marked()
    assert marks_of(plan) is marks
    gone = weakref.ref(plan)
    del plan
    assert gone() is None


def test_a_generations_marks_are_told_from_others_in_their_place() -> None:
    marks, layout, _plan = marked()
    bits = torch.tensor([[5 << 2 | INF, 0, 2 << 2 | NAN, 0], [9 << 2 | NAN, 5 << 2 | NAN, 0, 0]], dtype=torch.int32)
    table = SimpleNamespace(bits=bits)
    layout.tables = {"check": table, "clip": table, "norm": SimpleNamespace(bits=(bits & 3) + (5 << 2))}
    assert [marks.of([generation]) for generation in (2, 9, 3)] == [{0: NAN}, {1: NAN}, {}]
    assert marks.of([5]) == {0: INF | NAN, 1: NAN}
    marks.forget()
    assert marks.of([2]) == {}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("plain", [True, False])
def test_what_torchs_op_checks_without_marks_is_said(device: str, backend: Any, plain: bool) -> None:
    marks, layout, _plan = marked()
    layout.device = torch.device(device)
    layout.key, layout.backend = layout.key._replace(plain=plain), backend
    covered = backend == "triton" or (device == "cpu" and plain)
    assert list(marks.not_covered(layout.device)) == (
        [] if covered else [f"gradients on {device} that torch's own op serves"]
    )


@PLACES
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("joint", [0, 1, 2])
@pytest.mark.parametrize("guards", [False, True])
def test_updates_between_check_and_step_lose_no_cause(place: Place, count: int, joint: int, guards: bool) -> None:
    """All of one batch; what is clipped together skips by the first one's overflow, or by the spike of all.

    With `joint` 2 the last one is then clipped again, alone.
    """
    options: dict[str, Any] = {"spike_sigma": 3.0, "window": 2} if guards else {"init_scale": 4.0}
    scaler: Any = (StepGuard if guards else GradScaler)(place.device, backend=place.backend, **options)
    scaler.scale(torch.ones((), device=place.device))
    held = [sgd([torch.ones(1)], place.device) for _ in range(count)]
    for size in (1.0, 2.0, 1.5, 1e6 if guards else math.inf, 1.0):
        for number, optimizer in enumerate(held):
            optimizer.param_groups[0]["params"][0].grad.fill_(1.0 if joint and not guards and number else size)
        scaler.clip_grad_norm_(held, 1.0) if joint else [scaler.clip_grad_norm_(each, 1.0) for each in held]
        if joint == 2:
            scaler.clip_grad_norm_(held[-1], 1.0, parameters=parameters_of(held[-1]))
        for optimizer in held:
            scaler.step(optimizer)
            scaler.update()
    last = scaler.overflow_report()
    assert (scaler.stats().skipped, last.update) == (count, 4 * count)  # good steps since do not change it
    found = last.spikes if guards else [each.name for each in last.bad]
    assert len(found) == 1
    assert guards or found == [f"optimizer {0 if joint else count - 1}, parameter 0"]

"""Plans: who gets which slot, when a plan is made anew, and that it holds nothing alive."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from typing import Any

import pytest
import torch
from helpers import parameters, sgd, started
from scaler_triton.records import Records
from scaler_triton.stats import NAMES, SKIPPED

from scaler_triton import GradScaler
from scaler_triton.plan import GradPlan, _Form


def collected(plan: GradPlan) -> list[int]:
    """Return the addresses of the gradients that a plan collects, in order."""
    return sorted(t.data_ptr() for batch in plan.collect() for t in batch.present)


def addresses(params: list[Any]) -> list[int]:
    return sorted(p.grad.data_ptr() for p in params if p.grad is not None)


def test_gradients_that_come_and_go_make_no_new_plan() -> None:
    params = parameters([None] * 64, "cpu")
    plan = GradPlan(params)
    choose = random.Random(0)
    for _ in range(50):
        for parameter in params:
            parameter.grad = torch.ones_like(parameter) if choose.random() < 0.3 else None
        assert collected(plan) == addresses(params)
    assert plan.rebuilds == 0


def test_layouts_are_the_same_objects_from_step_to_step() -> None:
    params = parameters([torch.ones(3), torch.ones(2).double(), None], "cpu")
    plan = GradPlan(params)
    first = [batch.layout for batch in plan.collect()]
    params[2].grad = torch.ones(3)
    second = [batch.layout for batch in plan.collect()]
    assert [id(layout) for layout in first] == [id(layout) for layout in second]
    assert [layout.numels for layout in first] == [[3, 3], [2]]


def test_only_a_new_look_makes_a_new_plan_and_is_remembered() -> None:
    params = parameters([torch.ones(4, 6), None], "cpu")
    plan = GradPlan(params)
    params[0].grad = torch.ones(6, 4).t()
    for _ in range(3):
        assert collected(plan) == addresses(params)
    assert plan.rebuilds == 1
    params[0].grad = None
    plan.collect()
    params[0].grad = torch.ones(6, 4).t()
    assert collected(plan) == addresses(params)
    assert plan.rebuilds == 1


@pytest.mark.parametrize("missing", [False, True])
def test_a_changed_gradient_is_noticed_beside_a_missing_one(missing: bool) -> None:
    params = parameters([torch.ones(4), torch.ones(4)], "cpu")
    plan = GradPlan(params)
    if missing:
        params[1].grad = None
    for _ in range(3):
        assert collected(plan) == addresses(params)
    params[0].grad = torch.ones(1).expand(4)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        plan.collect()


def test_frozen_parameters_have_no_slot_until_they_have_a_gradient() -> None:
    params = parameters([None, None], "cpu")
    params[1].requires_grad_(False)
    plan = GradPlan(params)
    assert [layout.numels for layout in plan.layouts] == [[3]]
    params[1].grad = torch.ones(3)
    assert collected(plan) == addresses(params)
    assert plan.rebuilds == 1


def test_sparse_gradients_change_size_without_a_new_plan() -> None:
    params = parameters([torch.ones(5)], "cpu")
    plan = GradPlan(params)
    for n in (1, 3, 2):
        indices = torch.arange(n).reshape(1, n)
        with torch.sparse.check_sparse_tensor_invariants(False):
            params[0].grad = torch.sparse_coo_tensor(indices, torch.ones(n), (5,))
        (batch,) = plan.collect()
        assert batch.layout.numels == [n]
    assert plan.rebuilds == 0


def test_a_plan_keeps_no_gradient_alive() -> None:
    optimizer = sgd([torch.ones(4), torch.ones(9)[::2]])
    scaler = started(GradScaler, "cpu")
    scaler.step(optimizer)
    scaler.update()
    references = [weakref.ref(p.grad) for p in optimizer.param_groups[0]["params"]]
    optimizer.zero_grad()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_plan_dies_with_its_optimizer_and_keeps_no_scaler_alive() -> None:
    optimizer = sgd([torch.ones(4)])
    scaler = started(GradScaler, "cpu")
    scaler.step(optimizer)
    scaler.update()
    assert len(scaler._records.plans()) == 1
    parameter = weakref.ref(optimizer.param_groups[0]["params"][0])
    del optimizer
    gc.collect()
    assert len(scaler._records.plans()) == 0
    assert parameter() is None
    optimizer = sgd([torch.ones(4)])
    scaler.step(optimizer)
    reference = weakref.ref(scaler)
    del scaler
    gc.collect()
    assert reference() is None


def test_plans_are_listed_while_an_optimizer_is_freed() -> None:
    """By another thread or by the garbage collector, at any moment."""
    moments = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal moments
        frame.f_trace_opcodes = True
        moments += event == "opcode"
        if moments == moment:
            optimizers.clear()
        return trace

    for moment in range(1, 200):
        records, optimizers, before, moments = Records(), [sgd([torch.ones(1)]) for _ in range(3)], sys.gettrace(), 0
        for optimizer in optimizers:
            records.plan(optimizer)
        del optimizer
        sys.settrace(trace)
        try:
            listed = records.plans()
        finally:
            sys.settrace(before)
        assert len(listed) in (0, 3)
        if moments < moment:
            return
    raise AssertionError("plans() took more moments than were tried")


def test_a_plan_at_a_reused_id_is_not_inherited() -> None:
    records = Records()
    old, new = sgd([torch.ones(4)]), sgd([torch.ones(7)])
    stale = records.plan(old)
    records._records[id(new)] = records._records.pop(id(old))
    assert records.plan(new) is not stale
    assert records.plan(new).parameters == new.param_groups[0]["params"]
    del old
    gc.collect()
    assert records.plan(new) is records.plan(new)


def test_added_and_swapped_parameters_make_a_new_plan() -> None:
    optimizer = sgd([torch.ones(4)])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    (added,) = parameters([torch.full((2,), 8.0)], "cpu")
    optimizer.add_param_group({"params": [added]})
    scaler.unscale_(optimizer)
    assert added.grad.tolist() == [2.0, 2.0]
    scaler.step(optimizer)
    scaler.update()
    (swapped,) = parameters([torch.full((5,), 8.0)], "cpu")
    optimizer.param_groups[1]["params"][0] = swapped
    scaler.unscale_(optimizer)
    assert swapped.grad.tolist() == [2.0] * 5


def test_a_generation_is_read_on_its_own_device_only() -> None:
    """A kernel that reads another GPU's memory ends the process."""
    plan = GradPlan(parameters([torch.ones(3)], "cpu"))
    (form,) = plan._forms
    assert form is not None
    away = _Form((*form.signature[:3], torch.device("cuda", 1), form.signature[-1]), form.stride)
    plan._build_layouts([form, away])
    here, there = plan.layouts
    for _ in range(2):
        counters = torch.zeros(len(NAMES), dtype=torch.int64)
        plan.marks.prepare(here, counters)
        generation = here.generation
        assert generation.data_ptr() == counters[SKIPPED].data_ptr()
        assert there.generation is None
    plan._build_layouts([away, form])
    assert [layout.generation for layout in plan.layouts] == [None, generation]


def test_a_partial_gradient_is_told_from_the_reduced_ones_before_it(two_ranks: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()], run_check=False))
    plan = GradPlan([parameter])
    for _ in range(3):
        parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
        assert not any(batch.is_partial for batch in plan.collect())
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    (partial,) = (batch for batch in plan.collect() if batch.is_partial)
    assert partial.present[0].tolist() == [2.0] * 3


def test_a_parameter_that_is_swapped_for_one_placed_elsewhere_makes_a_new_plan(two_ranks: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def placed(placement: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [placement], run_check=False))

    mesh = init_device_mesh("cpu", (2,))
    (plain,), moved = parameters([torch.ones(3)], "cpu"), placed(Shard(0))
    for held in ([moved], [plain, moved]):
        plan = GradPlan(held)
        torch.utils.swap_tensors(moved, placed(Shard(0)))
        assert plan.matches(held)
        torch.utils.swap_tensors(moved, placed(Replicate()))
        assert not plan.matches(held)
        torch.utils.swap_tensors(moved, placed(Shard(0)))
    with pytest.raises(RuntimeError, match="swap"):
        torch.utils.swap_tensors(plain, moved)


def test_fp16_gradients_are_refused_however_well_known() -> None:
    plan = GradPlan(parameters([torch.ones(3, dtype=torch.float16)], "cpu"))
    for _ in range(2):
        plan.collect()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients."):
        plan.collect(allow_fp16=False)

"""A prepared check: when one is left behind, and what it does not take for the same."""

import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, Wrapper, flags, grads, params_of, sgd, started, take_step, values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from perf.subjects import Gradients, sharded
from scaler_triton import GradScaler, StepGuard
from scaler_triton.core import prepared
from scaler_triton.core.check import Checks
from scaler_triton.core.look import Divide, Read


def warmed(place: Place, cls: Any = GradScaler, how: str = "step", **options: Any) -> tuple[Any, Any]:
    """Return a scaler and an optimizer whose check is prepared."""
    known = {"init_scale": 4.0} if cls is GradScaler else {}
    scaler = started(cls, place.device, backend=place.backend, growth_interval=1000, **known) if known else None
    scaler = scaler or started(cls, place.device, backend=place.backend)
    optimizer = sgd([torch.full((3,), 8.0), torch.full((2,), 8.0)], place.device, **options)
    for _ in range(6):
        if place.device == "cuda":  # what is seen in the first steps is read when it has arrived on the host
            torch.cuda.synchronize()
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
    if place.device == "cpu" or place.backend == "triton":  # torch's op on a GPU leaves no marks
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


@pytest.mark.parametrize("method", ["step", "unscale_"])
def test_a_replaced_method_is_called(method: str) -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer)
    with mock.patch.object(scaler, "_unscale_grads_", side_effect=MemoryError, create=True), pytest.raises(MemoryError):
        getattr(scaler, method)(optimizer)


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
    scaler._ours.steps.open(optimizer).plan.prepared.passes = [mock.Mock(side_effect=MemoryError)]
    before = values(optimizer)
    with pytest.raises(MemoryError):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
    assert values(optimizer) == before


def test_a_carried_step_is_not_divided_again_and_the_last_outcome_is_forgotten() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer)
    assert scaler.was_skipped(optimizer) is False
    assert in_general(lambda: scaler.unscale_(optimizer)) == 0
    with pytest.raises(ValueError, match="was unscaled again"):
        scaler.was_skipped(optimizer)
    for _ in range(2):
        scaler.update()
        scaler.unscale_(optimizer)
        assert grads(optimizer) == [2.0, 2.0]


def test_the_flag_that_a_look_has_returned_is_not_that_of_the_next_check() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"), fused=True)
    give(optimizer, math.inf)
    (found,) = scaler._check_inf_per_device(optimizer).values()
    give(optimizer)
    scaler.step(optimizer)
    assert found.item() == 1.0
    assert not scaler.was_skipped(optimizer)


@pytest.mark.parametrize("where", ["at home", "in a capture", "on two devices"])
def test_a_check_in_a_capture_or_on_two_devices_is_not_prepared(where: str) -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    plan, own = scaler._ours.steps.open(optimizer).plan, Checks.flag_for
    plan.prepared = None
    if where == "on two devices":
        plan.devices = [torch.device("cpu"), torch.device("cpu", 0)]

    def flag_for(*given: Any) -> Any:
        flag = own(*given)
        flag.is_captured = where == "in a capture"
        return flag

    with mock.patch.object(Checks, "flag_for", flag_for):
        scaler.unscale_(optimizer)
    assert (plan.prepared is not None) is (where == "at home")


def test_a_prepared_check_is_not_run_in_a_capture(monkeypatch: Any) -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    step = scaler._ours.steps.open(optimizer)
    step.plan.prepared._may_capture = True  # as on a GPU
    for captures in (False, True):
        monkeypatch.setattr(prepared, "is_capturing", lambda captures=captures: captures)
        assert (step.plan.prepared.rows(step, optimizer, scaler._scale) is None) is captures


def test_a_guards_fused_optimizer_gets_no_scale() -> None:
    guard, optimizer = warmed(Place("cpu", "torch"), StepGuard, fused=True)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda stepped, *_: seen.append(stepped.grad_scale))
    give(optimizer)
    assert in_general(lambda: guard.step(optimizer)) == 0
    assert seen == [None]


def test_parameters_are_not_kept_alive() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    gradient = weakref.ref(params_of(optimizer)[0].grad)
    optimizer.zero_grad()
    assert gradient() is None
    assert scaler._ours.steps.open(optimizer).plan.prepared is not None


@PLACES
def test_gradients_are_read_where_they_are_now_and_a_flag_is_cleared(place: Place) -> None:
    scaler, optimizer = warmed(place, fused=True)
    for value in (8.0, math.inf, 8.0):
        before, size = values(optimizer), 0.0 if value == math.inf else 4.0 / scaler.get_scale()
        for each in params_of(optimizer):
            each.grad = torch.full_like(each, value)
        assert in_general(lambda: take_step(scaler, optimizer, "step", updates=False)) == 0
        assert values(optimizer) == [each - size for each in before]
        scaler.update()


@PLACES
def test_each_of_several_layouts_has_its_own_pass(place: Place) -> None:
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    optimizer = sgd([torch.full((3,), 8.0), torch.full((70,), 8.0).bfloat16(), torch.full((2,), 8.0)], place.device)
    for _ in range(3):
        give(optimizer)
        scaler.unscale_(optimizer)
        assert [each.grad.unique().tolist() for each in params_of(optimizer)] == [[2.0]] * 3
        scaler.step(optimizer)
        scaler.update()
    give(optimizer)
    params_of(optimizer)[1].grad[69] = math.nan
    by_torch_on_a_gpu = place.device == "cuda" and place.backend == "torch"  # whose op takes no bf16 there
    assert in_general(lambda: scaler.step(optimizer)) == by_torch_on_a_gpu
    report = scaler.overflow_report([(name, each) for name, each in zip("abc", params_of(optimizer), strict=True)])
    assert [(each.name, each.kinds) for each in report.bad] in ([("b", "NaN")], [])  # torch's op on a GPU leaves none


@pytest.mark.parametrize("missing", [[1], [0, 2]])
def test_gradients_of_a_layout_that_are_missing_in_some_steps(missing: list[int]) -> None:
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    optimizer = sgd([torch.ones(3), torch.ones(2).double(), torch.ones(2)])
    for lacks in (False, False, True, True, False):
        for index, each in enumerate(params_of(optimizer)):
            each.grad = None if lacks and index in missing else torch.full_like(each, 8.0)
        scaler.unscale_(optimizer)
        assert {each.grad[0].item() for each in params_of(optimizer) if each.grad is not None} == {2.0}
        scaler.step(optimizer)
        scaler.update()


def test_beside_a_frozen_parameter_the_others_are_checked() -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((3,), 8.0), None])
    params_of(optimizer)[1].requires_grad_(False)
    for _ in range(3):
        give(optimizer)
        take_step(scaler, optimizer, "step")
    assert values(optimizer) == [-3.0, 0.0]


class Own(Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("kind", [Tensor.double, lambda scale: scale.as_subclass(Own)])
def test_by_a_scale_of_another_kind_no_check_is_prepared(kind: Any) -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    scaler._scale = kind(scaler._scale)
    for _ in range(2):
        give(optimizer)
        assert in_general(lambda: scaler.unscale_(optimizer)) == 1
        assert grads(optimizer) == [2.0, 2.0]
        scaler._ours.steps.reset()


def test_forms_that_come_again_after_others_are_checked_by_their_own_layouts() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    first, second = params_of(optimizer)
    first.data, second.grad = first.data.double(), None
    first.grad = torch.full((3,), 8.0, dtype=torch.float64)
    take_step(scaler, optimizer, "step")
    first.data, first.grad, second.grad = first.data.float(), torch.full((3,), 8.0), torch.full((2,), math.inf)
    take_step(scaler, optimizer, "step")
    assert scaler.was_skipped(optimizer)
    assert [each.name for each in scaler.overflow_report([("a", first), ("b", second)]).bad] == ["b"]


def test_of_several_looks_each_is_taken() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    scaler._ours.checks.dividing = [Read(), Divide()]
    give(optimizer)
    scaler.unscale_(optimizer)
    assert grads(optimizer) == [2.0, 2.0]


def test_ranks_of_a_mesh_agree_in_every_check(reductions: Any) -> None:
    """As of DDP over tensor parallel, whose parameters are plain."""
    scaler, optimizer = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((3,), 8.0)])
    whole: Any = DTensor.from_local(torch.zeros(3), init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
    params_of(optimizer)[0]._st_info = whole._spec
    for number in range(1, 5):
        give(optimizer)
        take_step(scaler, optimizer, "step")
        assert len(reductions) == number


def test_the_flag_of_states_that_were_put_aside_is_theirs() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"))
    give(optimizer, math.inf)
    scaler.unscale_(optimizer)
    aside, scaler._per_optimizer_states = scaler._per_optimizer_states, {}
    give(optimizer)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states = aside
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)


def test_after_an_error_in_a_pass_that_only_reads_the_step_may_be_repeated() -> None:
    scaler, optimizer = warmed(Place("cpu", "torch"), fused=True)
    give(optimizer)
    before, known = values(optimizer), scaler._ours.steps.open(optimizer).plan.prepared
    with mock.patch.object(known, "passes", [mock.Mock(side_effect=MemoryError)]), pytest.raises(MemoryError):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [each - 1.0 for each in before]


def test_shards_are_not_prepared_where_this_rank_is_alone_on_their_mesh() -> None:
    """Their gradients have no form that a prepared check compares, so it would never be run again."""
    with sharded(1, "cpu") as wrap:
        gradients = Gradients([4, 6], wrap=wrap)
        scaler, optimizer = started(GradScaler, "cpu"), torch.optim.SGD(gradients.parameters, lr=0.1)
        for _ in range(3):
            gradients.renew()
            assert in_general(lambda: take_step(scaler, optimizer, "unscale_")) == 1
            assert scaler._ours.steps.open(optimizer).plan.prepared is None

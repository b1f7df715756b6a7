"""A check: validated before the first write, one reduction, and what an error in it means for this rank and others."""

import copy
import itertools
import math
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import PLACES, Place, flags, grads, sgd, started, values
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard, grad_scaler
from scaler_triton.core import check, flag, passes, ranks, torch_ops
from scaler_triton.core.step import Phase
from scaler_triton.measuring.measure import PACKED

CPU, OTHER = torch.device("cpu"), torch.device("meta")
SCALE = 4.0
TOLD = [1.0, 1.0, -math.inf, -math.inf]  # the status of a rank that failed


def a_scaler(cls: type = GradScaler, **options: Any) -> Any:
    return started(cls, "cpu", init_scale=SCALE, **options)


def call(scaler: Any, how: str, optimizer: Any) -> None:
    """Call a method that checks."""
    getattr(scaler, how)(optimizer, *([1.0] if how == "clip_grad_norm_" else []))


@pytest.fixture
def reductions(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What this rank, one of two, reduces to a maximum or a sum."""
    seen: list[list[float]] = []
    monkeypatch.setattr(ranks.Ranks, "reduce_", lambda self, values, op: seen.append(values.tolist()))
    return seen


@pytest.mark.parametrize("how", ["unscale_", "clip_grad_norm_"])
def test_a_check_that_fails_leaves_the_flag_of_an_earlier_one(how: str) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.full((3,), math.inf, dtype=torch.float16)])
    scaler._check_inf_per_device(optimizer)
    with pytest.raises(ValueError, match="FP16"):
        call(scaler, how, optimizer)
    assert flags(scaler, optimizer) == [1.0]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize(("module", "fails"), [(check, "new_flag"), (torch, "ones")])
def test_a_check_that_cannot_begin_or_end_does_not_step(module: Any, fails: str) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.full((1,), 8.0)])
    with (
        mock.patch.object(module, fails, side_effect=MemoryError),
        mock.patch.object(torch_ops, "unscale_", side_effect=KeyError),
        pytest.raises((MemoryError, KeyError)),
    ):
        scaler.unscale_(optimizer)
    with suppress(AssertionError):  # FAILED without room for a flag
        scaler.step(optimizer)
    assert values(optimizer) == [-1.0 if fails == "new_flag" else 0.0]


# Overrides of `_unscale_grads_`


class Own(GradScaler):
    """Returns what `returns` says, having unscaled, and notes what it was called with."""

    returns: Any = None

    def _unscale_grads_(self, *args: Any) -> Any:
        self.given = args
        flags = super()._unscale_grads_(*args)
        return flags if self.returns is None else self.returns


def test_an_override_gets_torchs_four_arguments_by_position() -> None:
    scaler, optimizer = a_scaler(Own), sgd([torch.full((1,), 8.0)])
    scaler.unscale_(optimizer)
    _, inv_scale, found_inf, allow_fp16 = scaler.given
    assert scaler.given[0] is optimizer
    assert (inv_scale.item(), found_inf.item(), found_inf.shape, allow_fp16) == (0.25, 0.0, (), False)
    assert grads(optimizer) == [2.0]


def test_an_override_is_told_no_gradient_that_only_unscaling_makes_infinite() -> None:
    scaler, optimizer = started(Own, "cpu", init_scale=0.5), sgd([torch.full((2,), math.inf), torch.tensor([3e38])])
    scaler.step(optimizer)
    scaler.update()
    assert [each.numel for each in scaler.overflow_report().bad] == [2]


class AllowsFp16(torch.amp.GradScaler):
    """What four frameworks make of torch's class."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


@PLACES
@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_", "a copy"])
@pytest.mark.parametrize("value", [8.0, math.inf, 2.0**-24])
def test_fp16_gradients_are_unscaled_where_the_scaler_allows_them(place: Place, how: str, value: float) -> None:
    def run(scaler: Any) -> Any:
        optimizer = sgd([torch.full((3,), value, dtype=torch.float16)], scaler._device)
        scaler.scale(torch.ones((), device=scaler._device))
        if how == "clip_grad_norm_" and isinstance(scaler, GradScaler):
            scaler.clip_grad_norm_(optimizer, math.inf)
        elif how in ("clip_grad_norm_", "unscale_"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return *values(optimizer), *grads(optimizer), scaler.get_scale()

    ours = GradScaler(place.device, init_scale=4.0, backend=place.backend, allow_fp16_grads=True)
    assert run(copy.deepcopy(ours) if how == "a copy" else ours) == run(AllowsFp16("cpu", init_scale=4.0))


def test_whether_fp16_gradients_are_allowed_is_no_number() -> None:
    with pytest.raises(TypeError, match="^allow_fp16_grads must be True or False, got 1$"):
        GradScaler("cpu", allow_fp16_grads=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "found"), [(0.0, 0.0), (1.0, 1.0), (3.0, 1.0), (math.nan, 1.0)])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_flags_that_an_override_returns_count(value: float, found: float, shape: tuple[int, ...]) -> None:
    scaler, optimizer = a_scaler(Own), sgd([torch.ones(1)])
    scaler.returns = {CPU: torch.full(shape, value)}
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [found]


def test_an_override_may_pass_a_flag_of_one_element_as_torchs_sharded_scaler_does() -> None:
    class Passes(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf.reshape(1), allow_fp16)

    scaler, optimizer = a_scaler(Passes), sgd([torch.tensor([math.inf])])
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [1.0]


@pytest.mark.parametrize("calls_ours", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_an_override_that_raises_may_have_written_unless_ours_refused(dtype: torch.dtype, calls_ours: bool) -> None:
    class Raises(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            if calls_ours:
                super()._unscale_grads_(*args)
            raise KeyError

    scaler, optimizer = a_scaler(Raises), sgd([torch.ones(1, dtype=dtype)])
    with pytest.raises((KeyError, NotImplementedError)):
        scaler.unscale_(optimizer)
    refused = dtype.is_complex and calls_ours
    assert scaler._ours.steps.open(optimizer).phase is (Phase.READY if refused else Phase.FAILED)


@pytest.mark.parametrize(
    ("phase", "told", "shared", "want"),
    [
        (Phase.READY, False, False, True),
        (Phase.UNSCALED, False, False, True),
        (Phase.READY, True, False, False),  # another reduction, which the others would not join
        (Phase.UNSCALED, False, True, False),  # its flag is that of several optimizers
        (Phase.FAILED, False, False, False),
        (Phase.STEPPED, False, False, False),
    ],
)
def test_1_gradients_may_be_checked_again_where_that_is_no_reduction(
    phase: Phase, told: bool, shared: bool, want: bool, two_ranks: None
) -> None:
    scaler, optimizer = a_scaler(process_group=dist.group.WORLD if told else None), sgd([torch.ones(1)])
    scaler._check_inf_per_device(optimizer)
    step = scaler._ours.steps.open(optimizer)
    step._enter(phase)
    step.flag.is_final = shared
    with mock.patch.object(grad_scaler, "check") as check:
        scaler._check_inf_per_device(optimizer)
    assert check.called is want


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *itertools.product(["step", "clip_grad_norm_"], ["unscale_", "_unscale_grads_"]),
        ("step", "_check_inf_per_device"),
    ],
)
def test_a_method_that_is_replaced_on_the_class_or_on_the_object_is_called(how: str, name: str) -> None:
    own, on_object = mock.Mock(side_effect=getattr(GradScaler, name)), a_scaler()
    setattr(on_object, name, partial(own, on_object))
    for scaler in (a_scaler(type("Below", (GradScaler,), {name: lambda *args: own(*args)})), on_object):
        call(scaler, how, sgd([torch.full((1,), 8.0)], fused=name == "_check_inf_per_device"))
    assert own.call_count == 2


# Other ranks


def test_a_step_before_any_scale_is_over_with_the_next_loss(two_ranks: None) -> None:
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=SCALE), sgd([torch.tensor([2 * SCALE])])
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@pytest.mark.parametrize("how", ["unscale_", "_check_inf_per_device", "step"])
@pytest.mark.parametrize("gradient", [1.0, math.nan])
def test_a_check_is_one_reduction_of_flag_failure_and_scale_and_a_call_out_of_order_is_none(
    how: str, gradient: float, reductions: Any
) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), sgd([torch.tensor([gradient])])
    getattr(scaler, how)(optimizer)
    for wrong in {"unscale_": ["unscale_"], "step": ["step", "unscale_"]}.get(how, []):
        with pytest.raises(RuntimeError, match=r"already been called|called after step"):
            getattr(scaler, wrong)(optimizer)
    assert reductions == [[float(gradient != 1.0), 0.0, SCALE, -SCALE]]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_is_told_to_the_others_and_an_interrupt_is_not(error: Any, reductions: Any) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), sgd([torch.ones(1)])
    with mock.patch.object(passes, "check", side_effect=error), pytest.raises(error):
        scaler.unscale_(optimizer)
    assert reductions == ([TOLD] if error is MemoryError else [])


def test_the_others_are_told_even_if_this_rank_has_no_room_for_a_flag(reductions: Any) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), sgd([torch.ones(1)])
    with (
        mock.patch.object(passes, "check", side_effect=KeyError),
        mock.patch.object(torch, "ones", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        scaler.unscale_(optimizer)
    assert reductions == [TOLD]


def test_a_guards_ranks_agree_whatever_its_parameters_are(reductions: Any) -> None:
    StepGuard("cpu").unscale_(sgd([torch.ones(1)]))
    assert reductions == [[0.0, 0.0, 1.0, -1.0]]


def test_where_the_check_is_by_a_norm_an_error_joins_the_sum(reductions: Any) -> None:
    with mock.patch.object(passes, "norm_batch", side_effect=MemoryError), pytest.raises(MemoryError):
        StepGuard("cpu", spike_sigma=6.0).unscale_(sgd([torch.ones(1)]))
    assert reductions == [pytest.approx([math.nan, 1.0, 1.0, 0.0, 0.0], nan_ok=True)]


@pytest.mark.usefixtures("two_ranks")
def test_the_ranks_are_found_once_for_each_plan_and_process_group() -> None:
    scaler, optimizer = a_scaler(process_group=dist.group.WORLD), sgd([torch.ones(1)])
    with mock.patch.object(ranks, "find", wraps=ranks.find) as find:
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
        assert find.call_count == 1
        scaler.process_group = dist.new_group([0, 1])
        scaler.step(optimizer)
    assert find.call_count == 2


# Where the flag is


def test_the_flag_is_where_gradients_or_parameters_are_or_where_the_scale_is_if_nothing_is_anywhere() -> None:
    scaler, together = a_scaler(), SimpleNamespace()
    own = flag.Flag(torch.zeros(4))
    zero = torch.zeros(())

    def on(checked: Any, devices: list[torch.device], together: Any = None) -> set[torch.device]:
        plan: Any = SimpleNamespace(devices=devices)
        return set(check.flags_on(scaler, own, checked, plan, together))

    assert on({CPU: zero}, [CPU, OTHER]) == on({OTHER: zero}, [CPU]) == {CPU, OTHER}
    assert on({}, [OTHER]) == set()  # torch raises then
    assert on({}, [OTHER], together) == {OTHER}
    assert on({}, [], together) == {CPU}


def test_a_flag_is_reused_from_step_to_step_unless_it_still_counts() -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)])
    scaler.unscale_(optimizer)
    step = scaler._ours.steps.open(optimizer)
    first = step.flag
    scaler.step(optimizer)
    assert check.new_flag(scaler, step) is not first
    scaler.update()
    assert check.new_flag(scaler, step) is first


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_"])
def test_a_copy_to_the_host_is_started_only_for_a_step_that_comes_later(how: str, fused: bool) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)], fused=fused)
    with (
        mock.patch.object(flag, "host_memory", return_value=None),  # as on a GPU
        mock.patch.object(flag.Flag, "start_copy", autospec=True, side_effect=flag.Flag.start_copy) as started_copy,
    ):
        call(scaler, how, optimizer)
    assert started_copy.call_count == (0 if fused or how == "step" else 1)


# Before the first scale


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("name", ["unscale_", "step"])
def test_without_a_scale_a_rank_tells_the_others_and_backs_off_with_them(
    name: str, measure: bool, reductions: Any
) -> None:
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=SCALE, measure=measure), sgd([torch.ones(1)])
    with pytest.raises(AssertionError, match=f"^Attempted {name} but _scale is None"):
        getattr(scaler, name)(optimizer)
    sums = [math.nan, 1.0, 1.0, 0.0, 0.0, *[0.0] * PACKED]  # as strings, for NaN is no NaN
    assert str(reductions) == str([sums if measure else TOLD])
    scaler.step(optimizer)
    scaler.update()
    assert (values(optimizer), scaler.get_scale()) == ([0.0], SCALE / 2)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs or none")
@pytest.mark.parametrize(
    ("devices", "home"), [(["cpu", "cuda:1"], "cuda:1"), (["cuda:1", "cpu"], "cuda:1"), (["cpu"], "cuda"), ([], "cuda")]
)
def test_it_meets_the_others_where_their_scale_is(devices: list[str], home: str) -> None:
    """Offloaded parameters lie elsewhere, and another backend may serve that place."""
    scaler = ShardedGradScaler("cpu")
    scaler._device = "cuda"
    with FakeTensorMode():
        params = [torch.ones(1, device=device) for device in devices]
    optimizer: Any = SimpleNamespace(param_groups=[{"params": params}])
    with (
        mock.patch.object(scaler, "_lazy_init_scale_growth_tracker") as made,
        mock.patch.object(ranks, "find", return_value=object()),
        mock.patch.object(check, "report_failure") as met,
        mock.patch.object(check, "step_failed", lambda scaler, step: setattr(scaler, "_scale", torch.ones(()))),
        pytest.raises(AssertionError),
    ):
        check.require_scale(scaler, "unscale_", [optimizer])
    made.assert_called_once_with(torch.device(home))
    assert met.called

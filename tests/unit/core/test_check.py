"""A check: validated before the first write, one reduction, a flag where it is needed."""

import copy
import math
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import PLACES, Place, flags, grads, sgd, started, values

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.core import flag
from scaler_triton.core.check import Checks
from scaler_triton.core.look import Look
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.step import Phase

CPU, OTHER = torch.device("cpu"), torch.device("meta")
AS_ANOTHER = torch.device("cpu", 0)  # not equal to "cpu", but torch can read there
SCALE = 4.0


def a_scaler(cls: type = GradScaler, **options: Any) -> Any:
    return started(cls, "cpu", init_scale=SCALE, **options)


def call(scaler: Any, how: str, optimizer: Any) -> None:
    """Call a method that checks."""
    getattr(scaler, how)(optimizer, *([1.0] if how == "clip_grad_norm_" else []))


@pytest.mark.parametrize("how", ["unscale_", "clip_grad_norm_"])
def test_a_check_that_fails_leaves_the_flag_of_an_earlier_one(how: str) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.full((3,), math.inf, dtype=torch.float16)])
    scaler._check_inf_per_device(optimizer)
    with pytest.raises(ValueError, match="FP16"):
        call(scaler, how, optimizer)
    assert flags(scaler, optimizer) == [1.0]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def test_once_unscaled_again_an_optimizers_last_step_is_forgotten() -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.was_skipped(optimizer) is False
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="^was_skipped: this SGD was not stepped yet, or was unscaled again"):
        scaler.was_skipped(optimizer)


@pytest.mark.parametrize(("module", "fails"), [(Checks, "flag_for"), (torch, "ones")])
def test_a_check_that_cannot_begin_or_end_does_not_step(module: Any, fails: str) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.full((1,), 8.0)])
    with (
        mock.patch.object(module, fails, side_effect=MemoryError),
        mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", side_effect=KeyError),
        pytest.raises((MemoryError, KeyError)),
    ):
        scaler.unscale_(optimizer)
    with suppress(AssertionError):  # FAILED without room for a flag
        scaler.step(optimizer)
    assert values(optimizer) == [-1.0 if fails == "flag_for" else 0.0]


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
    with mock.patch.object(Checks, "check") as check:
        scaler._check_inf_per_device(optimizer)
    assert check.called is want


# Other ranks


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


def test_a_guards_ranks_agree_whatever_its_parameters_are(reductions: Any) -> None:
    StepGuard("cpu").unscale_(sgd([torch.ones(1)]))
    assert reductions == [[0.0, 0.0, 1.0, -1.0]]


@pytest.mark.usefixtures("two_ranks")
def test_the_ranks_are_found_once_for_each_plan_and_process_group() -> None:
    scaler, optimizer = a_scaler(process_group=dist.group.WORLD), sgd([torch.ones(1)])
    with mock.patch.object(Checks, "find_peers", autospec=True, side_effect=Checks.find_peers) as find:
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
        assert find.call_count == 1
        scaler.process_group = dist.new_group([0, 1])
        scaler.step(optimizer)
    assert find.call_count == 2


def test_optimizers_that_agree_with_other_ranks_than_each_other_are_warned_of(reductions: Any) -> None:
    scaler, both = a_scaler(process_group=dist.group.WORLD), [sgd([torch.ones(1)]) for _ in "ab"]
    found = [Ranks((), (0, 1)), Ranks((), (0, 2))]
    with mock.patch.object(Checks, "find_peers", side_effect=found):
        scaler.unscale_(both[0])
        with pytest.warns(UserWarning, match=r"are on meshes over different ranks, here \[0, 1\] and \[0, 2\]"):
            scaler.unscale_(both[1])
    assert len(reductions) == 2


# Where the flag is


def test_the_flag_is_where_gradients_or_parameters_are_or_where_the_scale_is_if_nothing_is_anywhere() -> None:
    checks, together = a_scaler()._ours.checks, SimpleNamespace()
    own = flag.Flag(torch.zeros(4))
    zero = torch.zeros(())

    def on(checked: Any, devices: list[torch.device], together: Any = None) -> set[torch.device]:
        own.clear()
        own.take(checked)
        plan = SimpleNamespace(devices=devices)
        return set(checks.flags_for(own, plan, together, None))

    assert on({CPU: zero}, [CPU, OTHER]) == on({OTHER: zero}, [CPU]) == {CPU, OTHER}
    assert on({}, [OTHER]) == set()  # torch raises then
    assert on({}, [OTHER], together) == {OTHER}
    assert on({}, [], together) == {CPU}


@pytest.mark.parametrize("later", ["", "summed", "looks", "ranks"])
def test_a_flag_elsewhere_is_the_part_that_was_set_there_unless_it_may_have_been_set_later(later: str) -> None:
    checks, own, plan = a_scaler()._ours.checks, flag.Flag(torch.zeros(4)), SimpleNamespace(devices=[AS_ANOTHER])
    checks.n_sums = 0 if later == "looks" else None
    own.take({AS_ANOTHER: torch.tensor([2.0])})
    peers = SimpleNamespace() if later == "ranks" else None
    given = checks.flags_for(own, plan, peers, None, summed=later == "summed")
    assert given[AS_ANOTHER].tolist() == (0.0 if later else 1.0)


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_without_a_gradient_a_sharded_scaler_has_a_flag_in_any_group(ranks: int, world: Any) -> None:
    if ranks:
        world(ranks)
    scaler, optimizer = a_scaler(ShardedGradScaler if ranks else GradScaler), sgd([None])
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == ([0.0] if ranks else [])


def test_what_a_look_finds_elsewhere_is_the_flags() -> None:
    class Finds(Look):
        def run(self, batch: Any, scale: Any, flag: Any) -> None:
            flag.found_inf_on(AS_ANOTHER).fill_(1.0)

    scaler, optimizer = a_scaler(), sgd([torch.ones(1)])
    scaler._ours.checks.dividing = [Finds()]
    scaler.unscale_(optimizer)
    assert {*flags(scaler, optimizer)} == {1.0}


def test_a_flag_is_reused_from_step_to_step_unless_it_still_counts() -> None:
    scaler, optimizer = a_scaler(), sgd([torch.tensor([math.inf])])
    scaler.unscale_(optimizer)
    step, checks = scaler._ours.steps.open(optimizer), scaler._ours.checks
    first = step.flag
    scaler.step(optimizer)
    assert checks.flag_for(step, scaler._scale) is not first
    scaler.update()
    assert first.is_set()
    assert checks.flag_for(step, scaler._scale) is first
    assert not first.is_set()
    assert checks.flag_for(step, torch.ones((), device=OTHER)) is not first


def test_a_flag_that_a_carried_step_goes_by_is_not_reused() -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)])
    scaler.unscale_(optimizer)
    scaler.update()
    step = scaler._ours.steps.open(optimizer)
    assert scaler._ours.checks.flag_for(step, scaler._scale) is not step.flag


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_"])
def test_a_copy_to_the_host_is_started_only_for_a_step_that_comes_later(how: str, fused: bool) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)], fused=fused)
    with (
        mock.patch.object(flag, "HostFlag", flag.Flag),  # as on a GPU
        mock.patch.object(flag.Flag, "start_copy", autospec=True, side_effect=flag.Flag.start_copy) as started_copy,
    ):
        call(scaler, how, optimizer)
    assert started_copy.call_count == (0 if fused or how == "step" else 1)

"""One update a loss: frameworks' optimizers step by their loss's scale, and the update is neither lost nor early."""

import copy
import gc
import math
import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Slotted, sgd, values
from torch import nn

from scaler_triton import GradScaler, SkipStreakError, StepGuard
from scaler_triton.core.step import READY
from scaler_triton.integrations import updates

INF, SCALE = math.inf, 8.0
BAD = pytest.mark.parametrize(
    ("one", "other"), [(1.0, 1.0), (INF, 1.0), (1.0, INF), (INF, INF)], ids=["none", "first", "second", "both"]
)


def new_scaler(cls: type = GradScaler, **options: Any) -> Any:
    return cls("cpu", init_scale=SCALE, growth_interval=1, **options)


def give(scaler: Any, optimizers: Sequence[Any], *numbers: float, known: Any = ...) -> None:
    """Do what a framework does at each loss, whose gradients are these numbers."""
    updates.begin(scaler, optimizers if known is ... else known)
    for optimizer, number in zip(optimizers, numbers, strict=True):
        scaled = scaler.scale(torch.ones(1)) * number
        optimizer.param_groups[0]["params"][0].grad = scaled


def pair() -> list[Any]:
    return [sgd([torch.ones(1)]), sgd([torch.ones(1)])]


def scale_of(scaler: Any) -> float:
    """Return the scale without a call of the scaler's."""
    return float(scaler._scale)


def is_put_off(scaler: Any) -> bool:
    return "update" in vars(scaler)


# When it comes


@BAD
def test_all_step_by_the_scale_of_their_loss_before_its_only_update(one: float, other: float) -> None:
    scaler, optimizers = new_scaler(), pair()
    for number in range(1, 4):  # as it was, and after what each update has made of it
        before = scale_of(scaler) if number > 1 else SCALE
        give(scaler, optimizers, one, other)
        updates.step(scaler, optimizers[0])
        assert (scale_of(scaler), scaler.stats().updates) == (before, number - 1)
        updates.step(scaler, optimizers[1])
        assert scale_of(scaler) == before * (2.0 if one == other == 1.0 else 0.5)
        assert scaler.stats().updates == number
        expected = [-0.5 * number if value == 1.0 else 0.0 for value in (one, other)]
        assert [values(each)[0] for each in optimizers] == expected


def test_one_optimizer_is_updated_for_at_once_by_the_same_calls() -> None:
    scaler, optimizer = new_scaler(), sgd([torch.ones(1)])
    for _ in range(3):
        give(scaler, [optimizer], 1.0)
        updates.step(scaler, optimizer)
        assert not is_put_off(scaler)
    assert (scale_of(scaler), scaler.stats().updates) == (8.0 * SCALE, 3)
    assert scaler not in updates._windows


def test_each_of_two_losses_with_a_step_of_its_own_is_updated_for_before_the_next_is_scaled() -> None:
    """A GAN, whose second loss leaves gradients in both. It is known only then that nobody else stepped on it."""
    scaler, (judge, generator) = new_scaler(), pair()
    for number in range(2):
        for optimizer, factor in ((judge, 4.0**number), (generator, 2.0 * 4.0**number)):
            give(scaler, [judge, generator], 1.0, 1.0)
            assert scale_of(scaler) == SCALE * factor
            updates.step(scaler, optimizer)
            assert is_put_off(scaler)
    updates.finish(scaler)
    assert (scale_of(scaler), scaler.stats().updates) == (16.0 * SCALE, 4)
    assert [values(each) for each in (judge, generator)] == [[-1.0], [-1.0]]


@pytest.mark.parametrize("how", ["frozen for this loss", "freed", "frozen after it was scaled"])
def test_an_optimizer_that_trains_nothing_in_a_loss_is_not_waited_for(how: str) -> None:
    scaler, (one, other) = new_scaler(), pair()
    parameter = other.param_groups[0]["params"][0]
    parameter.requires_grad_(how != "frozen for this loss")
    give(scaler, [one, other], 1.0, 1.0)
    parameter.requires_grad_(how == "frozen for this loss")
    if how == "freed":
        del other
        gc.collect()
    updates.step(scaler, one)
    assert is_put_off(scaler) == (how == "frozen after it was scaled")  # which may have a gradient


def test_optimizers_of_several_accumulated_losses_are_all_waited_for() -> None:
    scaler, (one, other) = new_scaler(), pair()
    give(scaler, [one, other], 1.0, 1.0)
    one.param_groups[0]["params"][0].requires_grad_(False)
    updates.begin(scaler, [one, other])  # only the other trains in this one
    updates.step(scaler, other)
    assert is_put_off(scaler)
    updates.step(scaler, one)
    assert (values(one), values(other), scaler.stats().updates) == ([-0.5], [-0.5], 1)


def test_an_optimizer_that_is_prepared_twice_or_takes_no_weak_references_counts_once() -> None:
    scaler, (one, other) = new_scaler(), pair()
    known = [one, Slotted(one), other]
    give(scaler, [one, other], 1.0, 1.0, known=known)
    updates.step(scaler, known[1])
    assert is_put_off(scaler)
    updates.step(scaler, other)
    assert not is_put_off(scaler)


def test_of_three_the_last_one_ends_it() -> None:
    scaler, optimizers = new_scaler(), [*pair(), *pair()[:1]]
    for number in range(1, 3):
        give(scaler, optimizers, 1.0, INF, 1.0)
        for each in optimizers:
            assert scaler.stats().updates == number - 1
            updates.step(scaler, each)
        assert (scaler.stats().updates, is_put_off(scaler)) == (number, False)
    assert [values(each) for each in optimizers] == [[-1.0], [0.0], [-1.0]]


def test_a_second_step_on_a_loss_is_torchs_error_while_others_are_waited_for() -> None:
    scaler, (one, other) = new_scaler(), pair()
    give(scaler, [one, other], 1.0, 1.0)
    updates.step(scaler, one)
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called since the last update\(\)\.$"):
        updates.step(scaler, one)
    updates.step(scaler, other)
    assert (values(one), values(other), scale_of(scaler)) == ([-0.5], [-0.5], 2.0 * SCALE)


def test_replayed_graphs_announce_no_loss_so_nothing_is_put_off() -> None:
    scaler, (one, other) = new_scaler(), pair()
    scaler._ours.steps.replayed = True  # as after a capture of `scale`
    give(scaler, [one, other], 1.0, 1.0)
    updates.step(scaler, one)
    assert scaler.stats().updates == 1


def test_what_was_put_off_is_not_captured() -> None:
    scaler, (one, other) = new_scaler(), pair()
    give(scaler, [one, other], 1.0, 1.0)
    updates.step(scaler, one)
    with (
        mock.patch.object(updates, "is_captured", return_value=True),
        pytest.raises(RuntimeError, match=r"cannot be captured in a graph: call the scaler's update\(\) before"),
    ):
        scaler.scale(torch.ones(()))
    scaler.update()
    assert scaler.stats().updates == 1


# A framework that names no optimizers: only modules, and those that were stepped.


def test_in_the_first_loss_every_parameter_of_a_module_is_waited_for() -> None:
    scaler, (one, other) = new_scaler(), pair()
    module = nn.ParameterList([each.param_groups[0]["params"][0] for each in (one, other)])
    updates.expect(scaler, module)
    give(scaler, [one, other], INF, 1.0, known=None)
    updates.step(scaler, one)
    assert is_put_off(scaler)
    updates.step(scaler, other)
    assert (values(one), values(other), scale_of(scaler), scaler.stats().updates) == ([0.0], [-0.5], SCALE / 2, 1)
    give(scaler, [one, other], INF, 1.0, known=None)  # both are known by now
    updates.step(scaler, one)
    updates.step(scaler, other)
    assert (values(one), values(other), scale_of(scaler), scaler.stats().updates) == ([0.0], [-1.0], SCALE / 4, 2)


def test_a_part_that_no_optimizer_trains_is_waited_for_only_once() -> None:
    scaler, (one, other) = new_scaler(), pair()
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    for rest, waits in ((frozen, False), (other.param_groups[0]["params"][0], True)):
        module = nn.ParameterList([one.param_groups[0]["params"][0], rest])
        updates.expect(scaler, module)
        for again in (False, True):
            give(scaler, [one], 1.0, known=None)
            updates.step(scaler, one)
            assert is_put_off(scaler) == (waits and not again)


def test_a_disabled_scaler_waits_for_nothing() -> None:
    scaler, (one, other) = GradScaler("cpu", enabled=False), pair()
    updates.expect(scaler, nn.Linear(1, 1))
    updates.begin(scaler, [one, other])
    updates.step(scaler, one)
    assert values(one) == [-0.5]
    assert not is_put_off(scaler)


# Nothing is lost


def put_off(bad: bool = False, **options: Any) -> Any:
    """Return a scaler with an update put off, of a growth or of an overflow, and what was stepped."""
    scaler, optimizers = new_scaler(**options), pair()
    give(scaler, optimizers, INF if bad else 1.0, 1.0)
    updates.step(scaler, optimizers[0])
    assert is_put_off(scaler)
    return scaler, *optimizers


@pytest.mark.parametrize("bad", [False, True])
def test_what_is_saved_copied_or_pickled_is_the_state_after_it(bad: bool) -> None:
    expected = (SCALE * (0.5 if bad else 2.0), 1)
    for save in (
        lambda scaler: scaler.state_dict(),
        lambda scaler: copy.copy(scaler).state_dict(),
        lambda scaler: copy.deepcopy(scaler).state_dict(),
        lambda scaler: pickle.loads(pickle.dumps(scaler)).state_dict(),
    ):
        scaler, *_kept = put_off(bad)
        assert scale_of(scaler) == SCALE
        assert (save(scaler)["scale"], scaler.stats().updates) == expected
        assert not {*vars(scaler)} & {*updates._NEEDS_UPDATE}


def test_loading_a_state_ends_it_first() -> None:
    scaler, one, other = put_off()
    state = {**GradScaler("cpu", init_scale=32.0).state_dict(), "_growth_tracker": 5}
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert scaler._ours.steps.open(one).phase is READY
    give(scaler, [one, other], 1.0, 1.0)
    updates.step(scaler, one)
    updates.step(scaler, other)
    assert (values(one), values(other)) == ([-1.0], [-0.5])


@pytest.mark.parametrize("new_scale", [None, 64.0])
def test_a_call_of_update_runs_it_and_does_not_count_twice(new_scale: float | None) -> None:
    scaler, *_kept = put_off()
    scaler.update(new_scale) if new_scale else scaler.update()
    assert (scale_of(scaler), scaler.stats().updates, scaler.stats().growths) == (new_scale or 2.0 * SCALE, 1, 1)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_a_loss_that_is_scaled_without_the_framework_comes_after_it() -> None:
    scaler, *_kept = put_off()
    assert scaler.scale(torch.ones(())).item() == 2.0 * SCALE
    assert not is_put_off(scaler)


def test_reading_does_not_run_it_as_one_rank_alone_may_read() -> None:
    scaler, one, other = put_off(bad=True)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.metrics()["scaler/updates"]) == (SCALE, 0, 0.0)
    assert scaler.was_skipped(one)
    assert str(scaler.overflow_report())
    updates.step(scaler, other)
    assert values(other) == [-0.5]


def test_methods_that_were_replaced_on_the_scaler_stay_so() -> None:
    scaler, (one, other), seen = new_scaler(), pair(), []

    def update() -> None:
        seen.append(scale_of(scaler))
        GradScaler.update(scaler)

    scaler.update = update
    for _ in range(2):
        give(scaler, [one, other], 1.0, 1.0)
        updates.step(scaler, one)
    updates.step(scaler, other)
    assert seen == [SCALE, 2.0 * SCALE]
    assert vars(scaler)["update"] is update


def test_a_streak_of_skips_is_counted_in_losses_and_raised_by_what_runs_the_update() -> None:
    scaler, (one, other) = new_scaler(max_consecutive_skips=0), pair()
    for number in range(5):
        if number == 4:
            give(scaler, [one, other], INF, INF)
            updates.step(scaler, one)
            with pytest.raises(SkipStreakError, match="1 consecutive skip, more than max_consecutive_skips=0"):
                scaler.state_dict()
            break
        give(scaler, [one, other], INF, INF)
        updates.step(scaler, one)
        updates.step(scaler, other)
    assert scaler.stats().updates == 5
    give(scaler, [one, other], 1.0, 1.0)  # it goes on
    updates.step(scaler, one)
    assert is_put_off(scaler)


# Errors


KINDS = ("scaler", "guard")


def raise_in_step(optimizer: Any) -> Any:
    return mock.patch.object(optimizer, "step", side_effect=ValueError("on one rank"))


@BAD
@pytest.mark.parametrize(
    ("kind", "failing"), [*((kind, [each]) for kind in KINDS for each in (0, 1)), ("guard", [0, 1])]
)
def test_a_rank_whose_step_raises_updates_as_often_as_the_others(
    kind: str, failing: list[int], one: float, other: float
) -> None:
    """And with the same flags, in whatever step it is: two runs are compared, of which only one raises."""
    ends = []
    for raises in (False, True):
        scaler, optimizers = StepGuard("cpu") if kind == "guard" else new_scaler(), pair()
        for number in range(3):
            give(scaler, optimizers, one, other)
            for which, optimizer in enumerate(optimizers):
                is_bad = (one, other)[which] == INF
                if raises and number == 1 and which in failing and not is_bad:  # a bad one is not called
                    with raise_in_step(optimizer), pytest.raises(ValueError, match="on one rank"):
                        updates.step(scaler, optimizer)
                else:
                    updates.step(scaler, optimizer)
            assert not (kind == "guard" and is_put_off(scaler))  # a guard's step that raised is over
        updates.finish(scaler)
        ends.append((scale_of(scaler), scaler._get_growth_tracker(), scaler.stats()))
    assert ends[0] == ends[1]
    assert ends[0][2].updates == (6 if kind == "guard" else 3)  # a guard's steps update by themselves


def test_a_guards_only_step_updates_though_it_raises() -> None:
    guard, optimizer = StepGuard("cpu"), sgd([torch.ones(1)])
    give(guard, [optimizer], 1.0)
    with raise_in_step(optimizer), pytest.raises(ValueError, match="on one rank"):
        updates.step(guard, optimizer)
    assert guard.stats().updates == 1


def test_a_step_that_raised_is_spent_and_updates_with_the_other_one() -> None:
    scaler, (one, other) = new_scaler(), pair()
    give(scaler, [one, other], 1.0, 1.0)
    with raise_in_step(one), pytest.raises(ValueError, match="on one rank"):
        updates.step(scaler, one)
    updates.step(scaler, other)
    updates.step(scaler, one)
    assert (values(one), values(other), scaler.stats().updates) == ([0.0], [-0.5], 1)


def test_steps_that_were_reset_leave_nothing_to_update() -> None:
    scaler, (one, other) = new_scaler(), pair()
    give(scaler, [one, other], 1.0, 1.0)
    updates.step(scaler, one)
    scaler._ours.steps.reset()  # as for a run that was interrupted
    give(scaler, [one, other], 1.0, 1.0)
    assert scaler.stats().updates == 0
    updates.step(scaler, one)
    updates.step(scaler, other)
    assert scaler.stats().updates == 1


# Optimizers that were unscaled or clipped together or one by one


@BAD
@pytest.mark.parametrize("how", ["unscaled", "clipped", "clipped in turn"])
def test_what_was_unscaled_before_is_divided_once_and_counted_once(how: str, one: float, other: float) -> None:
    scaler, optimizers = new_scaler(), pair()
    for number in range(1, 3):
        give(scaler, optimizers, one, other)
        if how == "unscaled":
            for each in optimizers:
                scaler.unscale_(each)
        elif how == "clipped":
            scaler.clip_grad_norm_(optimizers, 1e9)
        for each in optimizers:
            if how == "clipped in turn":
                scaler.clip_grad_norm_(each, 1e9)
            updates.step(scaler, each)
        assert scaler.stats().updates == number
    bad = [INF in (one, other)] * 2 if how == "clipped" else [one == INF, other == INF]
    assert [values(each)[0] for each in optimizers] == [0.0 if each else -1.0 for each in bad]


def test_one_that_was_clipped_and_not_stepped_is_carried_over_the_update() -> None:
    scaler, (one, other) = new_scaler(), pair()
    give(scaler, [one, other], 1.0, 1.0)
    scaler.clip_grad_norm_([one, other], 1e9)
    updates.step(scaler, one)
    assert updates.left_to_unscale(scaler, [one, other]) == []
    scaler.update()
    updates.step(scaler, other)
    assert values(other) == [-0.5]  # divided once


@BAD
def test_a_guard_counts_each_step(one: float, other: float) -> None:
    guard, optimizers = StepGuard("cpu", spike_sigma=6.0), pair()
    for number in range(1, 4):
        give(guard, optimizers, one, other)
        for each in optimizers:
            updates.step(guard, each)
        assert (guard.stats().updates, guard.stats().skipped) == (2 * number, number * (one, other).count(INF))
    assert [values(each)[0] for each in optimizers] == [0.0 if each == INF else -1.5 for each in (one, other)]

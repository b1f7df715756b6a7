"""StepGuard on one process: what it skips, what it leaves alone, when a step begins, and what it remembers."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import (
    DTYPES,
    PLACES,
    WAYS,
    Chained,
    Container,
    Place,
    assert_all_same,
    grads,
    sgd,
    started,
    take_step,
    values,
)
from torch import Tensor

from scaler_triton import GradScaler, ScalerStats, SkipStreakError, StepGuard
from scaler_triton.core.check import Checks
from scaler_triton.core.ranks import Ranks
from scaler_triton.policy import KEY
from scaler_triton.report.overflow import Spike

INF, NAN = math.inf, math.nan


def guard_on(place: Place, **arguments: Any) -> StepGuard:
    return StepGuard(place.device, backend=place.backend, **arguments)


def adamw(dtype: torch.dtype, place: Place, fused: bool) -> torch.optim.AdamW:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5, device=place.device).to(dtype))
    return torch.optim.AdamW([parameter], lr=0.1, fused=fused)


def give(optimizer: torch.optim.Optimizer, *numbers: float) -> None:
    """Give each parameter a gradient that holds one number, the last one also at its end."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter, number in zip(parameters, numbers, strict=True):
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.view(-1)[-1] = number


def everything(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return all parameters and the tensors of the optimizers' states."""
    held = [(each.state[p], p) for each in optimizers for p in each.param_groups[0]["params"]]
    return [tensor for state, parameter in held for tensor in (parameter, *state.values())]


def skipped(
    guard: StepGuard, optimizer: Any, norms: Sequence[float], how: str = "step", *, updates: bool = True
) -> str:
    """Take a step of each norm of a single gradient of one element; return "x" for each that is skipped."""
    found = ""
    for norm in norms:
        give(optimizer, norm)
        take_step(guard, optimizer, how, updates=updates)
        found += "x" if guard.was_skipped(optimizer) else "."
    return found


# What it leaves alone


def test_it_is_a_scaler_of_torchs_that_scales_nothing(monkeypatch: Any) -> None:
    guard = StepGuard("cpu")
    assert isinstance(guard, torch.amp.GradScaler)
    for outputs in (torch.ones(()), [torch.ones(2)], iter([torch.ones(2)]), "anything"):
        assert guard.scale(outputs) is outputs
    sgd_ = sgd([torch.ones(1)])
    guard.step(sgd_)
    monkeypatch.setattr(Tensor, "item", None)  # asking waits for no device
    assert guard.get_scale() == 1.0


def test_disabled_it_passes_everything_through() -> None:
    guard, optimizer = StepGuard("cpu", spike_sigma=3.0, enabled=False), sgd([torch.tensor([NAN])])
    loss = torch.ones(())
    assert guard.scale(loss) is loss
    guard.unscale_(optimizer)
    guard.step(optimizer)
    guard.update()
    assert math.isnan(values(optimizer)[0])
    assert (guard.state_dict(), guard.stats(), guard.was_skipped(optimizer)) == ({}, ScalerStats(), False)
    guard.load_state_dict({})


@PLACES
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_skipped_step_is_as_if_the_batch_had_not_been(
    place: Place, dtype: torch.dtype, fused: bool, how: str
) -> None:
    bad = {2: NAN, 4: -INF, 7: 900.0, 8: INF}
    guard, both = guard_on(place, spike_sigma=6.0, window=8), [adamw(dtype, place, fused) for _ in range(2)]
    for step in range(10):
        for optimizer in both if step not in bad else both[:1]:
            give(optimizer, bad.get(step, 1 + 0.1 * step))
        take_step(guard, both[0], how)
        assert guard.was_skipped(both[0]) == (step in bad)
        if step not in bad:
            if how == "clip":
                both[1].param_groups[0]["params"][0].grad = both[0].param_groups[0]["params"][0].grad.clone()
            both[1].step()
        held = [each.param_groups[0]["params"][0] for each in both]
        assert_all_same(*([p, *each.state[p].values()] for each, p in zip(both, held, strict=True)))
    assert guard.stats() == ScalerStats(updates=10, skipped=4, consecutive_skips=0, last_skip=9, spikes=1)


@PLACES
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Container, Chained])
@pytest.mark.parametrize("cls", [StepGuard, GradScaler])
def test_a_container_steps_with_its_own_hooks_or_not_at_all(
    place: Place, cls: Any, kind: type[Container], fused: bool, how: str
) -> None:
    """It is a plain optimizer to them, even of fused ones."""
    scaler = started(cls, place.device, backend=place.backend)
    both = [kind([adamw(torch.float32, place, fused) for _ in range(2)]) for _ in range(2)]
    calls: list[int] = []
    both[0].register_step_pre_hook(lambda *_: calls.append(step))
    for step in range(4):
        for container in both:
            for optimizer in container.optimizers:
                give(optimizer, NAN if step == 1 and optimizer is container.optimizers[1] else 0.0)
                optimizer.param_groups[0]["params"][0].grad *= 0.125 * scaler.get_scale()  # a norm of 0.25 * sqrt(2)
        take_step(scaler, both[0], how)
        assert scaler.was_skipped(both[0]) == (step == 1)
        if step != 1:
            for optimizer in both[1].optimizers:
                optimizer.param_groups[0]["params"][0].grad.fill_(0.125)[-1] = 0.0
            both[1].step()
        assert_all_same(*(everything(each.optimizers) for each in both))
    assert calls == [0, 2, 3]


# When a step begins


@PLACES
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("updates", [False, True])
def test_update_may_be_left_out(place: Place, how: str, updates: bool) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=4), sgd([torch.ones(1)], place.device)
    found = skipped(guard, optimizer, [1.0, 1.1, NAN, 1.0, 50.0, 1.0, 1.0], how, updates=updates)
    assert found == "..x.x.."
    assert guard.stats() == ScalerStats(updates=7, skipped=2, last_skip=5, spikes=1)


@PLACES
@pytest.mark.parametrize("bad", [NAN, 900.0])
@pytest.mark.parametrize("updates", ["never", "batch"])
def test_what_was_unscaled_keeps_its_decision_while_others_begin_or_end(place: Place, bad: float, updates: str) -> None:
    """As in a GAN, whose generator steps less often, with torch's clipping: that norm must not be judged."""
    guard, rare, often = guard_on(place, spike_sigma=3.0, window=4), *(sgd([torch.ones(1)], place.device) for _ in "ab")
    for number in (2.0, None, 2.0, None, 2.0, None, bad):
        todo = [often] if number is None else [rare, often]
        for optimizer in todo:
            give(optimizer, 2.0 if optimizer is often else number)
            guard.unscale_(optimizer)
            optimizer.param_groups[0]["params"][0].grad.clamp_(max=1.0)
        for call, *given in [*((guard.step, each) for each in todo), *[(guard.update,)] * (updates == "batch")]:
            call(*given)
    assert guard.was_skipped(rare)
    assert skipped(guard, rare, [2.0]) == "."
    assert guard.stats().skipped == 1
    assert guard.state_dict()[KEY]["windows"][0] == [2.0, 2.0, 2.0 if math.isnan(bad) else 2.006, 2.0]


@PLACES
@pytest.mark.parametrize("bad", [NAN, 900.0, 3.0])
def test_what_was_clipped_together_stays_so_over_an_update(place: Place, bad: float) -> None:
    """The clipped gradients of the other one must neither be taken for unclipped, nor step on without it."""
    guard = guard_on(place, spike_sigma=3.0, window=4)
    one, other = sgd([torch.ones(1)], place.device), sgd([torch.ones(1)], place.device)
    for number in (3.0, 3.0, 3.0, bad):
        give(one, number)
        give(other, 4.0)
        guard.clip_grad_norm_([one, other], 1.0)
        before = values(other)
        for optimizer in (one, other):
            guard.step(optimizer)
            guard.update()
    skips = bad != 3.0
    assert guard.was_skipped(one) == guard.was_skipped(other) == skips
    assert (values(other) == before, grads(other) == [4.0]) == (skips, skips)  # after a spike nothing is clipped
    assert guard.stats().spikes == (bad == 900.0)
    windows = guard.state_dict()[KEY]["windows"]
    assert windows[0] == pytest.approx([5.0] * 3 + {3.0: [5.0], 900.0: [5.015]}.get(bad, []))


@PLACES
@pytest.mark.parametrize("how", ["unscale_", "clip"])
@pytest.mark.parametrize(("number", "later", "skips"), [(NAN, 1.0, False), (1e6, 1.0, False), (1.0, 1e6, True)])
def test_a_check_begins_anew_after_a_batch_that_was_left_out(
    place: Place, how: str, number: float, later: float, skips: bool
) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=2), sgd([None], place.device)
    skipped(guard, optimizer, [1.0, 1.1], how)
    for size in (number, later):
        give(optimizer, size)
        guard.unscale_(optimizer) if how == "unscale_" else guard.clip_grad_norm_(optimizer, 1.0)
    guard.step(optimizer)
    assert guard.was_skipped(optimizer) is skips
    assert guard.stats().updates == 3


def test_a_step_that_raised_is_not_carried_over_anothers_update() -> None:
    guard, (failing, other) = StepGuard("cpu"), (sgd([torch.ones(1)]) for _ in "ab")
    guard.clip_grad_norm_([failing, other], 1.0)
    failing.step = lambda: {}["out of order"]
    with pytest.raises(KeyError):
        guard.step(failing)
    guard.step(other)
    guard.update()
    assert guard._ours.steps.open(failing).phase.name == "READY"


def test_a_step_before_a_checkpoint_is_loaded_counts_no_more() -> None:
    guard, optimizer = StepGuard("cpu", max_consecutive_skips=0), sgd([None])
    state = guard.state_dict()
    for number in (NAN, *[1.0] * 6):  # without updates
        give(optimizer, number)
        guard.step(optimizer)
        if number != 1.0:
            guard.load_state_dict(state)
    assert (guard.stats().updates, guard.stats().skipped) == (6, 0)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("again", ["unscale_", "clip", "update", "step"])
@pytest.mark.parametrize("whose", ["ours", "another's"])
def test_a_check_that_failed_on_a_rank_is_counted_before_the_next_one(whose: str, again: str) -> None:
    """The other rank may have called its step."""
    guard, optimizer, told = StepGuard("cpu"), sgd([torch.ones(1)]), torch.tensor([1.0, 1.0, -INF, -INF])

    def reduce_(self: Ranks, values: Tensor, op: str) -> None:
        values.copy_(torch.maximum(values, told))

    fails: Any = mock.patch.object(Checks, "take_looks", side_effect=MemoryError)
    with suppress(MemoryError), fails if whose == "ours" else mock.patch.object(Ranks, "reduce_", reduce_):
        guard.unscale_(optimizer)
    if again == "update":
        guard.step(sgd([torch.ones(1)]))
        guard.update()
    else:
        with suppress(RuntimeError):
            take_step(guard, optimizer, again)
    assert (guard.stats().updates, guard.stats().skipped) == (1 if again == "step" else 2, 1)


@pytest.mark.usefixtures("two_ranks")
def test_of_several_checks_that_failed_each_is_counted_before_a_streak_is_raised() -> None:
    guard, bad, both = StepGuard("cpu", max_consecutive_skips=0), sgd([torch.tensor([NAN])]), [sgd([None]), sgd([None])]
    for _ in range(4):  # the counters are looked at four updates later
        guard.step(bad)
    for optimizer in both:
        with mock.patch.object(Checks, "take_looks", side_effect=MemoryError), pytest.raises(MemoryError):
            guard.unscale_(optimizer)
    with pytest.raises(SkipStreakError):
        guard.update()
    assert guard.stats().updates == 6


@PLACES
def test_a_check_that_is_made_again_judges_one_step(place: Place) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=4), sgd([torch.ones(1)], place.device)
    for _ in range(3):
        for number in (7.0, 5.0, 2.0):
            give(optimizer, number)
            guard._check_inf_per_device(optimizer)
        guard.clip_grad_norm_(optimizer, 1e3)
        guard.step(optimizer)
        guard.update()
    assert guard.state_dict()[KEY]["windows"] == [[2.0] * 3]


def test_a_check_without_gradients_has_no_norm() -> None:
    guard, optimizer = StepGuard("cpu", spike_sigma=3.0), sgd([None])
    guard.unscale_(optimizer)
    assert guard.state_dict()[KEY]["windows"] == [[]]


def test_a_closure_by_position_is_refused() -> None:
    """It would make gradients that nobody has checked."""
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        StepGuard("cpu").step(sgd([torch.ones(1)]), lambda: torch.ones(()))


def test_a_fused_step_without_gradients_is_over_too_and_counts_nothing() -> None:
    guard, optimizer = StepGuard("cpu"), torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    for _ in range(2):
        guard.step(optimizer)
    assert guard.stats().updates == 0


# Spikes


@PLACES
@pytest.mark.parametrize("how", WAYS)
def test_a_spike_is_skipped_and_a_lasting_change_accepted(place: Place, how: str) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=6), sgd([torch.ones(1)], place.device)
    assert skipped(guard, optimizer, [1.0, 9.0, 1.1, 1.2, 0.9, 1.0, 1.0, 1.1], how) == "........"  # too few, then 9
    assert skipped(guard, optimizer, [40.0, 1.0, NAN, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], how) == "x.xxxxx..."
    assert guard.stats().spikes == guard.stats().skipped - 1


@PLACES
def test_another_norm_or_some_parameters_are_clipped_and_each_optimizer_judged(place: Place) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=2), sgd([torch.ones(1)] * 2, place.device)
    first = optimizer.param_groups[0]["params"][0]
    for number, options in enumerate([{"norm_type": INF}, {"parameters": [first]}, {"norm_type": 1.0}]):
        give(optimizer, 3.0, 4.0 if number < 2 else 400.0)
        guard.clip_grad_norm_(optimizer, 2.0, **options)
        guard.step(optimizer)
        assert guard.was_skipped(optimizer) == (number == 2)
        guard.update()
    assert guard._ours.steps.open(optimizer).notes["window"].norms() == [5.0, 5.015]


@PLACES
def test_parameters_that_are_clipped_one_after_another_are_judged_as_they_came(place: Place) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=2), sgd([torch.ones(1)] * 2, place.device)
    give(optimizer, 3.0, 4.0)
    for parameter in optimizer.param_groups[0]["params"]:
        guard.clip_grad_norm_(optimizer, 2.0, parameters=[parameter])
    guard.step(optimizer)
    assert guard._ours.steps.open(optimizer).notes["window"].norms() == [5.0]


@PLACES
def test_a_report_says_which_it_was(place: Place) -> None:
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=4), sgd([torch.ones(1)] * 2, place.device)
    model = [("a", optimizer.param_groups[0]["params"][0]), ("b", optimizer.param_groups[0]["params"][1])]
    for numbers in ((3.0, 4.0), (3.0, 4.0), (30.0, 40.0)):
        give(optimizer, *numbers)
        guard.clip_grad_norm_(optimizer, 1.0)
        pending = guard.overflow_report(model)
        guard.step(optimizer)
    assert pending.pending
    report = guard.overflow_report(model)
    assert report.spikes == pending.spikes == (Spike(pytest.approx(50.0), pytest.approx(5.015)),)
    by_torch_on_gpu = place.device == "cuda" and place.backend == "torch"  # leaves no marks
    assert str(report).startswith("The last skip, at update 3: spike: norm 50, limit 5.01.")
    give(optimizer, 3.0, NAN)
    guard.step(optimizer)
    guard.update()
    report = guard.overflow_report(model)
    bad = [] if by_torch_on_gpu else ["b"]
    assert (report.update, [each.name for each in report.bad], report.spikes) == (4, bad, ())


@PLACES
def test_a_report_names_a_spike_that_waited_for_others_steps_and_updates(place: Place) -> None:
    guard, one, other = guard_on(place, spike_sigma=3.0, window=4), *(sgd([torch.ones(1)], place.device) for _ in "ab")
    skipped(guard, other, [1.0] * 4)
    give(other, 50.0)
    guard.unscale_(other)
    for number in (NAN, 1.0):
        give(one, number)
        guard.step(one)
    guard.update()
    guard.step(other)
    guard.update()
    assert [spike.norm for spike in guard.overflow_report().spikes] == [50.0]


def test_a_report_names_what_the_last_check_of_a_waiting_step_found() -> None:
    guard, one, other = StepGuard("cpu"), sgd([torch.ones(1)]), sgd([torch.ones(1)] * 2)
    for numbers in ((NAN, 1.0), (1.0, NAN)):  # a batch is left out
        give(other, *numbers)
        guard.unscale_(other)
        give(one, NAN)
        guard.step(one)
    guard.step(other)
    model = [(name, each) for name, each in zip("ab", other.param_groups[0]["params"], strict=True)]
    assert [each.name for each in guard.overflow_report(model).bad if each.name in "ab"] == ["b"]


@PLACES
@pytest.mark.parametrize("together", [True, False])
def test_a_report_names_the_gradients_of_optimizers_that_were_checked_before_either_stepped(
    place: Place, together: bool
) -> None:
    guard, both = guard_on(place), [sgd([torch.ones(1)], place.device) for _ in "ab"]
    model = [(name, each.param_groups[0]["params"][0]) for name, each in zip("ab", both, strict=True)]
    for bad in ("ab", "b", "a"):
        for name, optimizer in zip("ab", both, strict=True):
            give(optimizer, NAN if name in bad else 1.0)
        if together:
            guard.clip_grad_norm_(both, 1.0)
        else:
            for optimizer in both:
                guard.unscale_(optimizer)
        for optimizer in both:
            guard.step(optimizer)
        if not (place.device == "cuda" and place.backend == "torch"):  # leaves no marks
            last = "b" if bad == "ab" and not together else bad
            assert {each.name for each in guard.overflow_report(model).bad} >= {*last}


@PLACES
def test_metrics_have_the_last_norm_and_what_it_was_compared_with(place: Place) -> None:
    """A spike's own limit, to the bit; after it the window holds that limit, not the norm."""
    guard, optimizer = guard_on(place, spike_sigma=3.0, window=4), sgd([torch.ones(1)], place.device)
    assert StepGuard(place.device, enabled=False).metrics() == {}
    logged = []
    for norm in (1.0, 2.0, 1.5, 100.0, 1.0, NAN, 2.0):
        give(optimizer, norm)
        guard.step(optimizer)
        guard.update()
        for _ in range(2 if place.device == "cuda" else 1):
            if place.device == "cuda":
                torch.cuda.synchronize()
            logged.append(guard.metrics())
    logged = logged[1::2] if place.device == "cuda" else logged
    assert [each.get("guard/norm") for each in logged] == [1.0, 2.0, 1.5, 100.0, 1.0, None, 2.0]
    third = 1.5 + 3.0 * math.sqrt(0.5)  # of 1 and 2
    fourth = 1.5 + 3.0 * 0.5  # of 1, 2 and 1.5
    fifth = [1.0, 2.0, 1.5, fourth]
    last = [2.0, 1.5, fourth, 1.0]  # 1 has left the window
    limits = [sum(h) / 4 + 3.0 * math.sqrt(sum((x - sum(h) / 4) ** 2 for x in h) / 3) for h in (fifth, last, last)]
    assert [each.get("guard/limit") for each in logged] == pytest.approx([None, None, third, fourth, *limits])
    names = ("updates", "skipped", "skip_share", "skipped_in_a_row", "spikes")
    assert [logged[3][f"guard/{name}"] for name in names] == [4.0, 1.0, 0.25, 1.0, 1.0]
    assert {*logged[3]} == {f"guard/{name}" for name in (*names, "norm", "limit")}
    assert {type(number) for number in logged[3].values()} == {float}
    assert logged[-1]["guard/skipped_in_a_row"] == 0.0
    assert {*StepGuard(place.device).metrics("")} == {*names}  # without sigma nothing computes a norm


def test_metrics_number_the_norms_of_several_optimizers() -> None:
    guard, held = StepGuard("cpu", spike_sigma=3.0), [sgd([torch.ones(1)]) for _ in range(2)]
    for optimizer, norm in zip(held, (3.0, 4.0), strict=True):
        give(optimizer, norm)
        guard.step(optimizer)
    assert [guard.metrics("").get(name) for name in ("norm", "norm_0", "norm_1")] == [None, 3.0, 4.0]
    guard.clip_grad_norm_(held, 1.0)  # under one norm
    assert guard.metrics("")["norm_0"] == 5.0


# Limits, states, copies


def test_skips_in_a_row_raise_also_without_updates() -> None:
    guard, optimizer = StepGuard("cpu", max_consecutive_skips=3), sgd([torch.tensor([NAN])])
    for _ in range(7):  # the counters are looked at four updates later
        guard.step(optimizer)
    with pytest.raises(SkipStreakError, match="4 consecutive skips, more than max_consecutive_skips=3"):
        guard.step(optimizer)
    guard.set_limits(max_consecutive_skips=None)
    guard.step(optimizer)


ARGUMENTS: list[tuple[str, Any, type[Exception], str]] = [
    *(("spike_sigma", value, ValueError, "must be a positive number") for value in (0.0, -1, NAN, INF)),
    ("spike_sigma", "6", TypeError, "must be a number"),
    *(("window", value, ValueError, r"must be an int in \[2, 4096\]") for value in (1, 4097)),
    ("window", 2.5, TypeError, "must be an int"),
    ("max_consecutive_skips", -1, ValueError, "must be None or an int >= 0"),
    ("backend", "cuda", ValueError, "must be one of"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), ARGUMENTS)
def test_wrong_arguments_are_named(name: str, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{name} {text}.*, got '?{value}"):
        StepGuard("cpu", **{name: value})


def test_its_scale_cannot_be_changed() -> None:
    guard, optimizer = StepGuard("cpu"), sgd([torch.tensor([NAN])])
    guard.step(optimizer)
    with pytest.raises(ValueError, match="new_scale must be 1.0"):
        guard.update(2.0)
    with pytest.raises(TypeError, match="no limit but max_consecutive_skips, got min_scale"):
        guard.set_limits(min_scale=2.0)
    guard.update()
    assert guard._scale.item() == guard.get_scale() == 1.0


def remembered(sigma: float | None = 3.0, window: int = 4) -> tuple[StepGuard, torch.optim.Optimizer]:
    """Return a guard that has seen five norms and skipped one."""
    guard, optimizer = StepGuard("cpu", spike_sigma=sigma, window=window), sgd([torch.ones(1)])
    assert skipped(guard, optimizer, [1.0, 1.5, 1.0, NAN, 1.5, 1.25]) == "...x.."
    return guard, optimizer


def test_windows_are_saved_in_the_order_of_first_steps_also_where_one_has_no_norms_of_its_own_yet() -> None:
    guard, optimizers = StepGuard("cpu", spike_sigma=3.0), [sgd([torch.full((1,), n)]) for n in (1.0, 3.0, 4.0)]
    for optimizer in optimizers:
        guard._ours.steps.open(optimizer)
    guard.clip_grad_norm_(optimizers[:0:-1], 9.0)
    for optimizer in reversed(optimizers):
        guard.step(optimizer)
    assert guard.state_dict()[KEY]["windows"] == [[5.0], [], [1.0]]


def test_checkpoints_go_to_and_from_scalers() -> None:
    guard, optimizer = remembered()
    state = guard.state_dict()
    assert state[KEY]["windows"] == [[1.5, 1.0, 1.5, 1.25]]
    torchs, ours = torch.amp.GradScaler("cpu"), GradScaler("cpu")
    torchs.load_state_dict(state)
    ours.load_state_dict(state)
    assert torchs.get_scale() == ours.get_scale() == 1.0
    assert ours.limits == GradScaler("cpu").limits  # the guard's would keep its scale at 1
    guard.load_state_dict(GradScaler("cpu", init_scale=8.0, max_consecutive_skips=7, min_scale=2.0).state_dict())
    give(optimizer, 1.0)
    guard.step(optimizer)
    guard.update()
    assert (guard._scale.item(), guard.limits.max_consecutive_skips, guard.limits.min_scale) == (1.0, 7, 1.0)
    plain, _held = remembered(sigma=None)
    without = plain.state_dict()
    assert without[KEY]["windows"] == []
    guard.load_state_dict(without)
    assert guard.state_dict()[KEY]["windows"] == [[]]


@pytest.mark.parametrize("windows", [5, ["ab"], [[1.0, NAN]], [[0.0], [INF]], [[-1.0]]], ids=str)
def test_a_wrong_window_is_named_and_changes_nothing(windows: Any) -> None:
    guard, _held = remembered()
    before = guard.state_dict()
    with pytest.raises((TypeError, ValueError), match="^windows must"):
        guard.load_state_dict({**before, KEY: {**before[KEY], "windows": windows}})
    with pytest.raises(RuntimeError, match="empty"):
        guard.load_state_dict({})
    assert guard.state_dict() == before

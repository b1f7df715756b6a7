"""What a scaler tells of its updates and of each optimizer's last step."""

from __future__ import annotations

import dataclasses
import gc
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Place, places, sgd, started
from scaler_triton.flag_buffer import FlagBuffer
from scaler_triton.mirror import HostMirror
from scaler_triton.stats import NAMES, Counters, Lagging

from scaler_triton import GradScaler, ScalerStats, ShardedGradScaler

EVERYWHERE = pytest.mark.parametrize("place", places(), ids=str)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
GOOD, BAD = 1.0, math.inf


def at(place: Place, **kwargs: Any) -> Any:
    return started(GradScaler, place.device, backend=place.backend, **{"init_scale": 64.0, **kwargs})


def optimizer_of(gradient: float, place: Place, *, fused: bool = False) -> Any:
    return sgd([torch.tensor([gradient])], place.device, fused=fused)


def renew(optimizer: Any, gradient: float) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, gradient)


@EVERYWHERE
@FUSED
def test_every_update_is_counted(place: Place, fused: bool) -> None:
    scaler = at(place, growth_interval=2)
    assert scaler.stats() == scaler.stats(wait=False) == ScalerStats()
    for gradient in (GOOD, BAD, BAD, GOOD, GOOD, BAD):
        scaler.step(optimizer_of(gradient, place, fused=fused))
        scaler.update()
    want = ScalerStats(updates=6, skipped=3, consecutive_skips=1, growths=1, backoffs=3, last_skip=6)
    assert scaler.stats() == want
    assert str(scaler.stats()) == str(want)  # numbers, not tensors
    scaler.update(8.0)  # nothing was checked
    assert scaler.stats() == want
    for gradient in (BAD, GOOD, BAD):
        scaler.step(optimizer_of(gradient, place, fused=fused))
        scaler.update(8.0)
    want = ScalerStats(updates=9, skipped=5, consecutive_skips=1, growths=1, backoffs=3, last_skip=9)
    assert scaler.stats() == want


@EVERYWHERE
@pytest.mark.parametrize(
    ("gradient", "factors"), [(BAD, {"backoff_factor": 1 - 1e-9}), (GOOD, {"growth_factor": 1 + 1e-9})]
)
def test_a_product_that_rounds_back_is_no_change_of_the_scale(
    place: Place, gradient: float, factors: dict[str, float]
) -> None:
    scaler = at(place, growth_interval=1, **factors)
    scaler.step(optimizer_of(gradient, place))
    scaler.update()
    assert scaler.get_scale() == 64.0
    assert (scaler.stats().growths, scaler.stats().backoffs) == (0, 0)


def test_what_does_not_wait_is_there_at_once_where_nothing_is_waited_for() -> None:
    scaler = started(GradScaler, "cpu")
    scaler.step(sgd([torch.tensor([BAD])]))
    scaler.update()
    assert scaler.stats(wait=False) == scaler.stats()


def test_stats_are_frozen_and_a_disabled_scaler_has_none() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScalerStats().updates = 3  # type: ignore[misc]
    scaler = GradScaler("cpu", enabled=False)
    optimizer = sgd([torch.tensor([BAD])])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.stats() == ScalerStats()
    assert scaler.was_skipped(optimizer) is False


@EVERYWHERE
def test_an_update_counts_once_whatever_the_number_of_optimizers(place: Place) -> None:
    scaler = at(place)
    for gradient in (GOOD, BAD, BAD):
        scaler.step(optimizer_of(gradient, place))
    scaler.update()
    assert scaler.stats() == ScalerStats(updates=1, skipped=1, consecutive_skips=1, backoffs=1, last_skip=1)


@EVERYWHERE
@FUSED
def test_flags_written_by_hand_count(place: Place, fused: bool) -> None:
    """Then the flags do not lie where one launch finds them all."""
    scaler = at(place)
    optimizer = optimizer_of(GOOD, place, fused=fused)
    for number in (1, 2):
        renew(optimizer, GOOD)
        scaler.unscale_(optimizer)
        if number == 2:
            for flag in scaler._found_inf_per_device(optimizer).values():
                flag.fill_(1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.stats().updates == number
        assert scaler.was_skipped(optimizer) is (number == 2)
    assert scaler.stats().last_skip == 2


BEGINNINGS = [(how, fused) for how in ("step", "unscale_", "clip", "inf-norm clip") for fused in (False, True)]


@EVERYWHERE
@pytest.mark.parametrize(("begins_by", "fused"), [*BEGINNINGS, ("deferred clip", True)])
def test_was_skipped_tells_before_and_after_update(place: Place, fused: bool, begins_by: str) -> None:
    scaler = at(place)
    defer = begins_by == "deferred clip"
    optimizer = optimizer_of(GOOD, place, fused=fused)
    for gradient in (GOOD, BAD, GOOD, BAD, BAD):
        renew(optimizer, gradient)
        if begins_by == "unscale_":
            scaler.unscale_(optimizer)
        elif begins_by != "step":
            scaler.clip_grad_norm_(optimizer, 0.001, math.inf if "inf" in begins_by else 2.0, defer=defer)
        if begins_by != "step":
            with pytest.raises(ValueError, match="^optimizer must have been stepped and not unscaled since, got SGD$"):
                scaler.was_skipped(optimizer)
        scaler.step(optimizer)
        for _ in range(2):
            assert scaler.was_skipped(optimizer) is (gradient == BAD)
        scaler.update()
        for _ in range(2):
            assert scaler.was_skipped(optimizer) is (gradient == BAD)


@EVERYWHERE
@FUSED
def test_it_is_kept_while_others_step(place: Place, fused: bool) -> None:
    scaler = at(place)
    seldom, often = optimizer_of(BAD, place, fused=fused), optimizer_of(GOOD, place, fused=fused)
    scaler.step(seldom)
    scaler.step(often)
    scaler.update()
    for gradient in (GOOD, BAD, GOOD):
        renew(often, gradient)
        scaler.step(often)
        scaler.update()
        assert scaler.was_skipped(often) is (gradient == BAD)
        assert scaler.was_skipped(seldom) is True


@FUSED
def test_never_stepped_is_a_valueerror(fused: bool) -> None:
    scaler = started(GradScaler, "cpu")
    optimizer = sgd([torch.tensor([BAD])], fused=fused)
    text = "^optimizer must have been stepped and not unscaled since, got SGD$"
    with pytest.raises(ValueError, match=text):
        scaler.was_skipped(optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match=text):
        scaler.was_skipped(optimizer)


@EVERYWHERE
@FUSED
def test_an_unscale_that_fails_ends_the_step_before(place: Place, fused: bool) -> None:
    scaler = at(place)
    optimizer = sgd([torch.full((2,), BAD)], place.device, fused=fused)
    scaler.step(optimizer)
    scaler.update()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, device=place.device).expand(2)
    with pytest.raises(RuntimeError, match="single memory location"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="^optimizer must have been stepped"):
        scaler.was_skipped(optimizer)


def test_a_fused_step_that_raised_counts_as_skipped_once_it_is_over() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fails:
                raise OSError("full")

    (parameter,) = sgd([torch.tensor([GOOD])]).param_groups[0]["params"]
    optimizer = Failing([parameter], lr=1.0, fused=True)
    scaler = started(GradScaler, "cpu")
    with pytest.raises(OSError, match="full"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="^optimizer must have been stepped"):
        scaler.was_skipped(optimizer)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is True
    scaler.update()
    optimizer.fails = False
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is False


def test_a_plain_step_that_raised_was_none() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise OSError("full")

    optimizer = Failing(sgd([torch.tensor([GOOD])]).param_groups[0]["params"], lr=1.0)
    scaler = started(GradScaler, "cpu")
    with pytest.raises(OSError, match="full"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="^optimizer must have been stepped"):
        scaler.was_skipped(optimizer)


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@FUSED
def test_a_wrapper_and_the_optimizer_inside_give_one_answer(fused: bool) -> None:
    inner = sgd([torch.tensor([BAD])], fused=fused)
    scaler = started(GradScaler, "cpu")
    scaler.step(Wrapper(Wrapper(inner)))
    scaler.update()
    assert scaler.was_skipped(inner) is scaler.was_skipped(Wrapper(inner)) is True


class OldStyle(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        grad_scaler._check_inf_per_device(self)


@pytest.mark.parametrize("gradient", [GOOD, BAD])
def test_optimizers_that_are_passed_the_scaler(gradient: float) -> None:
    optimizer = OldStyle(sgd([torch.tensor([gradient])]).param_groups[0]["params"], lr=1.0)
    scaler = started(GradScaler, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.was_skipped(optimizer) is (gradient == BAD)


@EVERYWHERE
def test_more_optimizers_than_the_flag_buffer_has_rows(place: Place) -> None:
    bad = [bool(i % 3) for i in range(FlagBuffer.ROWS + 3)]
    optimizers = [optimizer_of(BAD if each else GOOD, place, fused=True) for each in bad]
    scaler = at(place)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.was_skipped(optimizer) for optimizer in optimizers] == bad


class Container:
    """Cannot be referred to weakly."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return list(self.optimizer.param_groups)

    def step(self) -> None:
        self.optimizer.step()


def test_optimizers_that_are_gone_are_forgotten_and_containers_are_kept_one_at_a_time() -> None:
    scaler = started(GradScaler, "cpu")
    for _ in range(5):
        container = Container(sgd([torch.tensor([BAD])]))
        scaler.step(container)
        scaler.update()
        assert scaler.was_skipped(container) is True
        scaler.step(sgd([torch.tensor([GOOD])]))
        scaler.update()
        gc.collect()
        assert len(scaler._records.all()) <= 2


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_a_copy_knows_of_no_step(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    monkeypatch.setattr(ShardedGradScaler, "_agreement", lambda self, plan: None)
    scaler = started(cls, "cpu")
    optimizer = sgd([torch.tensor([GOOD])])
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ValueError, match="^optimizer must have been stepped"):
        copy.deepcopy(scaler).was_skipped(optimizer)


# The holders


def test_counters_move_to_where_updates_run_and_back() -> None:
    cpu = torch.device("cpu")
    counters = Counters(range(7))
    assert counters.on_host() is counters.on_host()
    tensor = counters.on(cpu)
    assert tensor is counters.on(cpu)
    tensor += 1
    assert counters.on_host() == counters.read() == counters.newest() == list(range(1, 8))


class SlowMirror(HostMirror):
    """A copy that has arrived when the test says so, question by question."""

    answers: Iterator[bool]

    def has_arrived(self) -> bool:
        return next(self.answers)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowMirror]:
    monkeypatch.setattr("scaler_triton.stats.HostMirror", SlowMirror)
    return SlowMirror


def test_what_does_not_wait_is_what_had_arrived(slow: type[SlowMirror]) -> None:
    slow.answers = iter([False, False, True, False, True, False])
    counters, seen = Counters(), []
    tensor = counters.on(torch.device("cpu"))
    for _ in range(4):
        tensor[0] += 1
        seen.append(counters.newest()[0])
    assert seen == [0, 0, 1, 3]  # the copies were started by the first call and the third


def test_older_values_that_arrive_late_are_not_taken(slow: type[SlowMirror]) -> None:
    slow.answers = iter([False, True, False])
    counters = Counters()
    tensor = counters.on(torch.device("cpu"))
    assert counters.newest()[0] == 0
    tensor[0] = 5
    assert counters.read()[0] == counters.newest()[0] == 5


def test_lagging_returns_what_was_pushed_so_many_times_before() -> None:
    for values in ([0] * len(NAMES), torch.zeros(len(NAMES), dtype=torch.int64)):
        lagging, seen = Lagging(), []
        for number in range(10):
            values[0] = number
            taken = lagging.push(values)
            seen.append(taken and taken[0])
        assert seen == [None] * Lagging.LAG + list(range(10 - Lagging.LAG))


def test_a_mirror_holds_the_value_of_its_start() -> None:
    source = torch.tensor([1, 2])
    mirror = HostMirror(source)
    mirror.start()
    source += 1
    assert mirror.has_arrived()
    assert mirror.read() == [1, 2]


def test_a_step_of_a_freed_optimizer_is_not_that_of_one_at_its_id() -> None:
    scaler, freed, later = started(GradScaler, "cpu"), *(sgd([torch.tensor([BAD])]) for _ in range(2))
    scaler.step(freed)
    records = scaler._records._records
    records[id(later)] = records.pop(id(freed))  # as if it had been made where the other one was
    with pytest.raises(ValueError, match="optimizer must have been stepped"):
        scaler.was_skipped(later)

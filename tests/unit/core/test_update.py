"""The update rule in Python, in torch's ops and in the kernel; the counters, and what is made of them."""

import math
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, sgd, started
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.amp.grad_scaler import OptState
from update_rule import CPU, NAMED, TRITON, any_limits, any_numbers, plain_rule

from scaler_triton import GradScaler, ScalerStats, SkipStreakError
from scaler_triton.core import update as rule
from scaler_triton.core.update import Counters, LaggingCounters, Numbers
from scaler_triton.kernels import abi
from scaler_triton.policy import NO_LIMITS, Limits, no_counters

LAG = LaggingCounters.LAG


def at(place: Place, **options: Any) -> Any:
    return started(GradScaler, place.device, **{"init_scale": 64.0, "backend": place.backend, **options})


def scales(scaler: Any, *, bad: str) -> list[float]:
    """Return the scale after each of some updates: "x" overflows, "." does not."""
    seen = []
    for each in bad:
        scaler.step(sgd([torch.tensor([math.inf if each == "x" else 1.0])], scaler._device))
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


# The rule: plainly, and on every path


@NAMED
@given(
    st.one_of(st.floats(width=32), st.sampled_from([abi.MIN_SCALE, 2.0**127, 1e-45, 0.0, 65536.0])),
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, math.nan]), min_size=1, max_size=12),
    any_numbers,
    any_limits(),
    st.sampled_from([(), (1,)]),
)
@example(65536.0, [1.0] * 4 + [0.0] * 4, (2.0, 0.5, 2), Limits(1.0, 65536.0, 3), ())
@example(abi.MAX_SCALE, [0.0, 0.0], (1 + 2.0**-26, 0.5, 1), NO_LIMITS, ())  # the product rounds back: no growth
@example(64.0, [0.0, 1.0], (1 + 2.0**-30, 1 - 2.0**-30, 1), NO_LIMITS, ())
@example(math.nan, [0.0, 1.0, 1.0], (2.0, 0.5, 1), Limits(hysteresis=2), (1,))
@example(2.0**127, [0.0], (2 - 2.0**-24, 0.5, 1), NO_LIMITS, ())  # the least product that rounds to infinity
@settings(max_examples=60, deadline=None)
def test_every_path_is_the_rule(
    device: str, path: Any, scale: float, flags: list[float], numbers: Numbers, limits: Limits, shape: Any
) -> None:
    counters, tracker, held = no_counters(), 0, Counters()
    state = torch.full(shape, scale, device=device), torch.zeros(shape, dtype=torch.int32, device=device)
    for flag in flags:
        scale, tracker = plain_rule(scale, tracker, flag != 0, numbers, limits, counters)
        path(*state, torch.tensor(flag, device=device), (numbers, limits), held)
        assert (state[0].item(), state[1].item(), held.read()) == (scale, tracker, counters)
        assert limits.min_scale <= scale <= limits.max_scale


@NAMED
@pytest.mark.parametrize(
    ("before", "interval", "after"),
    [
        (7, 3, None),  # an interval set below the tracker is due
        *((2, interval, 3) for interval in (2**31 + 1, 2**32 + 3, 10**12)),
        *((tracker, 2**32 + 3, abi.MAX_TRACKER) for tracker in (abi.MAX_TRACKER - 1, abi.MAX_TRACKER)),
    ],
)
def test_3_the_scale_grows_at_or_beyond_the_interval_and_the_tracker_saturates(
    device: str, path: Any, before: int, interval: int, after: int | None
) -> None:
    real = torch._amp_update_scale_

    def on_cuda(*args: Any) -> Tensor:  # whose kernel takes the interval modulo 2^32
        return real(*args[:-1], (args[-1] + 2**31) % 2**32 - 2**31)

    scale, tracker = torch.tensor(4.0, device=device), torch.tensor(before, dtype=torch.int32, device=device)
    with mock.patch.object(torch, "_amp_update_scale_", on_cuda):
        path(scale, tracker, torch.zeros((), device=device), ((2.0, 0.5, interval), NO_LIMITS), Counters())
    assert (scale.item(), tracker.item()) == ((8.0, 0) if after is None else (4.0, after))


# A scaler's updates


@PLACES
@pytest.mark.parametrize("gradient", [1.0, math.inf])
@pytest.mark.parametrize("tracker", [0, 5])
def test_every_update_writes_the_scale_whether_it_changes_or_not(place: Place, gradient: float, tracker: int) -> None:
    """Fault 4: a loss that was scaled before cannot be differentiated after it, as with torch, at whichever step."""
    scaler = at(place, growth_interval=tracker + 1, growth_factor=1.5, backoff_factor=0.5, hysteresis=2)
    loss = scaler.scale(torch.ones((), device=place.device, requires_grad=True))
    scaler.step(sgd([torch.tensor([gradient])], place.device))
    version = scaler._scale._version
    scaler.update()
    assert scaler._scale._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@PLACES
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [3, abi.ROWS + 3])
@pytest.mark.parametrize("bad", [0, -1])
def test_one_update_takes_the_flags_of_all_optimizers_wherever_they_are(
    place: Place, fused: bool, count: int, bad: int
) -> None:
    """Flags beyond the rows of the buffer have memory of their own."""
    scaler, optimizers = at(place), [sgd([torch.ones(1)], place.device, fused=fused) for _ in range(count)]
    optimizers[bad].param_groups[0]["params"][0].grad.fill_(math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [index for index, each in enumerate(optimizers) if scaler.was_skipped(each)] == [bad % count]
    want = ScalerStats(updates=1, skipped=1, consecutive_skips=1, backoffs=1, last_skip=1)
    assert str(scaler.stats()) == str(want)  # numbers, not tensors


@PLACES
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_state_that_other_code_puts_in_counts_once(place: Place, kind: Any) -> None:
    scaler, found = at(place), {torch.device(place.device): torch.ones((), device=place.device)}
    scaler._per_optimizer_states["a name"] = kind(stage=OptState.STEPPED, found_inf_per_device=found)
    scaler.update()
    assert (scaler.get_scale(), scaler.stats().skipped) == (32.0, 1)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


BAD_SCALES: list[tuple[Any, type[Exception], str]] = [
    (10**400, ValueError, "new_scale must be a positive finite fp32 number"),
    (1.0, ValueError, r"new_scale must be in \[min_scale, max_scale\], \[2.0, 4096.0\], got 1.0"),
    (torch.tensor(8192.0), ValueError, r"new_scale must be in \[min_scale, max_scale\], .*, got tensor\(8192.\)"),
    ("8", TypeError, "new_scale must be a number, got '8'"),
    (True, TypeError, "new_scale must be a number, got True"),
    (torch.ones(2), AssertionError, "new_scale should be a float or a 1-element"),
]


@pytest.mark.parametrize(("value", "error", "text"), BAD_SCALES)
def test_what_cannot_be_a_scale_is_refused_and_changes_nothing(value: Any, error: Any, text: str) -> None:
    scaler = at(Place("cpu", "torch"), min_scale=2, max_scale=4096)
    scaler.step(sgd([torch.tensor([math.inf])]))
    with pytest.raises(error, match=f"^{text}"):
        scaler.update(value)
    assert (scaler.get_scale(), scaler.stats().updates) == (64.0, 0)
    scaler.update()
    assert scaler.get_scale() == 32.0
    scaler.update(128)
    assert scaler.get_scale() == 128.0


@PLACES
def test_a_scale_that_is_set_counts_as_an_update_of_what_was_checked(place: Place) -> None:
    scaler = at(place, hysteresis=2, growth_interval=3)
    scales(scaler, bad=".")
    for bad in (1.0, math.inf):
        scaler.step(sgd([torch.tensor([bad])], place.device))
        scaler.update(16.0)
    scaler.update(32.0)  # nothing was checked
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 1)
    assert scaler.stats() == ScalerStats(updates=3, skipped=1, consecutive_skips=1, last_skip=3)
    assert scales(scaler, bad="x") == [16.0]  # the second strike


@PLACES
def test_a_good_update_that_sets_the_scale_keeps_the_strikes(place: Place) -> None:
    scaler = at(place, hysteresis=2)
    for gradient in (math.inf, 1.0):
        scaler.step(sgd([torch.tensor([gradient])], place.device))
        scaler.update(16.0)
    assert scales(scaler, bad="x") == [8.0]


@PLACES
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_leaves_the_flag_of_a_step_that_is_carried_over_it(place: Place, fused: bool) -> None:
    scaler, optimizer = at(place), sgd([torch.tensor([math.inf])], place.device, fused=fused)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.was_skipped(optimizer), scaler.get_scale(), scaler.stats().skipped) == (True, 16.0, 2)


BAD_NUMBERS = [
    ("_growth_tracker", 0, TypeError, r"argument 'growth_tracker' \(position 2\) must be Tensor, not int"),
    ("_scale", 4.0, TypeError, r"argument 'input' \(position 1\) must be Tensor|must be Tensor, not float"),
    ("_growth_tracker", torch.zeros(()), RuntimeError, "growth_tracker must be an int tensor"),
    ("_growth_tracker", torch.zeros(2, dtype=torch.int32), RuntimeError, "growth_tracker must be a 1-element tensor"),
    ("_scale", torch.ones(2), RuntimeError, "current_scale must be a 1-element tensor"),
    ("_scale", torch.tensor(4), RuntimeError, "current_scale must be a float tensor"),
    ("_growth_tracker", torch.zeros(1, device="meta").int(), RuntimeError, "growth_tracker must be on .*, got meta"),
]


@PLACES
@pytest.mark.parametrize(("name", "value", "error", "text"), BAD_NUMBERS)
def test_a_replaced_scale_or_tracker_that_cannot_be_one_is_named(
    place: Place, name: str, value: Any, error: Any, text: str
) -> None:
    """Fault 6."""
    scaler = at(place)
    scales(scaler, bad=".")  # the ones before were fine
    scaler.step(sgd([torch.ones(1)], place.device))
    setattr(scaler, name, value.to(place.device) if isinstance(value, Tensor) and not value.is_meta else value)
    with pytest.raises(error, match=text):
        scaler._ours.updates.by_flags(scaler._scale, scaler._growth_tracker, [], (2.0, 0.5, 1))


@PLACES
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replaced_scale_is_the_one_that_is_updated(place: Place, dtype: Any, shape: tuple[int, ...]) -> None:
    if place.device == "cuda" and dtype is torch.float64:
        pytest.skip("torch's op takes an fp32 scale only there")
    scaler = at(place)
    scales(scaler, bad="x")
    scaler._scale = torch.full(shape, 16.0, dtype=dtype, device=place.device)
    scaler._growth_tracker = torch.full(shape, 7, dtype=torch.int32, device=place.device)
    assert (scales(scaler, bad=".x"), scaler._get_growth_tracker()) == ([16.0, 8.0], 0)
    scaler._growth_tracker.data = torch.full(shape, 3, dtype=torch.int32, device=place.device)
    assert (scales(scaler, bad="."), scaler._get_growth_tracker()) == ([8.0], 4)


CHANGES = [("growth_factor", 8.0), ("backoff_factor", 0.25), ("growth_interval", 3), ("min_scale", 60.0)]
CHANGES += [("max_scale", 80.0), ("hysteresis", 2)]


@pytest.mark.parametrize("place", TRITON, ids=str)
@pytest.mark.parametrize("how", ["set", "load"])
@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_replay_goes_by_the_numbers_that_were_set_or_loaded(place: Place, how: str, name: str, value: Any) -> None:
    """A replay is what an update launches, launched again."""
    scaler, other = at(place, growth_interval=1), at(place, **{"growth_interval": 1, name: value})
    scales(scaler, bad=".")
    updater, counters = scaler._ours.updates.updater, scaler._ours.counters.values
    if how == "load":
        scaler.load_state_dict(other.state_dict())
    else:
        scaler.load_state_dict(GradScaler("cpu", init_scale=64.0, growth_interval=1).state_dict())
        setter = getattr(scaler, f"set_{name}", None)
        scaler.set_limits(**{name: value}) if setter is None else setter(value)
    replayed = []
    for found in (0.0, 1.0, 1.0):
        updater.rows.status[:, 0] = found  # the flags of all optimizers
        updater.launch(updater.scale, updater.growth_tracker, 1)
        replayed.append(scaler.get_scale())
    assert replayed == scales(other, bad=".xx")
    assert scaler._ours.counters.values is counters  # where the graph counts
    assert scaler.stats().updates == 3


# The counters


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a copy has arrived, question by question."""
    given: list[bool] = []
    monkeypatch.setattr(rule.HostCopy, "has_arrived", lambda self: given.pop(0))
    return given


def test_without_a_wait_stats_are_what_had_arrived(answers: list[bool]) -> None:
    answers += [False, False, True, False, True, False]
    counters, seen = Counters(), []
    tensor = counters.on(CPU)
    for _ in range(4):
        tensor[abi.UPDATES] += 1
        seen.append(counters.newest()[abi.UPDATES])
    assert seen == [0, 0, 1, 3]  # copies were started by the first call and by the third


@pytest.mark.parametrize(("how", "copied"), [("counted", 0), ("set", 9)])
def test_what_was_copied_before_does_not_overtake_what_was_read_or_set(
    how: str, copied: int, answers: list[bool]
) -> None:
    answers += [False, True, False]
    counters = Counters()
    tensor = counters.on(CPU)
    tensor[abi.UPDATES] = copied
    assert counters.newest()[abi.UPDATES] == 0
    if how == "counted":
        tensor[abi.UPDATES] = 5
        counters.read()
    else:
        counters.set([5] * abi.COUNTERS)
    assert counters.newest()[abi.UPDATES] == counters.read()[abi.UPDATES] == 5


def test_counters_that_have_moved_to_another_device_and_back_go_on() -> None:
    scaler = at(Place("cpu", "torch"))
    scales(scaler, bad="x")
    counters = scaler._ours.counters
    counters.values = counters.on(CPU).clone()
    scales(scaler, bad="x")
    assert (scaler.stats().skipped, scaler.stats(wait=False).updates) == (2, 2)


# Too many skips in a row


def raised_at(scaler: Any, bad: str) -> list[int]:
    """Return the numbers, from 1, of the updates that raised."""
    numbers = []
    for number, each in enumerate(bad, 1):
        try:
            scales(scaler, bad=each)
        except SkipStreakError:
            numbers.append(number)
    return numbers


SKIPS = [
    (2, ".xx.xxxx......", [7 + LAG, 8 + LAG]),  # late, and as long as it lasts
    (0, "x......", [1 + LAG]),
    (12, "x" * 12, []),
    (None, "x" * 12, []),
]


@PLACES
@pytest.mark.parametrize(("limit", "bad", "want"), SKIPS)
def test_too_many_skips_in_a_row_raise_a_few_updates_late(place: Place, limit: Any, bad: str, want: Any) -> None:
    scaler = at(place, init_scale=2.0**40, max_consecutive_skips=limit)
    assert raised_at(scaler, bad) == want
    assert scaler.stats().updates == len(bad)  # those that raised were done


def test_the_error_tells_what_was_counted_and_reports_the_last_overflow() -> None:
    scaler, optimizer = at(Place("cpu", "torch"), max_consecutive_skips=3), sgd([torch.tensor([math.inf])])
    scales(scaler, bad="." + "x" * (3 + LAG))
    scaler.step(optimizer)
    late = r"\(raised 4 updates late; by now the scale is 0.25\)"
    text = f"^4 consecutive skips, more than max_consecutive_skips=3 {late}. .*last_skip=5"
    with pytest.raises(FloatingPointError, match=f"{text}.*\nThe last skip, at update 9: 1 bad gradient on rank 0."):
        scaler.update()


@PLACES
@pytest.mark.parametrize("ends", ["update", "load", "set_limits"])
def test_setting_the_scale_loading_or_setting_the_limit_starts_the_lag_anew(place: Place, ends: str) -> None:
    scaler = at(place, init_scale=2.0**40, max_consecutive_skips=1)
    saved = scaler.state_dict()
    assert raised_at(scaler, "x" * (2 + LAG)) == [2 + LAG]
    if ends == "update":
        scaler.update(1024.0)
    elif ends == "load":
        scaler.load_state_dict(saved)
    else:
        scaler.set_limits(max_consecutive_skips=1)
    assert raised_at(scaler, "." * LAG) == []
    assert raised_at(scaler, "xx" + "." * LAG) == [2 + LAG]

"""The update rule in Python, in torch's ops and in the kernel; the counters, and what is made of them."""

import math
import pickle
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, places, sgd, started
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ScalerStats, SkipStreakError
from scaler_triton.core import update as rule
from scaler_triton.core.dispatch import kernels
from scaler_triton.core.policy import KEY, NO_LIMITS, Limits, no_counters
from scaler_triton.core.torch_ops import host_memory
from scaler_triton.core.update import Counters, DevicePolicy, LaggingCounters, Numbers
from scaler_triton.kernels import abi
from scaler_triton.measuring.headroom import HeadroomRule

CPU = torch.device("cpu")
LAG = LaggingCounters.LAG
TRITON = [place for place in places() if place.backend == "triton"]


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


def fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float64).float().item()


def plain_rule(scale: float, tracker: int, bad: bool, numbers: Numbers, limits: Limits, counters: list[int]) -> Any:
    """Return scale and tracker after an update, as the head of update.py tells; in fp32 by NumPy's rounding."""
    growth, backoff, interval = numbers
    updates, skipped, streak, growths, backoffs, last_skip, strikes, spikes = counters
    updates, new = updates + 1, scale
    if bad:
        skipped, streak, strikes, last_skip, tracker = skipped + 1, streak + 1, strikes + 1, updates, 0
        new = fp32(scale * backoff) if strikes >= limits.hysteresis else scale
    else:
        streak, tracker = 0, tracker + 1
        if tracker >= interval:
            grown = fp32(scale * growth)
            new, tracker, strikes = grown if math.isfinite(grown) else scale, 0, 0
    new = limits.min_scale if math.isnan(new) else min(max(new, limits.min_scale), limits.max_scale)
    growths, backoffs = growths + (new > scale), backoffs + (new < scale)
    counters[:] = updates, skipped, streak, growths, backoffs, last_skip, strikes, spikes
    return new, min(tracker, abi.MAX_TRACKER)


def by_host(scale: Tensor, tracker: Tensor, flag: Tensor, rules: Any, held: Counters) -> None:
    memory, found_inf = host_memory(tracker.view(-1)), bool(flag.item() != 0)
    rule.update_on_host_(scale, memory, found_inf, *rules, host_memory(held.on(CPU)))


def a_row(largest: Tensor) -> Tensor:
    row = torch.zeros(1, abi.MEASURED_ROW, dtype=torch.float64, device=largest.device)
    row[0, abi.LARGEST], row[0, abi.MEASURED_AT] = largest * 4.0, 4.0
    return row


def by_ops(scale: Tensor, tracker: Tensor, flag: Tensor, rules: Any, held: Counters, *measured: Any) -> None:
    policy = (measured[0], a_row(measured[1])) if measured else ()
    rule.update_by_ops_(scale, tracker, flag, *rules, held.on(scale.device), *policy)


def by_kernel(scale: Tensor, tracker: Tensor, flag: Tensor, rules: Any, held: Counters, *measured: Any) -> None:
    policy = DevicePolicy(scale.device).hold(*rules)
    options = measured[0].launch_options(a_row(measured[1])) if measured else {}
    bind = kernels().update_scale.bind_update
    bind(flag, flag, policy, held.on(scale.device), clear=False, **options)(scale, tracker, 1)


PATHS = [("cpu", by_host), ("cpu", by_ops), *((place.device, by_kernel) for place in TRITON)]
NAMED = pytest.mark.parametrize(("device", "path"), PATHS, ids=[path.__name__ for _, path in PATHS])
MEASURED = pytest.mark.parametrize(("device", "path"), PATHS[1:], ids=[path.__name__ for _, path in PATHS[1:]])


any_numbers = st.tuples(st.floats(1.0, 4.0), st.floats(0.01, 1.0), st.integers(1, 4))


@st.composite
def any_limits(draw: st.DrawFn) -> Limits:
    bounds = st.sampled_from([abi.MIN_SCALE, 1.0, 4096.0, 65536.0, abi.MAX_SCALE])
    low, high = sorted((draw(bounds), draw(bounds)))
    return Limits(low, high, draw(st.integers(1, 4)))


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


# The headroom policy: below a cap that the rule moves, and in plain Python beside it


class Plainly:
    """The head of update.py, told in plain Python: the rule moves a cap, and measurements the scale below it."""

    def __init__(self, bits: int, window: int, scale: float, limits: Limits) -> None:
        self.bits, self.window, self.limits = bits, window, limits
        self.scale, self.cap, self.tracker, self.exponents = scale, abi.MAX_SCALE, 0, []  # type: ignore[var-annotated]

    def update(self, bad: bool, largest: float, numbers: Numbers, counters: list[int]) -> tuple[float, int]:
        before = self.scale
        ruled = before if bad else self.cap
        grew, shrank = counters[abi.GROWTHS], counters[abi.BACKOFFS]
        self.cap, self.tracker = plain_rule(ruled, self.tracker, bad, numbers, self.limits, counters)
        if bad:
            self.scale = self.cap
        else:
            if largest > 0:
                self.exponents.append(math.frexp(largest)[1] - 1)  # `log2` may round up
            if self.exponents:
                target = 2.0 ** (15 - self.bits - max(self.exponents[-self.window :]))
                self.scale = max(min(target, self.cap), self.limits.min_scale)
        counters[abi.GROWTHS], counters[abi.BACKOFFS] = grew + (self.scale > before), shrank + (self.scale < before)
        return self.scale, self.tracker


@MEASURED
@given(
    st.sampled_from([1.0, 1000.0, 65536.0, abi.MAX_SCALE]),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.0, 0.0, 1.0]), st.just(0.0) | st.floats(1e-30, 1e30)), min_size=1, max_size=12
    ),
    any_numbers,
    any_limits(),
    st.integers(0, 30),
    st.integers(1, 5),
)
@example(65536.0, [(0.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 2.0**-20)], (2.0, 0.5, 2), NO_LIMITS, 2, 3)
@example(1.0, [(0.0, 2.0**-7), (0.0, 2.0**-9), (0.0, 2.0**-9)], (2.0, 0.5, 2), NO_LIMITS, 2, 2)  # one leaves the window
@example(1.0, [(0.0, 1e-300)], (2.0, 0.5, 2), NO_LIMITS, 2, 2)
@settings(max_examples=60, deadline=None)
def test_every_path_is_the_headroom_policy(
    device: str, path: Any, scale: float, trace: Any, numbers: Numbers, limits: Limits, bits: int, window: int
) -> None:
    scale = limits.clamp(scale)
    plainly, headroom = Plainly(bits, window, scale, limits), HeadroomRule(bits, window)
    want, held = no_counters(), Counters()
    state = torch.full((), scale, device=device), torch.zeros((), dtype=torch.int32, device=device)
    for bad, largest in trace:
        unscaled = torch.tensor(largest, dtype=torch.float64, device=device)
        path(*state, torch.tensor(bad, device=device), (numbers, limits), held, headroom, unscaled)
        after = plainly.update(bad != 0, largest, numbers, want)
        assert (state[0].item(), state[1].item(), held.read()) == (*after, want)
        assert headroom.remembered() == (plainly.exponents[-window:], plainly.cap)


def measured_run(backend: str, device: str, **options: Any) -> tuple[GradScaler, list[float]]:
    """Return a scaler after ten updates, and its scales; gradients are 2^-10, then 2^-3, and overflow twice."""
    scaler = started(GradScaler, device, scale_policy="headroom", backend=backend, **options)
    scales = []
    for number in range(10):
        size = 2.0 ** (-10 if number < 5 else -3) * scaler.get_scale()
        scaler.step(sgd([torch.tensor([0.0, math.inf if number in (3, 7) else size])], device))
        scaler.update()
        scales.append(scaler.get_scale())
    return scaler, scales


@PLACES
def test_the_scale_goes_where_the_gradients_leave_two_bits(place: Place) -> None:
    scaler, scales = measured_run(place.backend, place.device, headroom_window=3, growth_interval=2)
    high, low = 2.0**23, 2.0**16
    # After an overflow at `high` the cap is half of it, and stays until two good updates in a row.
    assert scales == [high, high, high, high / 2, high / 2, low, low, low / 2, low / 2, low]
    assert scaler.stats().skipped == 2
    scaler, scales = measured_run(place.backend, place.device, init_scale="measured", headroom_bits=0)
    assert scales[:2] == [2.0**25, 2.0**25]


@PLACES
def test_a_scale_that_is_set_lifts_the_cap(place: Place) -> None:
    scaler = started(GradScaler, place.device, scale_policy="headroom", init_scale="measured", backend=place.backend)
    scales = []
    for number in (math.nan, 1.0, 1.0, 1.0):
        scaler.step(sgd([torch.tensor([number * scaler.get_scale()])], place.device))
        scaler.update()
        scales.append(scaler.get_scale())
        if len(scales) in (2, 3):
            scaler.update((2.0**16, 1.0)[len(scales) - 2])
    assert scales == [0.5, 0.5, 2.0**13, 2.0**13]


@PLACES
def test_it_goes_on_from_a_checkpoint_and_a_pickle(place: Place) -> None:
    scaler, _ = measured_run(place.backend, place.device, headroom_window=3)
    state = scaler.state_dict()
    assert state[KEY]["headroom"] == {"exponents": [-3, -3, -3], "cap": 2.0**15}
    other = GradScaler(place.device, scale_policy="headroom", headroom_window=2, backend=place.backend)
    other.load_state_dict(state)
    assert other.state_dict()[KEY]["headroom"] == {"exponents": [-3, -3], "cap": 2.0**15}
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    torchs = torch.amp.GradScaler(place.device)
    torchs.load_state_dict(state)
    assert torchs.get_scale() == scaler.get_scale()
    other.load_state_dict(torchs.state_dict())
    assert other._ours.headroom.remembered() == ([], abi.MAX_SCALE)  # type: ignore[union-attr]
    assert "headroom" not in GradScaler(place.device, min_scale=1.0).state_dict()[KEY]


@pytest.mark.parametrize("fields", [{"exponents": "12"}, {"exponents": [0.5]}, {"exponents": [5000]}, {"cap": 0.0}, 3])
def test_a_wrong_checkpoint_of_the_policy_changes_nothing(fields: Any) -> None:
    scaler, _ = measured_run("torch", "cpu")
    before = scaler.state_dict()
    with pytest.raises((ValueError, TypeError), match="exponents|cap|headroom"):
        scaler.load_state_dict({**before, KEY: {**before[KEY], "headroom": fields}})
    assert scaler.state_dict() == before


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

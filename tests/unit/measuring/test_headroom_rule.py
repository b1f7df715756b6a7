"""The headroom policy: below a cap that the rule moves, and in plain Python beside it."""

import math
import pickle
from typing import Any

import pytest
import torch
from helpers import PLACES, Place, sgd, started
from hypothesis import example, given, settings
from hypothesis import strategies as st
from update_rule import PATHS, any_limits, any_numbers, plain_rule

from scaler_triton import GradScaler
from scaler_triton.core.update import Counters, Numbers
from scaler_triton.kernels import abi
from scaler_triton.measuring.headroom import HeadroomRule
from scaler_triton.policy import KEY, NO_LIMITS, Limits, no_counters

MEASURED = pytest.mark.parametrize(("device", "path"), PATHS[1:], ids=[path.__name__ for _, path in PATHS[1:]])


class Plainly:
    """The head of headroom.py, told in plain Python: the rule moves a cap, and measurements the scale below it."""

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

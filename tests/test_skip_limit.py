"""`max_consecutive_skips`: too many skips in a row are an error, a few updates late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers import Place, sgd, started
from limits_setup import BAD, EVERYWHERE, GOOD, at, step, steps
from scaler_triton.stats import Lagging

from scaler_triton import GradScaler, SkipStreakError


def raised_at(scaler: Any, gradients: Iterable[float], device: str = "cpu", *, fused: bool = False) -> list[int]:
    """Return the numbers, from 1, of the updates that raised."""
    numbers = []
    for number, gradient in enumerate(gradients, 1):
        try:
            step(scaler, gradient, device=device, fused=fused)
        except SkipStreakError:
            numbers.append(number)
    return numbers


@EVERYWHERE
@pytest.mark.parametrize("fused", [False, True])
def test_a_streak_beyond_the_limit_raises_a_fixed_lag_later_as_long_as_it_lasts(place: Place, fused: bool) -> None:
    scaler = at(place, init_scale=2.0**40, max_consecutive_skips=2)
    gradients = [GOOD, BAD, BAD, GOOD, BAD, BAD, BAD, BAD, *[GOOD] * 6]
    assert raised_at(scaler, gradients, place.device, fused=fused) == [7 + Lagging.LAG, 8 + Lagging.LAG]
    assert scaler.stats().updates == len(gradients)


def test_none_and_a_long_limit_raise_nothing() -> None:
    for limit in (None, 12):
        scaler = started(GradScaler, "cpu", max_consecutive_skips=limit)
        assert raised_at(scaler, [BAD] * 12) == []


def test_a_limit_of_zero_allows_no_skip() -> None:
    scaler = started(GradScaler, "cpu", max_consecutive_skips=0)
    assert raised_at(scaler, [BAD, *[GOOD] * 6]) == [1 + Lagging.LAG]


def test_the_error_tells_what_was_counted_and_leaves_the_update_done() -> None:
    scaler = started(GradScaler, "cpu", init_scale=2.0**20, max_consecutive_skips=3)
    steps(scaler, [GOOD, *[BAD] * 3, *[BAD] * Lagging.LAG])
    optimizer = sgd([torch.tensor([BAD])])
    scaler.step(optimizer)
    with pytest.raises(
        FloatingPointError,
        match=r"^4 consecutive skips, more than max_consecutive_skips=3; 4 updates later the scale is "
        r"4096.0. ScalerStats\(updates=5, skipped=4, consecutive_skips=4, growths=0, backoffs=4, last_skip=5\)\n"
        r"The last skip, at update 9: 1 bad gradient on rank 0.\n"
        r"(.*\n){2} +0  .*parameter 0 +Inf +1$",
    ):
        scaler.update()
    assert scaler.get_scale() == 2.0**12
    assert scaler.was_skipped(optimizer)
    scaler.unscale_(optimizer)  # the next step may begin


def test_loading_and_setting_the_limit_start_the_lag_anew() -> None:
    scaler = started(GradScaler, "cpu", init_scale=2.0**40, max_consecutive_skips=1)
    saved = scaler.state_dict()
    assert raised_at(scaler, [BAD] * (2 + Lagging.LAG)) == [2 + Lagging.LAG]
    scaler.load_state_dict(saved)
    assert raised_at(scaler, [BAD] * (2 + Lagging.LAG)) == [2 + Lagging.LAG]
    scaler.set_max_consecutive_skips(None)
    assert raised_at(scaler, [BAD] * 8) == []
    scaler.set_max_consecutive_skips(1)
    assert raised_at(scaler, [BAD] * (1 + Lagging.LAG)) == [1 + Lagging.LAG]


@EVERYWHERE
def test_setting_the_scale_ends_the_errors_until_there_are_as_many_skips_again(place: Place) -> None:
    scaler = at(place, init_scale=2.0**40, max_consecutive_skips=1)
    assert raised_at(scaler, [BAD] * (2 + Lagging.LAG), place.device) == [2 + Lagging.LAG]
    scaler.update(1024.0)
    assert raised_at(scaler, [*[GOOD] * 2 * Lagging.LAG, BAD, BAD], place.device) == []
    assert raised_at(scaler, [GOOD] * Lagging.LAG, place.device) == [Lagging.LAG]


def test_setting_the_scale_is_no_update() -> None:
    scaler = started(GradScaler, "cpu", max_consecutive_skips=0)
    step(scaler, BAD)
    for _ in range(2 * Lagging.LAG):
        scaler.update(64.0)
    assert scaler.stats().updates == 1

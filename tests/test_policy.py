"""Numbers that Python has and floats have not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scaler_triton import GradScaler, policy


@pytest.mark.parametrize("check", [policy.check_scale, policy.check_growth_factor, policy.check_backoff_factor])
@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_int_beyond_every_float_is_refused_by_name(check: object, value: int) -> None:
    with pytest.raises(ValueError, match=r"^new_value must be .*, got -?1000"):
        check(value, "new_value")  # type: ignore[operator]


def test_an_interval_beyond_64_bits_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^growth_interval must be an int >= 1 \(steps\), got 9223372036854775808"):
        policy.check_growth_interval(2**63)
    assert policy.check_growth_interval(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize(
    "check",
    [policy.check_growth_interval, policy.check_hysteresis, policy.check_max_skips, policy.check_growth_tracker],
)
def test_true_is_1_for_every_number_of_steps_as_for_torchs_interval(check: Callable[[bool], int]) -> None:
    assert repr(check(True)) == "1"


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis", "max_consecutive_skips"])
def test_a_scaler_holds_true_as_1(name: str) -> None:
    scaler = GradScaler("cpu", **{name: True})
    assert repr(getattr(scaler, f"get_{name}")()) == "1"
    getattr(scaler, f"set_{name}")(2)
    getattr(scaler, f"set_{name}")(True)
    assert repr(getattr(scaler, f"get_{name}")()) == "1"

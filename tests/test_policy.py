"""Numbers that Python has and floats have not."""

from __future__ import annotations

import pytest

from scaler_triton import policy


@pytest.mark.parametrize("check", [policy.check_scale, policy.check_growth_factor, policy.check_backoff_factor])
@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_int_beyond_every_float_is_refused_by_name(check: object, value: int) -> None:
    with pytest.raises(ValueError, match=r"^new_value must be .*, got -?1000"):
        check(value, "new_value")  # type: ignore[operator]


def test_an_interval_beyond_64_bits_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^growth_interval must be an int >= 1 \(steps\), got 9223372036854775808"):
        policy.check_growth_interval(2**63)
    assert policy.check_growth_interval(2**63 - 1) == 2**63 - 1

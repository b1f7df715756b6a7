"""What the setters of our own settings do, mixed in before the specification of the rest; and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from single_strategies import any_scales
from specification import FP32_MAX, SMALLEST, Refused, departs
from torch import tensor

NUMBERS = (int, float)
LARGEST_INT = 2**63 - 1  # hysteresis is kept in int64


class Mistyped(Refused):
    """Difference 2: a TypeError, else as a ValueError."""

    error = TypeError


class OutOfOrder(Refused):
    """The ValueError of a bound beyond the other one."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__("min_scale", None)
        self.end = f"min_scale must be <= max_scale, got {low} and {high}"


def demand(legal: Callable[[Any], bool], types: tuple[type, ...], name: str, value: Any) -> None:
    """Refuse a value of another type, or one that is not legal."""
    if not isinstance(value, types):
        raise Mistyped(name, value)
    if not legal(value):
        raise Refused(name, value)


class SetterRules:
    """Difference 13: a setter changes what later updates do, unless it refuses; nothing else, not the scale either."""

    def set_min_scale(self, new_scale: Any) -> None:
        self._bound("min_scale", new_scale)

    def set_max_scale(self, new_scale: Any) -> None:
        self._bound("max_scale", new_scale)

    def set_hysteresis(self, new_hysteresis: Any) -> None:
        demand(lambda number: 1 <= number <= LARGEST_INT, (int,), "new_hysteresis", new_hysteresis)
        self._limit(hysteresis=new_hysteresis)

    def set_consecutive_hysteresis(self, new_value: Any) -> None:
        demand(lambda _: True, (bool,), "new_value", new_value)
        self._limit(consecutive_hysteresis=new_value)

    def set_max_consecutive_skips(self, new_limit: Any) -> None:
        demand(lambda limit: limit is None or limit >= 0, (int, type(None)), "new_limit", new_limit)
        self._limit(max_consecutive_skips=new_limit)
        self._streaks = []  # updates before it do not count

    def _bound(self, name: str, value: Any) -> None:
        demand(lambda number: SMALLEST <= number <= FP32_MAX, NUMBERS, "new_scale", value)
        self._limit(**{name: tensor(float(value)).item()})

    def _limit(self, **changed: Any) -> None:
        departs(13)
        limits = {**self._limits, **changed}
        if limits["min_scale"] > limits["max_scale"]:
            raise OutOfOrder(limits["min_scale"], limits["max_scale"])
        self._limits = limits

    def get_min_scale(self) -> float:
        return self._limits["min_scale"]

    def get_max_scale(self) -> float:
        return self._limits["max_scale"]

    def get_hysteresis(self) -> int:
        return self._limits["hysteresis"]

    def get_consecutive_hysteresis(self) -> bool:
        return self._limits["consecutive_hysteresis"]

    def get_max_consecutive_skips(self) -> int | None:
        return self._limits["max_consecutive_skips"]


BOUNDS = [SMALLEST, 2.0**-10, 1.0, 4, 2.0**20, FP32_MAX]

# The setting, and its new value.
settings_of_ours = st.one_of(
    st.tuples(
        st.sampled_from(["min_scale", "max_scale"]), st.sampled_from(BOUNDS) | any_scales | st.sampled_from(["4", None])
    ),
    st.tuples(st.just("hysteresis"), st.integers(0, 4) | st.sampled_from([-1, LARGEST_INT + 1, 2.0, "2", None])),
    st.tuples(st.just("consecutive_hysteresis"), st.booleans() | st.sampled_from([1, None, "yes"])),
    st.tuples(st.just("max_consecutive_skips"), st.none() | st.integers(0, 2) | st.sampled_from([-1, 1.0, "1"])),
)


def set_to(scaler: Any, name: str, value: Any) -> None:
    """Call the setter."""
    getattr(scaler, f"set_{name}")(value)


def limits_of(scaler: Any) -> list[Any]:
    """Return what the getters tell."""
    names = ("min_scale", "max_scale", "hysteresis", "consecutive_hysteresis", "max_consecutive_skips")
    return [getattr(scaler, f"get_{name}")() for name in names]

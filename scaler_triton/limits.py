"""The extras of the update rule: bounds of the scale, hysteresis, a limit of skips; and their part of a checkpoint."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scaler_triton import policy, stats

# The one key of a checkpoint that torch's class does not know, and ignores.
KEY = "scaler_triton"


class Limits(NamedTuple):
    """Parameters of the update rule beyond torch's three; by default they change nothing.

    Args:
        min_scale, max_scale: the scale is clamped to them; fp32 numbers.
        hysteresis: number of the overflow at which the scale first backs off; each one after it backs off again.
        consecutive_hysteresis: whether any good update resets that count, not only one that ends an interval.
        max_consecutive_skips: updates; None: any number.
    """

    min_scale: float = policy.MIN_SCALE
    max_scale: float = policy.MAX_SCALE
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    max_consecutive_skips: int | None = None


NO_LIMITS = Limits()


def bound(value: Any, name: str) -> float:
    """Return `value`, rounded to fp32, if it can be a loss scale."""
    return _as_fp32(policy.check_scale(value, name))


def check_within(value: Any, name: str, limits: Limits) -> float:
    """Return `value` as a float if it can be a loss scale and lies within the bounds."""
    number = policy.check_scale(value, name)
    if not limits.min_scale <= _as_fp32(number) <= limits.max_scale:
        raise ValueError(
            f"{name} must be in [min_scale, max_scale], [{limits.min_scale}, {limits.max_scale}], got {value!r}"
        )
    return number


def clamp(scale: float, limits: Limits) -> float:
    """Return `scale` clamped to the bounds."""
    return min(max(scale, limits.min_scale), limits.max_scale)


def check_order(limits: Limits) -> Limits:
    """Return `limits` if min_scale <= max_scale."""
    if limits.min_scale > limits.max_scale:
        raise ValueError(f"min_scale must be <= max_scale, got {limits.min_scale} and {limits.max_scale}")
    return limits


def check(
    min_scale: Any, max_scale: Any, hysteresis: Any, consecutive_hysteresis: Any, max_consecutive_skips: Any = None
) -> Limits:
    """Return checked limits; None stands for the widest bound.

    Raises: ValueError or TypeError naming a wrong one and its value.
    """
    limits = Limits(
        NO_LIMITS.min_scale if min_scale is None else bound(min_scale, "min_scale"),
        NO_LIMITS.max_scale if max_scale is None else bound(max_scale, "max_scale"),
        policy.check_hysteresis(hysteresis),
        policy.check_bool(consecutive_hysteresis, "consecutive_hysteresis"),
        policy.check_max_skips(max_consecutive_skips),
    )
    return check_order(limits)


def to_checkpoint(limits: Limits, counters: Sequence[int]) -> dict[str, Any]:
    """Return what a checkpoint holds in addition to torch's five fields, as plain numbers by name."""
    return {**limits._asdict(), "counters": dict(zip(stats.NAMES, counters, strict=True))}


def from_checkpoint(fields: Any) -> tuple[Limits, list[int]]:
    """Return the limits and counters that `to_checkpoint` made `fields` of; other keys are left out.

    Raises: KeyError for a missing field; ValueError or TypeError naming a wrong one.
    """
    fields = check_dict(fields, KEY)
    limits = check(**{name: fields[name] for name in Limits._fields})
    counters = check_dict(fields["counters"], "counters")
    return limits, [policy.check_count(counters[name], name) for name in stats.NAMES]


def check_dict(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value` if it is a dict, or another mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, got {value!r}")
    return value


def _as_fp32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded

"""Checks of a scaler's numbers and device; the errors name the argument and its value."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from scaler_triton.text import one_line

# 1 / scale is finite for every scale from the smallest normal fp32 number up to the largest.
MIN_SCALE = 2.0**-126
MAX_SCALE = torch.finfo(torch.float32).max
MAX_TRACKER = 2**31 - 1


def check_scale(value: Any, name: str) -> float:
    """Return `value` as a float if it can be a loss scale, i.e. lies in [2^-126, fp32 max].

    Raises: ValueError naming `name` and the value; TypeError if it is not a number.
    """
    number = _as_float(value, name)
    if not MIN_SCALE <= number <= MAX_SCALE:
        raise ValueError(f"{name} must be a positive finite fp32 number in [2**-126, {MAX_SCALE}], got {value!r}")
    return number


def check_growth_factor(value: Any, name: str = "growth_factor") -> float:
    """Return `value` as a float if it is finite and at least 1 (1 never grows)."""
    number = _as_float(value, name)
    if not 1.0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and >= 1, got {value!r}")
    return number


def check_backoff_factor(value: Any, name: str = "backoff_factor") -> float:
    """Return `value` as a float if it lies in (0, 1] (1 never backs off)."""
    number = _as_float(value, name)
    if not 0.0 < number <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")
    return number


def check_growth_interval(value: Any, name: str = "growth_interval") -> int:
    """Return `value` as an int if it is a number of steps, at least 1."""
    number = _as_int(value, name)
    if not 1 <= number < 2**63:
        raise ValueError(f"{name} must be an int >= 1 (steps), got {value!r}")
    return number


def check_growth_tracker(value: Any, name: str = "_growth_tracker") -> int:
    """Return `value` as an int if it can be a count of good steps, which is kept in int32.

    Also a float, or a tensor of one, that is a whole number: torch loads these.
    """
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    number = int(plain) if isinstance(plain, float) and plain.is_integer() else _as_int(plain, name)
    if not 0 <= number <= MAX_TRACKER:
        raise ValueError(f"{name} must be an int in [0, {MAX_TRACKER}], got {value!r}")
    return number


def check_hysteresis(value: Any, name: str = "hysteresis") -> int:
    """Return `value` as an int if it is a number of overflows, at least 1 (1: each one backs off)."""
    number = _as_int(value, name)
    if not 1 <= number < 2**63:
        raise ValueError(f"{name} must be an int >= 1 (overflows), got {value!r}")
    return number


def check_max_skips(value: Any, name: str = "max_consecutive_skips") -> int | None:
    """Return `value` as an int if it is a number of updates, at least 0, or None (no limit)."""
    number = None if value is None else _as_int(value, name)
    if number is not None and number < 0:
        raise ValueError(f"{name} must be None or an int >= 0 (updates), got {value!r}")
    return number


def check_norm_type(value: Any, *, positive: bool) -> float:
    """Return a norm's order as a float, as torch takes it: "inf" is one, too.

    Args:
        value: what was passed as `norm_type`.
        positive: whether it must be; else it must not be 0: that counts elements, and does not scale with them.
    """
    try:
        order = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"norm_type must be a number, got {one_line(repr(value))}") from None
    if math.isnan(order) or order == 0 or (positive and order < 0):
        raise ValueError(f"norm_type must be {'> 0' if positive else 'a number other than 0'}, got {value!r}")
    return order


def check_bool(value: Any, name: str) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {one_line(repr(value))}")
    return value


def check_count(value: Any, name: str) -> int:
    """Return `value` as an int if it can be a count, which is kept in int64."""
    number = _as_int(value, name)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} must be an int in [0, 2**63), got {value!r}")
    return number


_STATE_CHECKS = {
    "scale": check_scale,
    "growth_factor": check_growth_factor,
    "backoff_factor": check_backoff_factor,
    "growth_interval": check_growth_interval,
    "_growth_tracker": check_growth_tracker,
}


def check_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the five fields of a scaler's checkpoint as plain Python numbers; other keys are left out.

    Raises: KeyError for a missing field; ValueError or TypeError naming a wrong one.
    """
    return {name: check(state_dict[name], name) for name, check in _STATE_CHECKS.items()}


def device_type(device: str | torch.device) -> str:
    """Return the type ("cuda", "cpu", ...) of a device given as a string or a `torch.device`."""
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must name a torch device, got {one_line(repr(device))}") from error


def _as_float(value: Any, name: str) -> float:
    if isinstance(value, str | bytes | bytearray):  # float() would read it
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, got {one_line(repr(value))}") from error
    except OverflowError as error:
        raise ValueError(f"{name} must be a positive finite fp32 number, got {value!r}") from error


def _as_int(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an int, got {one_line(repr(value))}") from error

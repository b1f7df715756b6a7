"""Every number of a scaler: how it is validated, the limits of the scale, and the fields of a checkpoint.

An error names the field and its value, and nothing has changed then.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from scaler_triton.core.dispatch import stacklevel
from scaler_triton.kernels.abi import COUNTERS, MAX_HEADROOM_WINDOW, MAX_SCALE, MAX_TRACKER, MAX_WINDOW, MIN_SCALE
from scaler_triton.text import one_line

# The one key of a checkpoint that torch's class does not know, and ignores.
KEY = "scaler_triton"
WINDOWS = "windows"  # beneath it, in a guard's checkpoint
HEADROOM = "headroom"  # beneath it, with that policy
# The names of the counters in a checkpoint, in the order of `kernels.abi`.
COUNTER_NAMES = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes", "spikes")


class Limits(NamedTuple):
    """The limits of the update rule beyond torch's three numbers; the defaults change nothing.

    Args:
        min_scale, max_scale: bounds of the scale, fp32 numbers.
        hysteresis: the number of the overflow at which the scale first backs off; each one after it backs off again.
        max_consecutive_skips: updates in a row that may be skipped; None: any number.
    """

    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    hysteresis: int = 1
    max_consecutive_skips: int | None = None

    def changed(self, **changes: Any) -> Limits:
        """Return these limits with some replaced, all of them validated; a bound of None is the widest.

        Raises: ValueError or TypeError naming a wrong one and its value; TypeError for an unknown name.
        """
        unknown = sorted(set(changes) - set(self._fields))
        if unknown:
            raise TypeError(f"set_limits takes {', '.join(self._fields)}, got {', '.join(unknown)}")
        given = self._replace(**changes)
        skips = given.max_consecutive_skips
        checked = Limits(
            MIN_SCALE if given.min_scale is None else as_fp32(check_number("scale", given.min_scale, "min_scale")),
            MAX_SCALE if given.max_scale is None else as_fp32(check_number("scale", given.max_scale, "max_scale")),
            check_number("hysteresis", given.hysteresis),
            None if skips is None else check_number("max_consecutive_skips", skips),
        )
        if checked.min_scale > checked.max_scale:
            raise ValueError(f"min_scale must be <= max_scale, got {checked.min_scale} and {checked.max_scale}")
        return checked

    def clamp(self, scale: float) -> float:
        """Return `scale` brought within the bounds, NaN as the lower one."""
        return min(scale, self.max_scale) if scale > self.min_scale else self.min_scale


NO_LIMITS = Limits()


def as_fp32(number: float) -> float:
    """Return `number` rounded to fp32."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def as_float(value: Any, name: str) -> float:
    """Return `value` as a float, also one of another type such as numpy's; inf for an int that no float holds."""
    if isinstance(value, str | bytes | bytearray):  # float() would parse it
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # float() warns of one with a graph
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, got {one_line(repr(value))}") from error
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_int(value: Any, name: str) -> int:
    """Return `value` as an int, also one of another type such as numpy's."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an int, got {one_line(repr(value))}") from error


_MOST = 2**63 - 1
_SMALLEST, _LARGEST = math.ulp(0.0), sys.float_info.max  # of a float beyond 0
# The least and the largest of each number, and how an error calls it; floats where these are floats.
_RANGES: dict[str, tuple[float, float, str]] = {
    "backoff_factor": (_SMALLEST, 1.0, "in (0, 1]"),
    "count": (0, _MOST, "an int in [0, 2**63)"),
    "exponents": (-1023, 1023, "ints in [-1023, 1023]"),
    "growth_factor": (1.0, _LARGEST, "finite and >= 1"),
    "growth_interval": (1, _MOST, "an int >= 1 (steps)"),
    "growth_tracker": (0, MAX_TRACKER, f"an int in [0, {MAX_TRACKER}]"),
    "headroom_bits": (0, 30, "an int in [0, 30] (bits)"),
    "headroom_window": (1, MAX_HEADROOM_WINDOW, f"an int in [1, {MAX_HEADROOM_WINDOW}] (updates)"),
    "hysteresis": (1, _MOST, "an int >= 1 (overflows)"),
    "max_attempts": (1, _MOST, "an int >= 1 (attempts)"),
    "max_consecutive_skips": (0, math.inf, "None or an int >= 0 (updates)"),
    "max_norm": (0.0, math.inf, "a number >= 0"),
    "norm": (0.0, _LARGEST, "lists of finite norms >= 0"),
    "norm_type": (_SMALLEST, math.inf, "> 0"),
    "scale": (MIN_SCALE, MAX_SCALE, f"a positive finite fp32 number in [2**-126, {MAX_SCALE}]"),
    "spike_sigma": (_SMALLEST, _LARGEST, "a positive number (standard deviations) or None"),
    "window": (2, MAX_WINDOW, f"an int in [2, {MAX_WINDOW}] (norms)"),
}


def check_number(of: str, value: Any, name: str = "") -> Any:
    """Return `value`, a number `of` a kind in `_RANGES`, as an int or a float; an error calls it `name`, if given."""
    least, most, what = _RANGES[of]
    number = (as_float if isinstance(least, float) else check_int)(value, name or of)
    if not least <= number <= most:  # as for NaN
        raise ValueError(f"{name or of} must be {what}, got {value!r}")
    return number


def check_growth_tracker(value: Any, name: str = "_growth_tracker") -> Any:
    """Return `value` as an int if it fits into int32; torch loads whole floats and tensors, so they pass, too."""
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    plain = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
    return check_number("growth_tracker", plain, name)


def check_windows(value: Any) -> list[list[float]]:
    """Return a checkpoint's norms, a list for each optimizer."""
    windows = [_check_list(norms, WINDOWS) for norms in _check_list(value, WINDOWS)]
    return [[check_number("norm", norm, WINDOWS) for norm in norms] for norms in windows]


def check_headroom(scale_policy: Any, bits: Any, window: Any) -> tuple[int, int] | None:
    """Return the numbers of the headroom policy, None for torch's; raise if one is illegal."""
    if scale_policy not in ("probe", "headroom"):
        raise ValueError(f"scale_policy must be 'probe' or 'headroom', got {one_line(repr(scale_policy))}")
    numbers = check_number("headroom_bits", bits), check_number("headroom_window", window)
    return numbers if scale_policy == "headroom" else None


def check_remembered(fields: Any) -> tuple[list[int], float]:
    """Return exponents and cap from what a checkpoint holds of the headroom policy; the start's where it holds none."""
    fields = check_dict(fields, HEADROOM)
    exponents = [check_number("exponents", each) for each in _check_list(fields.get("exponents", []), "exponents")]
    return exponents, check_number("scale", fields.get("cap", MAX_SCALE), "cap")


def check_bool(value: Any, name: str) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {one_line(repr(value))}")
    return value


def check_dict(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value` if it is a dict, or another mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, got {value!r}")
    return value


def _check_list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a list, got {one_line(repr(value))}")
    return value


def device_type(device: str | torch.device) -> str:
    """Return the type ("cuda", "cpu", ...) of a device given as a string or a `torch.device`."""
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must name a torch device, got {one_line(repr(device))}") from error


def check_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the five fields of torch's checkpoint as plain numbers, without other keys; KeyError if one is missing."""
    names = "scale", "growth_factor", "backoff_factor", "growth_interval"
    numbers = {name: check_number(name, state_dict[name]) for name in names}
    return {**numbers, "_growth_tracker": check_growth_tracker(state_dict["_growth_tracker"])}


def to_checkpoint(limits: Limits, counters: Sequence[int]) -> dict[str, Any]:
    """Return what a checkpoint holds in addition to torch's five fields, as plain numbers by name."""
    return {**limits._asdict(), "counters": dict(zip(COUNTER_NAMES, counters, strict=True))}


def from_checkpoint(fields: Any) -> tuple[Limits, list[int]]:
    """Return the limits and counters that `to_checkpoint` of this version or 0.1 wrote; KeyError if one is missing."""
    limits = NO_LIMITS.changed(**{name: fields[name] for name in Limits._fields})
    counters = check_dict(fields["counters"], "counters")
    if fields.get("consecutive_hysteresis"):
        text = "the checkpoint was made with consecutive_hysteresis=True, which is gone: "
        text += "overflows count towards hysteresis until the scale is due to grow"
        warnings.warn(text, UserWarning, stacklevel=stacklevel())
    counters = {"spikes": 0, **counters}  # which earlier versions did not count
    return limits, [check_number("count", counters[name], name) for name in COUNTER_NAMES]


def no_counters() -> list[int]:
    """Return the counters of a scaler that has not updated yet."""
    return [0] * COUNTERS

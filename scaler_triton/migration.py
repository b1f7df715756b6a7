"""Converts the scaler states of Megatron and DeepSpeed into one that `load_state_dict` takes; dicts in, dicts out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scaler_triton import policy
from scaler_triton.dispatch import stacklevel
from scaler_triton.kernels.abi import STRIKES
from scaler_triton.policy import NO_LIMITS, Limits

_NO_HYSTERESIS = {"delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False}


def from_megatron(
    state: Mapping[str, Any],
    *,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
) -> dict[str, Any]:
    """Return a state dict with which a scaler goes on as Megatron's `DynamicGradScaler` would have.

        _growth_tracker = growth_tracker, overflows counted = hysteresis - hysteresis_tracker

    See megatron/core/optimizer/grad_scaler.py.

    Args:
        state: what its `state_dict()` returned (`grad_scaler` in the optimizer's state): `scale`, `growth_tracker`,
            `hysteresis_tracker`; numbers or tensors of one element; read.
        growth_interval: steps, >= 1: the run's `--loss-scale-window`, which Megatron does not save there.
        hysteresis: overflows, >= 1: its `--hysteresis`, not saved either.
        min_scale: in [2^-126, fp32 max]: its `--min-loss-scale`, not saved either.
        growth_factor: finite, >= 1: Megatron's, unless the run changed it.
        backoff_factor: in (0, 1], the same.

    Returns: plain numbers; counters of `stats()` are 0, `max_consecutive_skips` is None.

    Raises: KeyError for a missing field; TypeError or ValueError naming a wrong one and its value.
    """
    hysteresis = policy.check_hysteresis(hysteresis)
    tracker = _integer(state, "hysteresis_tracker")
    if tracker > hysteresis:
        raise ValueError(f"hysteresis_tracker must be at most hysteresis={hysteresis}, got {tracker}")
    return _state_dict(
        policy.check_scale(_number(state, "scale"), "scale"),
        (policy.check_growth_factor(growth_factor), policy.check_backoff_factor(backoff_factor)),
        policy.check_growth_interval(growth_interval),
        policy.check_growth_tracker(_number(state, "growth_tracker"), "growth_tracker"),
        NO_LIMITS.changed(min_scale=min_scale, hysteresis=hysteresis),
        strikes=hysteresis - tracker,
    )


def from_deepspeed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with which a scaler goes on as DeepSpeed's would have; a static scale stays as it is.

        good = cur_iter - last_overflow_iter - 1
        _growth_tracker = (good - 1) % scale_window if good else 0, overflows counted = delayed_shift - cur_hysteresis

    DeepSpeed (ZeRO: since 0.17.1) grows one good step later than its window says, the first time after an overflow;
    GradScaler does not. FP16_Optimizer backs off at every overflow, whatever its configuration says of hysteresis.
    See deepspeed/runtime/fp16/loss_scaler.py and fused_optimizer.py.

    Args:
        state: `vars()` of the loss scaler that ZeRO saves, or FP16_Optimizer's state dict with the run's
            `min_loss_scale` added as `min_scale`; numbers or tensors of one element; other keys are ignored; read.

    Returns: plain numbers; counters of `stats()` are 0, `max_consecutive_skips` is None.

    Raises: KeyError for a missing field; TypeError or ValueError naming a wrong one and its value.
    """
    scale = policy.check_scale(_number(state, "cur_scale"), "cur_scale")
    name = "dynamic"
    if name not in state:
        name, state = "dynamic_loss_scale", {**state, **_NO_HYSTERESIS}  # FP16_Optimizer's
    if not policy.check_bool(_field(state, name), name):
        return _state_dict(scale, (1.0, 1.0), 1, 0, NO_LIMITS, strikes=0)
    factor = policy.check_growth_factor(_number(state, "scale_factor"), "scale_factor")
    hysteresis = policy.check_hysteresis(_number(state, "delayed_shift"), "delayed_shift")
    left = policy.check_hysteresis(_number(state, "cur_hysteresis"), "cur_hysteresis")
    if left > hysteresis:
        raise ValueError(f"cur_hysteresis must be at most delayed_shift={hysteresis}, got {left}")
    window = policy.check_growth_interval(_number(state, "scale_window"), "scale_window")
    consecutive = policy.check_bool(_field(state, "consecutive_hysteresis"), "consecutive_hysteresis")
    if consecutive and hysteresis > 1:
        text = "consecutive_hysteresis=True has no counterpart: overflows count until the scale is due to grow"
        warnings.warn(text, UserWarning, stacklevel=stacklevel())
    bounds = NO_LIMITS.changed(min_scale=_number(state, "min_scale"), hysteresis=hysteresis)
    tracker = _deepspeed_tracker(state, window)
    return _state_dict(scale, (factor, 1.0 / factor), window, tracker, bounds, strikes=hysteresis - left)


def _deepspeed_tracker(state: Mapping[str, Any], window: int) -> int:
    last = _integer(state, "last_overflow_iter")
    good = policy.check_count(_number(state, "cur_iter"), "cur_iter") - last - 1
    if last < -1 or good < 0:
        raise ValueError(f"last_overflow_iter must be in [-1, cur_iter), got {last} and cur_iter={good + last + 1}")
    return policy.check_growth_tracker((good - 1) % window) if good else 0


def _state_dict(
    scale: float, factors: tuple[float, float], interval: int, tracker: int, bounds: Limits, *, strikes: int
) -> dict[str, Any]:
    counters = policy.no_counters()
    counters[STRIKES] = strikes
    return {
        "scale": scale,
        "growth_factor": factors[0],
        "backoff_factor": factors[1],
        "growth_interval": interval,
        "_growth_tracker": tracker,
        policy.KEY: policy.to_checkpoint(bounds, counters),
    }


def _field(state: Mapping[str, Any], name: str) -> Any:
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict, such as vars() of an object, got {type(state).__name__}")
    return state[name]


def _number(state: Mapping[str, Any], name: str) -> Any:
    """Return a field's value, the element where it is a tensor; the caller checks what kind of number it is."""
    value = _field(state, name)
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    return value.item()


def _integer(state: Mapping[str, Any], name: str) -> int:
    value = _number(state, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return value

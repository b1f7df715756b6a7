"""Converts the scaler states of Megatron and DeepSpeed into one that `load_state_dict` takes; dicts in, dicts out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scaler_triton import policy
from scaler_triton.core.dispatch import stacklevel
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

    Raises: KeyError for a missing field; TypeError or ValueError naming a wrong one and its value, an infinite scale
        among them: a run may have grown it without a ceiling.
    """
    scale, tracker, left = _numbers(state, "scale", "growth_tracker", "hysteresis_tracker")
    limits = NO_LIMITS.changed(min_scale=min_scale, hysteresis=hysteresis)
    left = policy.check_int(left, "hysteresis_tracker")
    if left > limits.hysteresis:
        raise ValueError(f"hysteresis_tracker must be at most hysteresis={limits.hysteresis}, got {left}")
    return {
        "scale": _check_scale(scale, "scale"),
        "growth_factor": policy.check_number("growth_factor", growth_factor),
        "backoff_factor": policy.check_number("backoff_factor", backoff_factor),
        "growth_interval": policy.check_number("growth_interval", growth_interval),
        "_growth_tracker": policy.check_growth_tracker(tracker, "growth_tracker"),
        **_extras(limits, strikes=limits.hysteresis - left),
    }


def from_deepspeed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with which a scaler goes on as DeepSpeed's would have; a static scale stays as it is.

        good = cur_iter - last_overflow_iter - 1
        _growth_tracker = (good - 1) % scale_window if good else 0, overflows counted = delayed_shift - cur_hysteresis

    DeepSpeed (ZeRO: since 0.17.1) grows one good step later than its window says, the first time after an overflow and
    after the start; GradScaler does not. FP16_Optimizer and FP16_UnfusedOptimizer back off at every overflow, whatever
    their configuration says of hysteresis. See deepspeed/runtime/fp16/loss_scaler.py and (un)fused_optimizer.py.

    Args:
        state: `vars()` of the loss scaler that ZeRO saves, or FP16_Optimizer's state dict with the run's
            `min_loss_scale` added as `min_scale`; numbers or tensors of one element; other keys are ignored; read.

    Returns: plain numbers; counters of `stats()` are 0, `max_consecutive_skips` is None.

    Raises: KeyError for a missing field; TypeError or ValueError naming a wrong one and its value.
    """
    (scale,) = _numbers(state, "cur_scale")
    scale = _check_scale(scale, "cur_scale")
    name = "dynamic"
    if name not in state:  # FP16_Optimizer's
        name, state = "dynamic_loss_scale", {**state, **_NO_HYSTERESIS}
    if not policy.check_bool(state[name], name):
        fixed = {"growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1, "_growth_tracker": 0}
        return {"scale": scale, **fixed, **_extras(NO_LIMITS, strikes=0)}
    factor, window, min_scale = _numbers(state, "scale_factor", "scale_window", "min_scale")
    factor = policy.check_number("growth_factor", factor, "scale_factor")
    window = policy.check_number("growth_interval", window, "scale_window")
    shift, left = _numbers(state, "delayed_shift", "cur_hysteresis")
    shift = policy.check_number("hysteresis", shift, "delayed_shift")
    left = policy.check_number("hysteresis", left, "cur_hysteresis")
    if left > shift:
        raise ValueError(f"cur_hysteresis must be at most delayed_shift={shift}, got {left}")
    if policy.check_bool(state["consecutive_hysteresis"], "consecutive_hysteresis") and shift > 1:
        text = "consecutive_hysteresis=True has no counterpart: overflows count until the scale is due to grow"
        warnings.warn(text, UserWarning, stacklevel=stacklevel())
    done, last = _numbers(state, "cur_iter", "last_overflow_iter")
    done, last = policy.check_number("count", done, "cur_iter"), policy.check_int(last, "last_overflow_iter")
    good = done - last - 1
    if last < -1 or good < 0:
        raise ValueError(f"last_overflow_iter must be in [-1, cur_iter), got {last} and cur_iter={done}")
    return {
        "scale": scale,
        "growth_factor": factor,
        "backoff_factor": 1.0 / factor,
        "growth_interval": window,
        "_growth_tracker": policy.check_growth_tracker((good - 1) % window if good else 0),
        **_extras(NO_LIMITS.changed(min_scale=min_scale, hysteresis=shift), strikes=shift - left),
    }


def _numbers(state: Mapping[str, Any], *names: str) -> list[Any]:
    """Return fields' values, the element where one is a tensor; the caller checks what kind of number it is."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict, such as vars() of an object, got {type(state).__name__}")
    values = [state[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def _check_scale(value: Any, name: str) -> Any:
    """Return a scale. Where it has no ceiling a run may have saved one of infinity, which no later step lowers."""
    try:
        return policy.check_number("scale", value, name)
    except ValueError as error:
        raise ValueError(f"{error}; go on from a finite one, such as 2.0**16, in its place") from None


def _extras(limits: Limits, strikes: int) -> dict[str, Any]:
    counters = policy.no_counters()
    counters[STRIKES] = strikes
    return {policy.KEY: policy.to_checkpoint(limits, counters)}

"""A scaler's settings: getters, setters, checkpoints. A setter takes effect at the next update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaler_triton import limits, policy
from scaler_triton.attributes import ScalerAttributes
from scaler_triton.cuda_graphs import refuse_capture
from scaler_triton.limits import NO_LIMITS
from scaler_triton.stats import NAMES, Lagging
from scaler_triton.waiting import unnoticed


class SettingsMixin(ScalerAttributes):
    """The numbers that `update` uses, and the counters that a checkpoint also holds."""

    def _numbers(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _device_policy(self, device: torch.device) -> Tensor:
        held = self._device_policies.get(device)
        if held is None:
            refuse_capture(device, "a scaler's first update")
            from scaler_triton.kernels.update_scale import DevicePolicy

            held = self._device_policies[device] = DevicePolicy(device, unnoticed)
        chosen = self._limits
        bounds = chosen.min_scale, chosen.max_scale
        return held.hold(*self._numbers(), *bounds, chosen.hysteresis, chosen.consecutive_hysteresis)

    def _numbers_changed(self) -> None:
        for device in self._device_policies:  # where graphs read them at each replay
            self._device_policy(device)

    def _set_limits(self, **changed: Any) -> None:
        self._limits = limits.check_order(self._limits._replace(**changed))
        self._numbers_changed()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor the scale grows by: finite, >= 1 (1: it stays); else ValueError or TypeError."""
        self._growth_factor = policy.check_growth_factor(new_factor, "new_factor")
        self._numbers_changed()

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor the scale is backed off by: in (0, 1] (1: it stays); else ValueError or TypeError."""
        self._backoff_factor = policy.check_backoff_factor(new_factor, "new_factor")
        self._numbers_changed()

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many updates in a row without overflow the scale grows: >= 1; else ValueError or TypeError."""
        self._growth_interval = policy.check_growth_interval(new_interval, "new_interval")
        self._numbers_changed()

    def get_min_scale(self) -> float:
        """Return the smallest scale that an update leaves, 2^-126 by default."""
        return self._limits.min_scale

    def set_min_scale(self, new_scale: float) -> None:
        """Set the smallest scale: in [2^-126, max_scale], rounded to fp32; else ValueError or TypeError."""
        self._set_limits(min_scale=limits.bound(new_scale, "new_scale"))

    def get_max_scale(self) -> float:
        """Return the largest scale that an update leaves, fp32 max by default."""
        return self._limits.max_scale

    def set_max_scale(self, new_scale: float) -> None:
        """Set the largest scale: in [min_scale, fp32 max], rounded to fp32; else ValueError or TypeError."""
        self._set_limits(max_scale=limits.bound(new_scale, "new_scale"))

    def get_hysteresis(self) -> int:
        """Return how many overflows it takes until the scale backs off, 1 by default."""
        return self._limits.hysteresis

    def set_hysteresis(self, new_hysteresis: int) -> None:
        """Set how many overflows, those counted already too, make a backoff: >= 1; else ValueError or TypeError."""
        self._set_limits(hysteresis=policy.check_hysteresis(new_hysteresis, "new_hysteresis"))

    def get_consecutive_hysteresis(self) -> bool:
        """Return whether the overflows of `hysteresis` must come in a row, False by default."""
        return self._limits.consecutive_hysteresis

    def set_consecutive_hysteresis(self, new_value: bool) -> None:
        """Set whether the overflows of `hysteresis` must come in a row: True or False; else TypeError."""
        self._set_limits(consecutive_hysteresis=policy.check_bool(new_value, "new_value"))

    def get_max_consecutive_skips(self) -> int | None:
        """Return how many updates in a row may be skipped without an error, None (any number) by default."""
        return self._limits.max_consecutive_skips

    def set_max_consecutive_skips(self, new_limit: int | None) -> None:
        """Set how many updates in a row may be skipped: >= 0, or None for any number; else ValueError or TypeError."""
        self._set_limits(max_consecutive_skips=policy.check_max_skips(new_limit, "new_limit"))
        self._lagging = Lagging()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five fields; `{}` if disabled.

        Limits and counters are under one more key, `scaler_triton`, once one of `min_scale` to `max_consecutive_skips`
        is not its default. torch's class loads that, too, and ignores the key.
        """
        if not self._enabled:
            return {}
        state = super().state_dict()
        if self._limits != NO_LIMITS:
            state[limits.KEY] = limits.to_checkpoint(self._limits, self._counters.read())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned; nothing on a disabled scaler.

        Without the key `scaler_triton` limits stay as they are. Counters are the checkpoint's, all 0 if it has none.

        Args:
            state_dict: the five fields, and perhaps that key; read.

        Raises: torch's RuntimeError for an empty dict and KeyError for a missing field; ValueError or TypeError
            naming a wrong field and its value; TypeError for what is no dict. The scaler is as before then.
        """
        if not self._enabled:
            return
        loaded, counters = self._limits, [0] * len(NAMES)
        if limits.check_dict(state_dict, "state_dict"):  # torch raises for an empty one
            if limits.KEY in state_dict:
                loaded, counters = limits.from_checkpoint(state_dict[limits.KEY])
            state_dict = policy.check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        self._limits = loaded
        self._counters.set(counters)
        self._lagging = Lagging()
        for plan in self._records.plans():
            plan.marks.forget()  # their generations count another run's skips
        self._numbers_changed()

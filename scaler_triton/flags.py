"""An optimizer's flag as the step's state holds it: ours, or what somebody put in its place."""

from __future__ import annotations

from torch import Tensor

from scaler_triton.held import Held
from scaler_triton.step_state import StepState
from scaler_triton.verdict import Verdict, any_flag, as_flag


class FlagsMixin(Held):
    """The flag of a state, on the device and on the host."""

    def _verdict(self, state: StepState) -> Verdict | None:
        """Return the verdict behind the state's flags, None if somebody else stored them."""
        verdict: Verdict | None = state.get("verdict")
        return verdict if verdict is not None and verdict.is_behind(state["found_inf_per_device"]) else None

    def _flag(self, state: StepState) -> Tensor:
        """Return this optimizer's flag, fp32 `()`, 0.0 or 1.0, on the scale's device."""
        assert self._scale is not None
        verdict = self._verdict(state)
        if verdict is not None:
            return verdict.flag()
        device = self._scale.device
        return any_flag([as_flag(flag, device) for flag in state["found_inf_per_device"].values()], device)

    def _host_flag(self, state: StepState) -> bool:
        verdict = self._verdict(state)
        if verdict is not None:
            skips = verdict.on_host()
        else:
            skips = any(flag.item() for flag in state["found_inf_per_device"].values())
        state["skips"] = skips
        return skips

"""LastSteps: the state of each optimizer's last step, kept after `update` for `was_skipped`."""

from __future__ import annotations

import weakref
from typing import Any

from scaler_triton.optimizers import unwrap
from scaler_triton.step_state import StepState


class LastSteps:
    """The states of the last steps, each until its optimizer's next step begins or the optimizer is freed."""

    def __init__(self) -> None:
        self._states: dict[int, StepState | None] = {}

    def keep(self, state: StepState) -> None:
        """Keep the state of an optimizer that was stepped just now."""
        key = id(state["owner"]())
        if key not in self._states:  # a new one: drop those of freed optimizers
            self._states = {key: kept for key, kept in self._states.items() if kept is not None and _is_alive(kept)}
        if "wrappers" in state or "earlier" in state:
            state = state.copy()
            state.pop("wrappers", None)  # one without weak references is held strongly, and with it the optimizer
            state.pop("earlier", None)
        self._states[key] = state

    def forget(self, state: StepState) -> None:
        """Drop the last step of an optimizer, whose next one begins with `state`."""
        key = id(state["owner"]())
        if key in self._states:
            self._states[key] = None

    def of(self, optimizer: Any) -> StepState | None:
        """Return the state of an optimizer's last step, None if it was not stepped since its last unscale_."""
        inner = unwrap(optimizer)
        state = self._states.get(id(inner))
        return state if state is not None and state["owner"]() is inner else None


def _is_alive(state: StepState) -> bool:
    owner = state["owner"]  # a strong reference would keep its optimizer alive for ever
    return isinstance(owner, weakref.ref) and owner() is not None

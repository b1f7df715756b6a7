"""The parts of a guard: a scaler's, but nothing is divided, and a check may judge the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from scaler_triton.core.look import Look, Read
from scaler_triton.core.step import FAILED, UNSCALED, OptimizerStep
from scaler_triton.guard.spikes import Guard, Spike, Window
from scaler_triton.parts import LookAt, Parts


class GuardParts(Parts):
    """A guard's parts: all ranks agree, if there are several."""

    scales = False

    def __init__(self) -> None:
        super().__init__(sharded=True)
        self.checks.needs_group = False
        self.checks.dividing = self.checks.reading = [Read()]
        self.guard = Guard(None, 2)

    def become(self, guard: Guard) -> None:
        """Follow this guard's rule."""
        self.guard = guard
        if guard.sigma is not None:
            self.checks.looks_for = self._looks  # type: ignore[method-assign]
            self.checks.n_sums, self.checks.sums_partial = 0, True

    def _looks(self, step: OptimizerStep, scale: Tensor, divide: bool) -> Sequence[Look]:
        return [Spike(self._window(step, scale), self.counters, scale.device, guess=True)]

    def looks_with_norm(self, step: OptimizerStep, scale: Tensor, model: nn.Module | None) -> Sequence[Look]:
        """Return the looks of a clip; the last one gives the norm, and may judge it."""
        if self.guard.sigma is None:
            return super().looks_with_norm(step, scale, model)
        return [Spike(self._window(step, scale), self.counters, scale.device, model)]

    def _window(self, step: OptimizerStep, scale: Tensor) -> Window:
        """Return the window of an optimizer, made if there is none on the scale's device.

        It comes before all that may fail on one rank alone: a checkpoint's windows belong to optimizers in this order.
        """
        window: Window | None = step.notes.get("window")
        if window is None or window.memory.device != scale.device:
            window = step.notes["window"] = self.guard.new_window(scale.device, self.checks.requested)
        return window

    def let_others_wait(self) -> None:
        """Before an update, which may count a skip, note which checks were made before it."""
        steps = self.steps
        if not steps.unfinished:
            return
        waiting = [step for step in steps.all() if step.phase in (UNSCALED, FAILED)]
        for step in waiting:
            if step.phase is UNSCALED and not step.notes.get("waits"):
                for observer in self.checks.observers:
                    observer.carried(step)
                step.notes["waits"] = True
        steps.unfinished = bool(waiting)

    def described(self, scale: Any, init_scale: float, look: LookAt) -> tuple[list[str], bool]:
        """Return what `repr` says of the norms, and whether it is of now."""
        if self.guard.sigma is None:
            return ["no spike_sigma"], True
        looked = [look(window.copy, window.memory) for window in self.guard.windows()]
        return self.guard.described(), all(looked)

    def newest(self, scale: Any, init_scale: float) -> dict[str, float]:
        """Return the last norms and their limits, as far as they are on the host."""
        return self.guard.newest()

    def logged_names(self, counted: list[str], known: dict[str, Any]) -> list[str]:
        """Return the names of counters, norms and limits."""
        return [*counted, *(name for name in known if name.startswith(("norm", "limit")))]

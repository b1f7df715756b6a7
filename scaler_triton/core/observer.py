"""Observers: who is told of the rare events of a step. A steady step without an overflow tells nobody anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaler_triton.core.plan import Batch
    from scaler_triton.core.step import OptimizerStep


class Observer:
    """What a room overrides to be told; what it raises is raised by the step."""

    def found(self, step: OptimizerStep, batches: Sequence[Batch]) -> None:
        """A check has found a gradient on the CPU that is not finite; it may have divided them by now."""

    def carried(self, step: OptimizerStep) -> None:
        """An update comes now, over which a step will be carried that was checked, but not stepped."""

    def resumed(self, step: OptimizerStep) -> None:
        """A carried step goes on."""

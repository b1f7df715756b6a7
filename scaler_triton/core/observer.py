"""Observers: who is told of the rare events of a step. A steady step without an overflow tells nobody anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from scaler_triton.core.flag import Flag
    from scaler_triton.core.plan import Batch, GradPlan
    from scaler_triton.core.step import OptimizerStep


class Meeting(NamedTuple):
    """What a check holds when it meets gradients for the first time.

    Whoever writes something there sets `flag.written`, and `plan.is_new` to be told of the next check, too.
    """

    step: OptimizerStep
    plan: GradPlan
    parameters: Sequence[Tensor]
    scale: Tensor  # one element
    flag: Flag
    divides: bool  # whether the check is going to divide these gradients by the scale


class Observer:
    """What a room overrides to be told; what it raises is raised by the step."""

    def met(self, meeting: Meeting) -> None:
        """A check has met gradients of new forms, or a new optimizer's, and has not written any of them yet."""

    def skipped(self, step: OptimizerStep, scale: Tensor) -> None:
        """A plain optimizer's step is skipped; `scale` has one element."""

    def raising(self, error: BaseException, optimizer: Any) -> None:
        """An error of torch's is about to be raised; `error.add_note` may say more. What this raises is dropped."""

    def found(self, step: OptimizerStep, batches: Sequence[Batch]) -> None:
        """A check has found a gradient on the CPU that is not finite; it may have divided them by now."""

    def carried(self, step: OptimizerStep) -> None:
        """An update comes now, over which a step will be carried that was checked, but not stepped."""

    def resumed(self, step: OptimizerStep) -> None:
        """A carried step goes on."""

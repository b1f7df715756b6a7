"""The observer of the cold events by which a scaler notices what trains wrongly.

| event   | what is looked for                                                                                  |
|---------|-----------------------------------------------------------------------------------------------------|
| met     | parameters of two optimizers, what is derived from gradients, fp16 state, replicas with other scales |
| skipped | gradients that nobody clears, averages that a skip has poisoned                                     |
| raising | what an error of torch's does not say                                                               |

Whatever can be made right is made right; else there is an error before anything is written, or a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scaler_triton.core.dispatch import is_captured
from scaler_triton.core.observer import Meeting, Observer
from scaler_triton.watch import after_skips, derived, notes, optimizers

if TYPE_CHECKING:
    from torch import Tensor

    from scaler_triton.core.check import Checks
    from scaler_triton.core.step import OptimizerStep


class Watch(Observer):
    """Notices what one scaler's checks and steps show.

    Args:
        checks: the scaler's.
        divides: whether the scaler divides gradients, as a guard does not.
    """

    def __init__(self, checks: Checks, *, divides: bool) -> None:
        self._checks, self._divides = checks, divides

    def met(self, meeting: Meeting) -> None:
        """Look at what is new of an optimizer or its gradients."""
        if is_captured(meeting.scale):
            return
        if self._divides:
            optimizers.refuse_shared(meeting, self._checks.steps.all())
            optimizers.warn_of_fp16_state(meeting, self._checks.warned)
            optimizers.warn_of_unknown_scales(meeting, self._checks)
            derived.divide(meeting)
        derived.wait_for_copies(meeting)
        after_skips.look_at_parameters(meeting, self._checks.warned)

    def skipped(self, step: OptimizerStep, scale: Tensor) -> None:
        """Look at what a skip leaves behind."""
        after_skips.follow_gradients(step, self._checks.warned)
        after_skips.remember_parameters(step)

    def raising(self, error: BaseException, optimizer: Any) -> None:
        """Say more of an error of torch's."""
        notes.add_notes(error, optimizer)

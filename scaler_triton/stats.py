"""What a scaler's updates have done, as users read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalerStats:
    """What a scaler's updates have done so far.

    Args:
        updates: calls of `update`; `update(new_scale)` counts only if gradients were checked before it.
        skipped: updates in which at least one step was skipped.
        consecutive_skips: how many of them were the last ones in a row; 0 after an update without overflow.
        growths: updates that made the scale larger, even by a limit; `update(new_scale)` does not count.
        backoffs: updates that made it smaller, even by a limit.
        last_skip: the number of the last update that skipped, from 1; None if none did.
        spikes: steps that a `StepGuard` skips because their norm is a spike; counted when they are checked.
    """

    updates: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    growths: int = 0
    backoffs: int = 0
    last_skip: int | None = None
    spikes: int = 0

    @classmethod
    def of(cls, counters: Sequence[int]) -> ScalerStats:
        """Return counters as stats."""
        updates, skipped, streak, growths, backoffs, last_skip, _, spikes = counters
        return cls(updates, skipped, streak, growths, backoffs, last_skip or None, spikes)

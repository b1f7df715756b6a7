"""Steps that are skipped one after another: a warning, once a streak, for runs that have no `max_consecutive_skips`.

The host knows of a plain optimizer's skip, and counts them by optimizer. A fused one skips on the device: now and then
its step looks at the counters of all updates that the look before has copied to the host, so that it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton.core.dispatch import is_captured, sync_allowed
from scaler_triton.core.observer import Observer
from scaler_triton.core.update import LaggingCounters, SkipStreakError
from scaler_triton.core.warning import warn
from scaler_triton.kernels.abi import STREAK, UPDATES
from scaler_triton.stats import ScalerStats
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.step import OptimizerStep
    from scaler_triton.core.update import Updates
    from scaler_triton.report.overflow import OverflowReport

TOO_MANY = 50  # skips in a row: as many as take torch's first scale below 2^-33
CODE, CAUSES = "ST09", {"ST05", "ST06"}  # of warnings: that of a streak, those whose cause makes one
LOOKS = 63  # a fused optimizer's step looks if the number of those before it ends in these bits

Report = Callable[[torch.device], "OverflowReport"]  # by the scale's device: this rank's only, as not all may ask


class Streaks(Observer):
    """The streaks of one scaler's skips.

    Args:
        updates: the scaler's.
        warned: the codes of what the scaler has warned of.
        report: tells what was skipped last.
        scales: whether it has a scale to tell of.
    """

    def __init__(self, updates: Updates, warned: set[str], report: Report, *, scales: bool) -> None:
        self._updates, self._warned, self._report, self._scales = updates, warned, report, scales
        self._warned_of: int | None = None  # the update before the streak that was warned of

    def skipped(self, step: OptimizerStep, scale: Tensor) -> None:
        """Count a skip that is known on the host, and warn if it is one too many."""
        at, count = step.notes.get("skips", (None, 0))
        count = count + 1 if at == step.steps_taken else 1
        step.notes["skips"] = step.steps_taken + 1, count
        if count == TOO_MANY:
            what = f"{count} steps of {type(step.owner()).__name__} in a row were skipped"
            self._warn(what, scale)

    def look(self, scale: Tensor) -> None:
        """Warn, once a streak, if too many updates in a row were skipped as far as the host knows; wait for nothing."""
        if is_captured(scale):
            return
        seen = self._updates.counters.newest()
        began = seen[UPDATES] - seen[STREAK]
        if seen[STREAK] >= TOO_MANY and began != self._warned_of:
            self._warned_of = began
            what = f"{seen[STREAK]} updates in a row were skipped, the last one update {seen[UPDATES]}"
            self._warn(what, scale)

    def forget(self, steps: Iterable[OptimizerStep]) -> None:
        """Begin to count anew, as after a checkpoint was loaded."""
        self._warned_of = None
        for step in steps:
            step.notes.pop("skips", None)

    def raise_if_too_long(self, scale: Tensor) -> None:
        """Raise SkipStreakError if too many updates in a row were skipped; to be called after each update."""
        seen, limit = self._updates.too_many_skips(scale), self._updates.limits.max_consecutive_skips
        if seen is not None:
            by_now = f"; by now the scale is {scale.item()}" if self._scales else ""
            raise SkipStreakError(
                f"{count_of(seen[STREAK], 'consecutive skip')}, more than max_consecutive_skips={limit} "
                f"(raised {LaggingCounters.LAG} updates late{by_now}). {ScalerStats.of(seen)}\n"
                f"{self._report(scale.device)}{self._causes()}"
            )

    def _warn(self, what: str, scale: Tensor) -> None:
        limit, known = self._updates.limits.max_consecutive_skips, ""
        with sync_allowed(scale.device), suppress(Exception):  # the warning is more important than its details
            what += f"; the scale is {scale.item()}" if self._scales else ""
            found = self._report(scale.device)
            known = f" {found.conclusion or str(found).splitlines()[0]}"
        advice = "Set max_consecutive_skips to end such a run with SkipStreakError."
        if limit is not None:
            advice = f"After more than max_consecutive_skips={limit} in a row, SkipStreakError ends the run."
        warn(CODE, f"{what}.{known}{self._causes()} {advice}")

    def _causes(self) -> str:
        """Return what was warned of before and makes every later step skip."""
        causes = sorted(CAUSES & self._warned)
        return f" It was warned of the cause: {', '.join(causes)}." if causes else ""

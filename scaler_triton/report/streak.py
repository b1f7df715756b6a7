"""Steps that are skipped one after another: a warning, once a streak, for runs that have no `max_consecutive_skips`.

The host knows of a plain optimizer's skip, and counts them by optimizer. A fused one skips on the device: now and then
its step looks at the counters of all updates that the look before has copied to the host, so that it waits for nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton.core.dispatch import is_captured, stacklevel, sync_allowed
from scaler_triton.core.update import LaggingCounters, SkipStreakError
from scaler_triton.kernels.abi import STREAK, UPDATES
from scaler_triton.stats import ScalerStats
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.step import OptimizerStep
    from scaler_triton.core.update import Counters, Updates
    from scaler_triton.report.overflow import OverflowReport

TOO_MANY = 50  # skips in a row: as many as take torch's first scale below 2^-33
LOOKS = 63  # a fused optimizer's step looks if the number of those before it ends in these bits

# The scaler's methods, which a subclass may replace. The report is this rank's only: not all ranks may ask for it.
GetScale = Callable[[], float]
Report = Callable[[], "OverflowReport"]


class Streaks:
    """The streaks of one scaler's skips.

    Args:
        counters, updates: the scaler's.
        scales: whether it has a scale to tell of.
    """

    def __init__(self, counters: Counters, updates: Updates, *, scales: bool) -> None:
        self._counters, self._updates, self._scales = counters, updates, scales
        self._warned_of: int | None = None  # the update before the streak that was warned of

    def skipped(self, step: OptimizerStep, device: torch.device, get_scale: GetScale, report: Report) -> float | None:
        """Count a skip that is known on the host, warn if it is one too many, and return what `step` returns then."""
        at, count = step.notes.get("skips", (None, 0))
        count = count + 1 if at == step.steps_taken else 1
        step.notes["skips"] = step.steps_taken + 1, count
        if count == TOO_MANY:
            what = f"{count} steps of {type(step.owner()).__name__} in a row were skipped"
            self._warn(what, device, get_scale, report)
        return None

    def look(self, scale: Tensor, get_scale: GetScale, report: Report) -> None:
        """Warn, once a streak, if too many updates in a row were skipped as far as the host knows; wait for nothing."""
        if is_captured(scale):
            return
        seen = self._counters.newest()
        began = seen[UPDATES] - seen[STREAK]
        if seen[STREAK] >= TOO_MANY and began != self._warned_of:
            self._warned_of = began
            what = f"{seen[STREAK]} updates in a row were skipped, the last one update {seen[UPDATES]}"
            self._warn(what, scale.device, get_scale, report)

    def forget(self, steps: Iterable[OptimizerStep]) -> None:
        """Begin to count anew, as after a checkpoint was loaded."""
        self._warned_of = None
        for step in steps:
            step.notes.pop("skips", None)

    def raise_if_too_long(self, scale: Tensor, get_scale: GetScale, report: Report) -> None:
        """Raise SkipStreakError if too many updates in a row were skipped; to be called after each update."""
        seen, limit = self._updates.too_many_skips(scale), self._updates.limits.max_consecutive_skips
        if seen is not None:
            by_now = f"; by now the scale is {get_scale()}" if self._scales else ""
            raise SkipStreakError(
                f"{count_of(seen[STREAK], 'consecutive skip')}, more than max_consecutive_skips={limit} "
                f"(raised {LaggingCounters.LAG} updates late{by_now}). {ScalerStats.of(seen)}\n"
                f"{report()}"
            )

    def _warn(self, what: str, device: torch.device, get_scale: GetScale, report: Report) -> None:
        limit, known = self._updates.limits.max_consecutive_skips, ""
        with suppress(Exception), sync_allowed(device):  # the warning is more important than its details
            if self._scales:
                known = f"; the scale is {get_scale()}"
            found = report()
            known += f". {found.conclusion or str(found).splitlines()[0]}"
        advice = "Set max_consecutive_skips to end such a run with SkipStreakError."
        if limit is not None:
            advice = f"After more than max_consecutive_skips={limit} in a row, SkipStreakError ends the run."
        text = f"{what}{known or '.'} {advice}"
        warnings.warn(text, stacklevel=stacklevel())

"""Steps that are skipped one after another: a warning, once a streak, for runs that have no `max_consecutive_skips`.

The host knows of a plain optimizer's skip, and counts them by optimizer. A fused one skips on the device: now and then
its step looks at the counters of all updates that the look before has copied to the host, so that it waits for nothing.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from scaler_triton.core.dispatch import is_captured, stacklevel, sync_allowed
from scaler_triton.core.update import LaggingCounters, SkipStreakError
from scaler_triton.kernels.abi import STREAK, UPDATES
from scaler_triton.stats import ScalerStats
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.step import OptimizerStep
    from scaler_triton.grad_scaler import GradScaler

TOO_MANY = 50  # skips in a row: as many as take torch's first scale below 2^-33
LOOKS = 63  # a fused optimizer's step looks if the number of those before it ends in these bits


def skipped(scaler: GradScaler, step: OptimizerStep) -> float | None:
    """Count a skip that is known on the host, warn if it is one too many, and return what `step` returns then."""
    at, count = step.notes.get("skips", (None, 0))
    count = count + 1 if at == step.steps_taken else 1
    step.notes["skips"] = step.steps_taken + 1, count
    if count == TOO_MANY:
        _warn(scaler, f"{count} steps of {type(step.owner()).__name__} in a row were skipped")
    return None


def look(scaler: GradScaler) -> None:
    """Warn, once a streak, if too many updates in a row were skipped as far as the host knows; never wait before it."""
    ours = scaler._ours
    if is_captured(scaler._scale):
        return
    seen = ours.counters.newest()
    began = seen[UPDATES] - seen[STREAK]
    if seen[STREAK] >= TOO_MANY and began != ours.warned_of:
        ours.warned_of = began
        _warn(scaler, f"{seen[STREAK]} updates in a row were skipped, the last one update {seen[UPDATES]}")


def forget(scaler: GradScaler) -> None:
    """Begin to count anew, as after a checkpoint was loaded."""
    scaler._ours.warned_of = None
    for step in scaler._ours.steps.all():
        step.notes.pop("skips", None)


def raise_if_too_long(scaler: GradScaler) -> None:
    """Raise SkipStreakError if too many updates in a row were skipped; to be called after each update."""
    ours = scaler._ours
    seen, limit = ours.updates.too_many_skips(scaler._scale), ours.updates.limits.max_consecutive_skips
    if seen is not None:
        by_now = f"; by now the scale is {scaler.get_scale()}" if ours.scales else ""
        raise SkipStreakError(
            f"{count_of(seen[STREAK], 'consecutive skip')}, more than max_consecutive_skips={limit} "
            f"(raised {LaggingCounters.LAG} updates late{by_now}). {ScalerStats.of(seen)}\n"
            f"{scaler.overflow_report()}"  # this rank's only: not all ranks may get here
        )


def _warn(scaler: GradScaler, what: str) -> None:
    limit, known = scaler._ours.updates.limits.max_consecutive_skips, ""
    with suppress(Exception), sync_allowed(scaler._scale.device):  # the warning is more important than its details
        if scaler._ours.scales:
            known = f"; the scale is {scaler.get_scale()}"
        report = scaler.overflow_report()  # this rank's only: not all ranks may get here
        known += f". {report.conclusion or str(report).splitlines()[0]}"
    advice = "Set max_consecutive_skips to end such a run with SkipStreakError."
    if limit is not None:
        advice = f"After more than max_consecutive_skips={limit} in a row, SkipStreakError ends the run."
    text = f"{what}{known or '.'} {advice}"
    warnings.warn(text, stacklevel=stacklevel())

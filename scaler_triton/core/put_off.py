"""Good updates that are put off: the host counts them, and launches nothing.

If no flag was set and the scale is not due to grow, an update adds 1 to the growth tracker and to `updates`, and leaves
the rest as it is. Where the host has read each flag, as in a plain optimizer's step, it knows that, and need not tell
the device at once. It does before the next launch, for an overflow or a growth, and before somebody reads tracker or
counters. What the scale is, the host neither knows nor asks.

None is put off any more once a flag stays on the device, as a fused optimizer's does, once an update is captured in a
graph, and once other code has got the tracker, which it may read at any time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scaler_triton.core.dispatch import kernels, outside_transforms
from scaler_triton.core.flag import Flag
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.torch_ops import increment_version
from scaler_triton.kernels.abi import MAX_TRACKER, UPDATES

if TYPE_CHECKING:
    from scaler_triton.core.step import OptimizerStep
    from scaler_triton.core.update import Updater
    from scaler_triton.policy import Limits

# Held while a device is told: a logger's thread may read the counters, and a signal's handler save a checkpoint.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # else a child may wait for ever for what another thread of its parent held
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]

LEAST_INTERVAL = 64  # with a shorter growth interval the tracker is copied about as often as a launch is saved


class PutOff:
    """The good updates of one scaler that its device has not been told of."""

    def __init__(self) -> None:
        self.is_over = False  # none is put off any more
        self.stream: int | None = None  # handle of the one that a launch or `tell` used last
        self._tracker = self._updates = 0  # what the device held after the last launch
        self._counted = self._told = 0  # the updates since then, and of how many the device was told
        self._room = 0  # how many more may come before the scale is due to grow; 0: unknown, too
        self._numbers: Any = None  # the rule's, for which that holds, and its limits
        self._limits: Limits | None = None
        self._version = 0  # of the scale after the last update: at another one, somebody has written it
        self._copies = HostCopy(), HostCopy()  # of tracker and counters, after the last launch
        self._is_copied = False

    def takes(self, updater: Updater, checked: Sequence[OptimizerStep], numbers: Any, limits: Limits) -> bool:
        """Put an update off if that will do; return whether it did."""
        scale = updater.scale
        if limits is not self._limits or numbers != self._numbers or scale._version != self._version:
            return False
        for step in checked:
            if step.outcome is not False or step.flag is None:
                return False
        if (self._room < 1 and not self._knows_tracker()) or updater.rows.of_graphs:  # replays write flags, too
            return False
        self._counted += 1
        self._room -= 1
        self._version += 1
        increment_version((scale,))  # as a launch would
        for step in checked:
            step.flag.is_zero = True  # type: ignore[union-attr] # the host has read it
        return True

    def _knows_tracker(self) -> bool:
        """Find how many updates may be put off, from the copies that the last launch has started."""
        tracker, counters = self._copies
        if not (self._is_copied and tracker.has_arrived() and counters.has_arrived()):
            return False
        with _lock:
            self._is_copied = False
            self._tracker, self._updates = tracker.read(), counters.read()[UPDATES]
            self._counted = self._told = 0
        self._room = min(self._numbers[-1], MAX_TRACKER) - 1 - self._tracker
        return self._room > 0

    def after_launch(self, updater: Updater, checked: Sequence[OptimizerStep], numbers: Any, limits: Limits) -> None:
        """Note an update that was launched: if it was good, the next ones may be put off."""
        self.forget()
        if updater.scale.is_inference() or any(isinstance(step.outcome, Flag) for step in checked):
            self.is_over = True
        is_usual = updater.by_kernel and numbers[-1] >= LEAST_INTERVAL and limits.max_consecutive_skips is None
        if is_usual and not self.is_over and all(step.outcome is False for step in checked):
            self._numbers, self._limits, self._version = numbers, limits, updater.scale._version
            for copy, source in zip(self._copies, (updater.growth_tracker, updater.counters), strict=True):
                copy.start(source)
            self._is_copied, self.stream = True, updater.stream()

    def forget(self) -> None:
        """Forget when the scale is due to grow: the next update is launched."""
        self._room, self._limits, self._is_copied, self.stream = 0, None, False, None

    def is_ahead(self) -> bool:
        """Return whether the host has counted what the device was not told."""
        return self._counted != self._told

    def tell(self, updater: Updater) -> None:
        """Tell the device of all that the host has counted: on the current stream, after what was launched before."""
        with _lock, outside_transforms():
            updater.wait_for(self.stream)
            if (count := self._counted) != self._told:
                numbers = self._tracker + count, self._updates + count
                kernels().update_scale.launch_counts(updater.growth_tracker, updater.counters, *numbers)
                self.stream, self._told = updater.stream(), count

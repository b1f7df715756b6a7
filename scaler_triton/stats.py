"""Counters of updates, skips, growths and backoffs: kept on the scale's device, read on the host on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scaler_triton.cuda_graphs import is_captured, refuse_capture
from scaler_triton.mirror import HostMirror
from scaler_triton.waiting import unnoticed

# The order of the counters, on every device. Strikes: the overflows that count towards `hysteresis`.
UPDATES, SKIPPED, STREAK, GROWTHS, BACKOFFS, LAST_SKIP, STRIKES = range(7)
NAMES = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes")


class SkipStreakError(FloatingPointError):
    """More updates in a row were skipped than `max_consecutive_skips` allows."""


@dataclass(frozen=True)
class ScalerStats:
    """Counts of what a scaler's updates did so far.

    Args:
        updates: calls of `update`; `update(new_scale)` counts only if gradients were checked since the last update.
        skipped: updates with an overflow, after which a step was skipped.
        consecutive_skips: how many of them were the last ones in a row; 0 after an update without overflow.
        growths: updates after which the scale was larger, also if a limit made it so; none by `update(new_scale)`.
        backoffs: updates after which it was smaller, the same way.
        last_skip: which update skipped last, the first one being 1; None if none did.
    """

    updates: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    growths: int = 0
    backoffs: int = 0
    last_skip: int | None = None

    @classmethod
    def of(cls, counters: Sequence[int]) -> ScalerStats:
        """Return counters as stats."""
        updates, skipped, streak, growths, backoffs, last_skip, _ = counters
        return cls(updates, skipped, streak, growths, backoffs, last_skip or None)


class Counters:
    """A scaler's counters: ints if updates run on the host, else int64 [7] on the scale's device."""

    def __init__(self, values: Sequence[int] = (0,) * len(NAMES)) -> None:
        self._values: list[int] | Tensor = list(values)
        self._known = list(values)
        self._mirror: HostMirror | None = None

    def on_host(self) -> list[int]:
        """Return the ints, to be written by an update on the host."""
        if not isinstance(self._values, list):
            self._values = self.read()
        return self._values

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, to be written by an update on `device`; the same one each time."""
        if isinstance(self._values, list) or self._values.device != device:
            refuse_capture(device, "a scaler's first step")
            with torch.inference_mode(False), unnoticed(device):
                # Waited for, once per scaler: kernels on other streams read it.
                self._values = torch.tensor(self.read(), dtype=torch.int64, device="cpu").to(device)
            self._mirror = None
        return self._values

    def storage(self) -> list[int] | Tensor:
        """Return the ints or the tensor that hold the values now."""
        return self._values

    def set(self, values: Sequence[int]) -> None:
        """Write other values, on the device into the same tensor, which graphs write."""
        self._known = list(values)
        self._mirror = None  # its copy is of the old values
        if isinstance(self._values, list):
            self._values = list(values)
        else:
            self._values.copy_(torch.tensor(self._known, dtype=torch.int64, device="cpu"))

    def read(self) -> list[int]:
        """Return a copy of the values, waiting for the device."""
        self._known = list(self._values) if isinstance(self._values, list) else self._values.tolist()
        return list(self._known)

    def newest(self) -> list[int]:
        """Return the newest values that have arrived on the host, and start the next copy; on CUDA without waiting."""
        if isinstance(self._values, list):
            return self.read()
        if not is_captured(self._values):
            self._exchange_copies(self._values)
        return list(self._known)

    def _exchange_copies(self, values: Tensor) -> None:
        if self._mirror is None:
            self._mirror = HostMirror(values)
        elif not self._take_arrived(self._mirror):
            return
        self._mirror.start()
        self._take_arrived(self._mirror)  # at once where copies are not asynchronous

    def _take_arrived(self, mirror: HostMirror) -> bool:
        if not mirror.has_arrived():
            return False
        values = mirror.read()
        if values[UPDATES] >= self._known[UPDATES]:  # else `read` has returned newer ones
            self._known = values
        return True


class Lagging:
    """The counters of some updates ago: on the host by then, and the same on every rank."""

    LAG = 4  # updates

    def __init__(self) -> None:
        self._taken: list[HostMirror | list[int]] = []

    def push(self, values: list[int] | Tensor) -> list[int] | None:
        """Store the counters after an update, and return those of `LAG` updates before, None if there are none yet.

        Waits only for a device that is more than `LAG` updates behind.

        Args:
            values: what `Counters.storage` returned.
        """
        oldest = self._taken.pop(0) if len(self._taken) == self.LAG else None
        seen = oldest.read() if isinstance(oldest, HostMirror) else oldest
        self._taken.append(list(values) if isinstance(values, list) else _started(values, oldest))
        return seen


def _started(values: Tensor, done: HostMirror | list[int] | None) -> HostMirror:
    """Return a started copy of `values`, reusing `done` if it is a mirror of them."""
    if not isinstance(done, HostMirror) or done.source is not values:
        done = HostMirror(values)
    done.start()
    return done

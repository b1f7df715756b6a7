"""FlagBuffer: where a scaler's verdicts keep their flags."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from scaler_triton.verdict import COLUMNS, Verdict


class FlagBuffer:
    """The signals of a scaler's optimizers on one device, side by side: one launch reads and clears them all.

    Args:
        device: the scale's.
    """

    ROWS = 32

    @torch.inference_mode(False)  # what the first step makes is written by steps outside that mode, too
    def __init__(self, device: torch.device) -> None:
        size = COLUMNS * self.ROWS
        # Waited for, as a copy from the host is: zeroed later, on one stream, it would lose flags set on another.
        numbers = torch.zeros(size + self.ROWS, dtype=torch.float32, device="cpu").to(device)
        self.signals = numbers[:size].view(self.ROWS, COLUMNS)
        self.last = numbers[size:]  # the flags that the launch cleared last; it finds them behind the signals
        self._free = list(reversed(range(self.ROWS)))
        self.captured: set[Verdict] = set()  # graphs write them at every replay: their rows are never free again

    @torch.inference_mode(False)
    def verdict(self) -> Verdict:
        """Return a verdict on a row of its own, which is free again once it is gone; without one if all are taken."""
        if not self._free:
            return Verdict(torch.zeros_like(self.signals[0]))
        row = self._free.pop()
        storage, start = self.signals.untyped_storage(), COLUMNS * row
        # Not a view: those share one counter of writes, and a write to one would look like one to all.
        signals = torch.empty(0, dtype=torch.float32, device=self.signals.device).set_(storage, start, (COLUMNS,), (1,))
        verdict = Verdict(signals, self, row)
        weakref.finalize(verdict, self._free.append, row).atexit = False
        return verdict

    def rows(self, verdicts: Iterable[Verdict | None]) -> int | None:
        """Return the rows of `verdicts` as bits, None if one of them is not in this buffer."""
        rows = 0
        for verdict in verdicts:
            if verdict is None or verdict.buffer is not self:
                return None
            rows |= 1 << verdict.row
        return rows

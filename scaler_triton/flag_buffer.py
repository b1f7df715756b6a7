"""FlagBuffer: the memory of all flags of a scaler on one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from scaler_triton.verdict import COLUMNS, Verdict
from scaler_triton.waiting import unnoticed


class FlagBuffer:
    """One row of status for each optimizer, contiguous: the update reads and clears all of them in one launch.

    Args:
        device: the scale's.
    """

    ROWS = 32

    @torch.inference_mode(False)  # later steps write it outside that mode
    def __init__(self, device: torch.device) -> None:
        size = COLUMNS * self.ROWS
        # A copy from the host is waited for; a zeroing kernel could run after another stream has set a flag.
        with unnoticed(device):
            numbers = torch.zeros(size + self.ROWS, dtype=torch.float32, device="cpu").to(device)
        self.status = numbers[:size].view(self.ROWS, COLUMNS)
        self.last_flags = numbers[size:]  # what the update's launch cleared last; it expects them behind the status
        self._free = list(reversed(range(self.ROWS)))
        self.captured: set[Verdict] = set()  # written by every replay: their rows are never freed

    @torch.inference_mode(False)
    def verdict(self) -> Verdict:
        """Return a verdict on a free row, which is freed with the verdict; on memory of its own if no row is free."""
        if not self._free:
            return Verdict(torch.zeros_like(self.status[0]))
        row = self._free.pop()
        storage, start = self.status.untyped_storage(), COLUMNS * row
        # Not a view: views share one version counter, so a write to one row would count for all.
        status = torch.empty(0, dtype=torch.float32, device=self.status.device).set_(storage, start, (COLUMNS,), (1,))
        verdict = Verdict(status, self, row)
        weakref.finalize(verdict, self._free.append, row).atexit = False
        return verdict

    def rows(self, verdicts: Iterable[Verdict | None]) -> int | None:
        """Return the rows of `verdicts` as a bit mask, None if one of them is not in this buffer."""
        rows = 0
        for verdict in verdicts:
            if verdict is None or verdict.buffer is not self:
                return None
            rows |= 1 << verdict.row
        return rows

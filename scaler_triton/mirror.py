"""A host copy of a few device numbers, started early and waited for only when somebody reads it."""

from __future__ import annotations

import torch
from torch import Tensor


def version(tensor: Tensor) -> int | None:
    """Return the counter that every write to `tensor` moves on; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


class HostMirror:
    """Copies `source` to the host without waiting, as often as asked.

    Args:
        source: a small tensor on any device, not written. On CUDA a copy goes to pinned memory and an event marks
            its end; elsewhere the source is read when asked for.
    """

    def __init__(self, source: Tensor) -> None:
        self._source = source
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            with torch.cuda.device(source.device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Start a copy in the order of the current stream; the one before is overwritten."""
        if self._event is not None:
            with torch.cuda.device(self._source.device):
                self._copy.copy_(self._source, non_blocking=True)
                self._event.record()

    def read(self) -> list[float]:
        """Return the values of the last start, waiting for that copy only."""
        if self._event is None:
            return [float(value) for value in self._source.tolist()]
        self._event.synchronize()
        return [float(value) for value in self._copy.tolist()]

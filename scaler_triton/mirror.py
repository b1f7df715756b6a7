"""HostMirror: an asynchronous host copy of a small device tensor, waited for only when it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def version_counter(tensor: Tensor) -> int | None:
    """Return the version counter of `tensor`; None for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


class HostMirror:
    """Copies `source` to the host without waiting, any number of times.

    Args:
        source: a small tensor on any device, not written. On CUDA a copy goes to pinned memory and an event marks
            its end; elsewhere the source is read when asked for.
        frozen: elsewhere, too, `read` returns what the source held at the last `start`.
    """

    @torch.inference_mode(False)
    def __init__(self, source: Tensor, frozen: bool = False) -> None:
        self.source = source
        self._copy = source
        real = type(source) is Tensor  # torch's fake ones have no memory
        self._view = source.numpy() if source.is_cpu and real else None  # several times quicker to read
        self._frozen = frozen
        self._event: torch.cuda.Event | None = None
        if source.is_cuda and real:
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._view = self._copy.numpy()
            with torch.cuda.device(source.device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Start a copy on the current stream; it overwrites the one before."""
        if self._event is not None:
            with torch.cuda.device(self.source.device):
                self._copy.copy_(self.source, non_blocking=True)
                self._event.record()
        elif self._frozen:
            self._copy = self.source.clone()
            self._view = self._copy.numpy() if self._copy.is_cpu else None

    def has_arrived(self) -> bool:
        """Tell whether `read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[Any]:
        """Return the values of the last start, waiting for that copy only."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = (self._copy if self._view is None else self._view).tolist()
        return values

"""HostMirror: an asynchronous host copy of a small device tensor, waited for only when it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaler_triton.host_memory import host_memory


def version_counter(tensor: Tensor) -> int | None:
    """Return the version counter of `tensor`; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


class HostMirror:
    """Copies `source` to the host without waiting, any number of times.

    Args:
        source: a small tensor on any device, not written. On CUDA a copy goes to pinned memory and an event marks
            its end; elsewhere it is a clone, which `read` waits for.
    """

    @torch.inference_mode(False)
    def __init__(self, source: Tensor) -> None:
        self.source = self._copy = source
        self._event: torch.cuda.Event | None = None
        if source.is_cuda and type(source) is Tensor:  # not one of torch's fake tensors
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._view = host_memory(self._copy)
            with torch.cuda.device(source.device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Start a copy on the current stream; it overwrites the one before."""
        if self._event is None:
            self._copy = self.source.clone()
            return
        with torch.cuda.device(self.source.device):
            self._copy.copy_(self.source, non_blocking=True)
            self._event.record()

    def has_arrived(self) -> bool:
        """Tell whether `read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[Any]:
        """Return the values of the last start, waiting for that copy only."""
        if self._event is not None:
            self._event.synchronize()
            return self._view.tolist()
        values: list[Any] = self._copy.tolist()
        return values

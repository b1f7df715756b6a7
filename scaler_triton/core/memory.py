"""Small numbers in device memory that graphs, inference mode and other streams can live with; copies to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import is_captured, refuse_capture, sync_allowed
from scaler_triton.core.torch_ops import host_memory, wide_dtype

_CPU = torch.device("cpu")


def fp32_on(device: torch.device, number: Tensor) -> Tensor:
    """Return a one-element tensor as fp32 on `device`; only a copy to the CPU waits."""
    if number.device == device and number.dtype is torch.float32:
        return number
    # The CPU would read before a copy without a wait has arrived.
    return number.to(device=device, dtype=torch.float32, non_blocking=device.type != "cpu")


class HostCopy:
    """A small tensor's values on the host: from CUDA in pinned memory, with an event; elsewhere in a clone."""

    def __init__(self, latest: Any = None) -> None:
        self.latest = latest  # what `newest` returned last
        self._source: Tensor | None = None  # the tensor of the last start
        self._copy: Any = None
        self._event: torch.cuda.Event | None = None

    def start(self, source: Tensor) -> None:
        """Start a copy on the current stream; it overwrites the previous one."""
        if source is not self._source:
            self._prepare(source)
        if self._event is None:
            self._copy = source.clone()
        elif torch.cuda.current_device() == source.device.index:
            self._copy.copy_(source, non_blocking=True)
            self._event.record()
        else:
            with torch.cuda.device(source.device):
                self.start(source)

    @torch.inference_mode(False)
    def _prepare(self, source: Tensor) -> None:
        self._event = None
        if source.is_cuda and type(source) is Tensor:  # not one of torch's fake tensors
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._memory = host_memory(self._copy)
            with torch.cuda.device(source.device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._source = source

    def read(self) -> Any:
        """Return the values of the last start as `tolist` does, waiting for that copy only."""
        if self._event is not None:
            self._event.synchronize()
            return self._memory.tolist()
        return self._copy.tolist()

    def has_arrived(self) -> bool:
        """Return whether `read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def newest(self, source: Tensor) -> Any:
        """Return the newest values that have arrived, and start the next copy; never wait on CUDA.

        Before any has arrived it is the first `latest`. While a graph is captured nothing is started.
        """
        for _ in range(0 if is_captured(source) else 2):  # twice: off CUDA the first copy has arrived already
            if source is self._source:
                if not self.has_arrived():
                    break
                self.latest = self.read()
            self.start(source)
        return self.latest


class OnDevice:
    """Numbers that updates read or write: a list until `on` is first called, then a tensor on the scale's device.

    It stays the same tensor on that device, as graphs hold its address.
    """

    dtype = torch.float64

    def __init__(self, values: Sequence[Any]) -> None:
        self.values: list[Any] | Tensor = list(values)

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, which updates on `device` write."""
        if isinstance(self.values, list) or self.values.device != device:
            refuse_capture(device, "a scaler's first step")
            with torch.inference_mode(False), sync_allowed(device):
                # Kernels on other streams read it, so the copy is waited for, once per scaler.
                dtype = self.dtype if self.dtype is torch.int64 else wide_dtype(device)
                self.values = torch.tensor(self.read(), dtype=dtype, device="cpu").to(device)
        return self.values

    def on_host(self) -> Any:
        """Return the values for Python to read and write, for updates on the CPU."""
        return self.values if isinstance(self.values, list) else host_memory(self.on(_CPU))

    def set(self, values: Sequence[Any]) -> None:
        """Write other values."""
        if isinstance(self.values, list):
            self.values = list(values)
        else:
            self.values.copy_(torch.tensor(values, dtype=self.dtype, device="cpu"))

    def read(self) -> list[Any]:
        """Return a copy of the values, waiting for the device."""
        return list(self.values) if isinstance(self.values, list) else self.values.tolist()

"""GradTable: the addresses of many tensors and a map of their chunks, so that one launch processes all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaler_triton.kernels import launcher
from scaler_triton.kernels.common import GENERATIONS
from scaler_triton.kernels.launch_config import DEFAULT, LaunchConfig

# Tables that graphs read: kept for ever, as nothing tells when a graph is destroyed.
_captured: list["GradTable"] = []


class GradTable:
    """Device-side addresses and chunk map of tensors that share a device and a dtype.

    Tensor `t` has `numels[t]` elements, dense in memory from `address[t]` on, in chunks of
    `config.chunk_elements(itemsize)`. The map depends on `numels` only: tensors may move, or be missing, in any
    step. A step's calls are made on one stream; whoever changes it between steps has the new one wait for the old.

    Attributes:
        bits: the marks, int32 `[N, GENERATIONS]`, on the device: that of tensor `t` in generation `g` is at
            `[t, g % GENERATIONS]`; bit 0 is set for NaN, bit 1 for Inf, and above them is the generation. The first
            mark of a later generation replaces an earlier one.
        generation: the current one (int32, one element, on the device); 0 unless replaced by another tensor.
        n_chunks: programs in a launch over this table; 0 where no tensor has elements.
    """

    @torch.inference_mode(False)  # later steps write it outside that mode
    def __init__(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device, config: LaunchConfig = DEFAULT
    ) -> None:
        """Build the chunk map; no tensor has an address yet.

        Args:
            numels: elements of each tensor.
            dtype: fp16, bf16, fp32 or fp64.
            device: where the tensors lie; a GPU without an index is the current one.
            config: the shape of one program.
        """
        launcher.refuse_first_in_capture(device)
        device = launcher.indexed(device)
        self.dtype = dtype
        self.device = device
        self.config = config
        tensors, indices = _chunk_map(numels, config.chunk_elements(dtype.itemsize))
        self.n_chunks = len(tensors)
        self.chunk_tensors, self.chunk_indices = _sent(tensors, device), _sent(indices, device)
        self.numels = _sent(np.asarray(numels, dtype=np.int64), device)
        self.addresses = torch.zeros(len(numels), dtype=torch.int64, device=device)
        self.bits = torch.zeros((len(numels), GENERATIONS.value), dtype=torch.int32, device=device)
        self.generation = torch.zeros(1, dtype=torch.int32, device=device)
        self._size, self._last = len(numels), [0] * len(numels)
        # Cached: for few tensors, creating the view takes longer than writing to it.
        self._on_host: Any = self.addresses.numpy() if device.type == "cpu" else None
        self._staging = _Staging(len(numels), device) if self._on_host is None else None
        self._launches: dict[Any, launcher.Launch] = {}

    def set_addresses(self, addresses: list[int]) -> None:
        """Set the addresses of this step's tensors; nothing is copied if they are the same.

        Args:
            addresses: `data_ptr()` of each gradient, or 0 for a missing one, which is skipped.

        Raises: ValueError for another number of addresses; RuntimeError in a capture that has no buffer left.
        """
        if len(addresses) != self._size:
            raise ValueError(f"addresses: expected {self._size} of them, got {len(addresses)}")
        if addresses == self._last and not self._is_replayed():
            return
        self._last = []  # an interrupted copy may have arrived or not
        if self._staging is None:
            self._on_host[:] = addresses
        else:
            self._staging.send(addresses, self.addresses)
            if self._staging.captured and self not in _captured:
                _captured.append(self)
        self._last = list(addresses)

    @property
    def is_in_a_graph(self) -> bool:
        """Whether a graph writes this table at each replay."""
        return self._staging is not None and bool(self._staging.captured)

    def _is_replayed(self) -> bool:
        """Tell whether a graph writes or will write this table: then its content is not known here."""
        return self.is_in_a_graph or (self._staging is not None and self._staging.is_capturing())

    def launch(self, kernel: Any, *args: Tensor | int, **constants: Any) -> None:
        """Run `kernel` on the table and `args`, with one program per chunk; nothing if there are no chunks."""
        if self.n_chunks == 0:
            return
        key = (id(kernel), *constants.values())  # hashing the kernel itself takes longer than the launch
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._new_launch(kernel, constants)
        launch(self.n_chunks, *args)

    def _new_launch(self, kernel: Any, constants: dict[str, Any]) -> launcher.Launch:
        return launcher.Launch(
            kernel,
            self.device,
            fixed=(self.addresses, self.numels, self.chunk_tensors, self.chunk_indices, self.bits),
            num_warps=self.config.num_warps,
            DTYPE=launcher.TRITON_DTYPES[self.dtype],
            BLOCK_SIZE=self.config.block_elements(self.dtype.itemsize),
            UNROLL=self.config.unroll,
            **constants,
        )


class _Staging:
    """Pinned buffers for copying addresses to the device without a wait.

    A copy reads its buffer some time after `send` returns, so a buffer is reused only after the event behind its
    last copy; if the host is that far ahead, another buffer is allocated. A captured copy reads its buffer at every
    replay: it gets one of its own, allocated beforehand and never freed.
    """

    SPARE = 2  # for a captured step: gradients with gaps are copied twice when they are clipped, each time elsewhere

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._module = torch.get_device_module(device)
        self.is_capturing = launcher.capture_query(device)
        self._slots = [self._new_slot() for _ in range(2)]
        self._spare = [_pinned(size) for _ in range(self.SPARE)]
        self.captured: list[Tensor] = []

    def send(self, values: Sequence[int], out: Tensor) -> None:
        """Copy `values` to `out` (int64 `[size]`, on the device, overwritten) in the current stream's order."""
        if self.is_capturing():
            self._send_captured(values, out)
            return
        while len(self._spare) < self.SPARE:
            self._spare.append(_pinned(self._size))
        buffer, on_host, passed = self._idle_slot()
        on_host[:] = values
        with self._module.device(self._device):
            try:
                out.copy_(buffer, non_blocking=True)
            finally:  # an interrupt may come when the copy has begun
                passed.record()

    def _send_captured(self, values: Sequence[int], out: Tensor) -> None:
        if not self._spare:
            raise RuntimeError(
                f"the addresses of these gradients were captured {self.SPARE} times in a row: capture one step, then "
                "take one outside a capture before the next"
            )
        buffer = self._spare.pop()
        buffer.numpy()[:] = values
        out.copy_(buffer, non_blocking=True)
        self.captured.append(buffer)

    def _idle_slot(self) -> tuple[Tensor, np.ndarray, Any]:
        for slot in self._slots:
            if slot[-1].query():
                return slot
        self._slots.append(self._new_slot())
        return self._slots[-1]

    def _new_slot(self) -> tuple[Tensor, np.ndarray, Any]:
        buffer = _pinned(self._size)
        return buffer, buffer.numpy(), self._module.Event()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy on `device`, for which the host does not wait."""
    on_host = torch.from_numpy(array)
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def _chunk_map(numels: Sequence[int], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensor that each chunk belongs to and the chunk's index in it, both int32 `[n_chunks]`."""
    counts = -(-np.asarray(numels, dtype=np.int64) // chunk)
    tensors = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    indices = np.arange(len(tensors), dtype=np.int64) - np.repeat(first, counts)
    return tensors, indices.astype(np.int32)

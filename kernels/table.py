"""GradTable: the addresses of many tensors and a map of their chunks, so that one launch processes all of them."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaler_triton.kernels import abi, launch
from scaler_triton.kernels.config import DEFAULT, LaunchConfig

# The partial sums of a norm are padded to whole blocks of so many.
PARTIALS_BLOCK = 4096

# Tables that graphs read: kept for ever, as nothing says when a graph is destroyed.
_captured: list["GradTable"] = []


class GradTable:
    """Device-side addresses and chunk map of tensors that share a device and a dtype.

    Tensor `t` has `numels[t]` elements, dense in memory from `addresses[t]` on, in chunks of
    `config.chunk_elements(itemsize)`. The map depends on `numels` only: tensors may move, or be missing, in any
    step. A step's calls are made on one stream; whoever changes it between steps has the new one wait for the old.

    Attributes:
        addresses, numels: int64 `[N]`, on the device.
        chunk_tensors, chunk_indices: int32 `[n_chunks]`, on the device: the tensor of each chunk, its index in that.
        bits: the marks, int32 `[N, GENERATIONS]`, on the device, see `abi`. The first mark of a later generation
            replaces an earlier one in its place.
        generation: the current one (int32, one element, on the device); 0 unless replaced by another tensor.
        partials: a norm's partial sums: fp64, on the device, one per chunk, padded with zeros to whole blocks.
        weights: what each tensor's sum of squares is multiplied by: fp64 `[N]`, on the device, 1 at first.
        n_tensors, n_chunks: N, and the programs in a launch over this table; 0 where no tensor has elements.
        launches: what was launched over this table, by the launch function's own key.
    """

    @torch.inference_mode(False)  # later steps write it outside that mode
    def __init__(
        self, numels: Sequence[int], dtype: torch.dtype, device: torch.device, config: LaunchConfig = DEFAULT
    ) -> None:
        """Build the chunk map; no tensor has an address yet.

        Args:
            numels: elements of each tensor.
            dtype: fp16, bf16, fp32 or fp64.
            device: where the tensors lie, with its index.
            config: the shape of one program.
        """
        launch.refuse_first_in_capture(device)
        self.dtype, self.device, self.config = dtype, device, config
        tensors, indices = _chunk_map(numels, config.chunk_elements(dtype.itemsize))
        self.n_tensors, self.n_chunks = len(numels), len(tensors)
        self.chunk_tensors, self.chunk_indices = _sent(tensors, device), _sent(indices, device)
        self.numels = _sent(np.asarray(numels, dtype=np.int64), device)
        self.addresses = torch.zeros(len(numels), dtype=torch.int64, device=device)
        self.bits = torch.zeros((len(numels), abi.GENERATIONS), dtype=torch.int32, device=device)
        self.generation = torch.zeros(1, dtype=torch.int32, device=device)
        whole_blocks = -(-self.n_chunks // PARTIALS_BLOCK) * PARTIALS_BLOCK
        self.partials = torch.zeros(whole_blocks, dtype=torch.float64, device=device)
        self.weights = torch.ones(len(numels), dtype=torch.float64, device=device)
        self.launches: dict[Hashable, launch.Launch] = {}
        self._last = [0] * len(numels)  # the addresses on the device
        self._last_weights: list[float] | None = None
        # Cached: for few tensors, creating the view takes longer than writing to it.
        self._on_host: Any = self.addresses.numpy() if device.type == "cpu" else None
        self._staging = _Staging(len(numels), device) if self._on_host is None else None

    def set_addresses(self, addresses: list[int]) -> None:
        """Set the addresses of this step's tensors; nothing is copied if they are the same.

        Args:
            addresses: `data_ptr()` of each gradient, or 0 for a missing one, which is skipped.

        Raises: RuntimeError in a capture that has no buffer left.
        """
        staging = self._staging
        # What a graph writes, or will write, at each replay is not known here.
        if addresses == self._last and (staging is None or not (staging.captured or staging.is_capturing())):
            return
        self._last = []  # an interrupted copy may have arrived or not
        if staging is None:
            self._on_host[:] = addresses
        else:
            staging.send(addresses, self.addresses)
            if staging.captured and self not in _captured:
                _captured.append(self)
        self._last = list(addresses)

    @property
    def is_in_a_graph(self) -> bool:
        """Whether a graph writes this table at each replay."""
        return self._staging is not None and bool(self._staging.captured)

    @cached_property
    @torch.inference_mode(False)
    def measured(self) -> Tensor:
        """What a pass measures, four numbers a chunk (see `abi`): fp64, on the device."""
        launch.refuse_first_in_capture(self.device)
        return torch.zeros(self.n_chunks * abi.MEASURED, dtype=torch.float64, device=self.device)

    def set_weights(self, weights: list[float] | None) -> None:
        """Set the weights, one per tensor or None for 1; nothing is copied if they are the same."""
        if weights == self._last_weights:
            return
        launch.refuse_first_in_capture(self.device)
        wanted = [1.0] * self.n_tensors if weights is None else weights
        self._last_weights = []  # an interrupted copy may have arrived or not
        self.weights.copy_(torch.tensor(wanted, dtype=torch.float64, device="cpu"))
        self._last_weights = weights and list(weights)

    def add_launch(self, key: Hashable, kernel: Any, **constants: Any) -> launch.Launch:
        """Return a new Launch of a pass over this table, and keep it under `key`.

        Args:
            kernel: its first arguments are those of `read_table`.
        """
        self.launches[key] = made = launch.Launch(
            kernel,
            self.device,
            fixed=(self.addresses, self.numels, self.chunk_tensors, self.chunk_indices),
            num_warps=self.config.num_warps,
            DTYPE=launch.TRITON_DTYPES[self.dtype],
            BLOCK_SIZE=self.config.block_elements(self.dtype.itemsize),
            UNROLL=self.config.unroll,
            **constants,
        )
        return made


class _Staging:
    """Pinned buffers for copying addresses to the device without a wait.

    A copy reads its buffer some time after `send` returns, so a buffer is reused only after the event behind its
    last copy; if the host is that far ahead, another buffer is allocated. A captured copy reads its buffer at every
    replay: it gets one of its own, allocated beforehand and never freed.
    """

    SPARE = 2  # for a captured step, which may check and divide

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self.is_capturing = launch.capture_query(device)
        self._slots: list[tuple[Tensor, Any, torch.cuda.Event]] = []
        self._spare = [_pinned(size) for _ in range(self.SPARE)]
        self.captured: list[Tensor] = []

    def send(self, values: list[int], out: Tensor) -> None:
        """Copy `values` to `out` (int64 `[size]`, on the device, overwritten) in the current stream's order."""
        if self.is_capturing():
            if not self._spare:
                raise RuntimeError(
                    f"the addresses of these gradients were captured {self.SPARE} times in a row: capture one step, "
                    "then take one outside a capture before the next"
                )
            self.captured.append(buffer := self._spare.pop())
            buffer.numpy()[:] = values
            out.copy_(buffer, non_blocking=True)
            return
        while len(self._spare) < self.SPARE:
            self._spare.append(_pinned(self._size))
        slot = next((slot for slot in self._slots if slot[-1].query()), None)
        if slot is None:
            buffer = _pinned(self._size)
            slot = buffer, buffer.numpy(), torch.cuda.Event()
            self._slots.append(slot)
        buffer, on_host, passed = slot
        on_host[:] = values
        try:
            out.copy_(buffer, non_blocking=True)
        finally:  # an interrupt may come when the copy has begun
            passed.record(torch.cuda.current_stream(self._device))


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

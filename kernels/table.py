"""GradTable: the addresses of many tensors and a map of their chunks, so that one launch processes all of them."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaler_triton.kernels import abi, launch
from scaler_triton.kernels.config import DEFAULT, LaunchConfig

# How many lists of addresses a table keeps on the device: the gradients of most training loops alternate between two or
# three, as the allocator hands memory out, and a copy costs the host more than a launch.
KEPT = 4
SPARE = 2  # rows for a captured step, which may check and divide
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
        addresses, numels: int64 `[N]`, on the device; another tensor of addresses in each step.
        chunk_tensors, chunk_indices: int32 `[n_chunks]`, on the device: the tensor of each chunk, its index in that.
        bits: the marks, int32 `[N, GENERATIONS]`, on the device, see `abi`. The first mark of a later generation
            replaces an earlier one in its place.
        generation: the current one (int32, one element, on the device).
        partials: a norm's partial sums: fp64, on the device, one per chunk, padded with zeros to whole blocks.
        weights: what each tensor's sum of squares is multiplied by: fp64 `[N]`, on the device, 1 at first.
        n_tensors, n_chunks: N, and the programs in a launch over this table; 0 where no tensor has elements.
        captured: what graphs copy addresses to, and from, at each replay.
        launches: what was launched over this table, by the launch function's own key.
    """

    @torch.inference_mode(False)  # later steps write it outside that mode
    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        config: LaunchConfig = DEFAULT,
        generation: Tensor | None = None,
    ) -> None:
        """Build the chunk map; no tensor has an address yet.

        Args:
            numels: elements of each tensor.
            dtype: fp16, bf16, fp32 or fp64.
            device: where the tensors lie, with its index.
            config: the shape of one program.
            generation: with which kernels mark, int32, one element, on the device; None: 0.
        """
        launch.refuse_first_in_capture(device)
        self.dtype, self.device, self.config = dtype, device, config
        tensors, indices = _chunk_map(numels, config.chunk_elements(dtype.itemsize))
        self.n_tensors, self.n_chunks = len(numels), len(tensors)
        self.chunk_tensors, self.chunk_indices = _sent(tensors, device), _sent(indices, device)
        self.numels = _sent(np.asarray(numels, dtype=np.int64), device)
        even = len(numels) + len(numels) % 2  # all rows are aligned alike
        rows = torch.zeros((KEPT, even), dtype=torch.int64, device=device)[:, : len(numels)]
        self.addresses, *self._unused = rows.unbind()
        self.bits = torch.zeros((len(numels), abi.GENERATIONS), dtype=torch.int32, device=device)
        self.generation = torch.zeros(1, dtype=torch.int32, device=device) if generation is None else generation
        whole_blocks = -(-self.n_chunks // PARTIALS_BLOCK) * PARTIALS_BLOCK
        self.partials = torch.zeros(whole_blocks, dtype=torch.float64, device=device)
        self.weights = torch.ones(len(numels), dtype=torch.float64, device=device)
        self.launches: dict[Hashable, launch.Launch] = {}
        self._last_weights: list[float] | None = None
        self._known = {bytes(8 * len(numels)): self.addresses}  # rows, by the addresses in them
        self._is_capturing = launch.capture_query(device)
        self._spare: list[tuple[Tensor, Tensor]] = []
        self._make_spare()
        self.captured: list[tuple[Tensor, Tensor]] = []

    def set_addresses(self, addresses: Iterable[int]) -> None:
        """Set the addresses of this step's tensors; nothing is copied if they are those of one of the last steps.

        Args:
            addresses: `data_ptr()` of each gradient, or 0 for a missing one, which is skipped.

        Raises: RuntimeError in a capture that has no buffer left.
        """
        array = np.fromiter(addresses, np.int64, self.n_tensors)
        key = array.tobytes()  # half as expensive for a long list as a tuple that is made into an array
        known = self._known.get(key)
        if known is None or self._is_capturing():
            known = self._send(key, torch.from_numpy(array))
        self.addresses = known

    def _send(self, key: bytes, on_host: Tensor) -> Tensor:
        """Return a row with these addresses, copied in the current stream's order; the host does not wait.

        A captured copy reads its buffer, and writes its row, at each replay: both were made for it before, for good.
        """
        if self._is_capturing():
            if not self._spare:
                raise RuntimeError(
                    f"the addresses of these gradients were captured {SPARE} times in a row: capture one step, "
                    "then take one outside a capture before the next"
                )
            row, buffer = self._spare.pop()
            self.captured.append((row, buffer))
            if self not in _captured:
                _captured.append(self)
            self._unused += self._known.values()  # nothing is known, so that the next step makes spare ones
            self._known = {}
            row.copy_(buffer.copy_(on_host), non_blocking=True)
            return row
        if len(self._spare) < SPARE:
            self._make_spare()
        row = self._unused.pop() if self._unused else self._known.pop(next(iter(self._known)))  # the oldest one
        try:
            row.copy_(_pinned(on_host, self.device), non_blocking=True)
        except BaseException:  # whether the copy has arrived is unknown
            self._unused.append(row)
            raise
        self._known[key] = row
        return row

    @torch.inference_mode(False)
    def _make_spare(self) -> None:
        while len(self._spare) < SPARE:
            buffer = torch.zeros(self.n_tensors, dtype=torch.int64, device="cpu")
            self._spare.append((torch.zeros_like(buffer, device=self.device), _pinned(buffer, self.device)))

    def set_weights(self, weights: list[float] | None) -> None:
        """Set the weights, one per tensor or None for 1; nothing is copied if they are the same."""
        if weights == self._last_weights:
            return
        launch.refuse_first_in_capture(self.device)
        wanted = [1.0] * self.n_tensors if weights is None else weights
        self._last_weights = []  # an interrupted copy may have arrived or not
        self.weights.copy_(torch.tensor(wanted, dtype=torch.float64, device="cpu"))
        self._last_weights = weights and list(weights)

    def add_launch(self, key: Hashable, kernel: Any, *fixed: Tensor, **constants: Any) -> launch.Launch:
        """Return a new Launch of a pass over this table, and keep it under `key`.

        Args:
            kernel: its first arguments are this table's map, then `fixed`; those of each call begin with the addresses.
        """
        self.launches[key] = made = launch.Launch(
            kernel,
            self.device,
            fixed=(self.numels, self.chunk_tensors, self.chunk_indices, *fixed),
            num_warps=self.config.num_warps,
            DTYPE=launch.TRITON_DTYPES[self.dtype],
            BLOCK_SIZE=self.config.block_elements(self.dtype.itemsize),
            UNROLL=self.config.unroll,
            **constants,
        )
        return made


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the host from which a copy to `device` need not be waited for; it may be freed at once."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy on `device`, for which the host does not wait."""
    return _pinned(torch.from_numpy(array), device).to(device, non_blocking=True)


def _chunk_map(numels: Sequence[int], chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensor that each chunk belongs to and the chunk's index in it, both int32 `[n_chunks]`."""
    counts = -(-np.asarray(numels, dtype=np.int64) // chunk)
    tensors = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    indices = np.arange(len(tensors), dtype=np.int64) - np.repeat(first, counts)
    return tensors, indices.astype(np.int32)

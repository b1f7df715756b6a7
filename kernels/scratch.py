"""Scratch: tensors to try launch configurations on, and the results expected from torch."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from scaler_triton.kernels.launch_config import LaunchConfig
from scaler_triton.kernels.nonfinite import launch_check_nonfinite
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_unscale

ALIGNMENT = 512  # bytes, as torch's allocator aligns tensors
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Scratch:
    """One workload's tensors, with NaN between them, so that reads and writes past a tensor are detected.

    Attributes:
        nbytes: the size of the tensors.
    """

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate three times the workload; the values are always the same.

        Args:
            numels: elements of each tensor, at least one.
            dtype: fp16, fp32 or fp64.
            device: where the kernels run.
        """
        self.dtype, self.device, self.numels = dtype, device, list(numels)
        self.nbytes = sum(numels) * dtype.itemsize
        self._starts, size = _places(self.numels, ALIGNMENT // dtype.itemsize)
        self.original = torch.full((size,), float("nan"), dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(0)
        for view in self._views(self.original):
            view.copy_(torch.randn(view.shape, generator=generator, device=device, dtype=torch.float32))
        self.buffer = self.original.clone()
        self.spare = self.original.clone()
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)

    def launch_of(self, mode: str, config: LaunchConfig) -> Callable[[], None]:
        """Return a repeatable launch on the buffer: a scale of -1 has everything stored and never underflows."""
        self.reset(-1.0)
        return functools.partial(self._launch, mode, self._table(config))

    def problem(self, mode: str, config: LaunchConfig) -> str:
        """Return how a launch differs from torch, in words; empty if it does not."""
        table = self._table(config)
        self.reset(3.0)  # a third: every product is rounded
        self._launch(mode, table)
        if not _same_bits(self.buffer, self._thirds if mode == "unscale" else self.original):
            return "wrong values"
        if self.found_inf.item() != 0:
            return "finite values flagged"
        return next((text for tensor in {0, len(self.numels) - 1} if (text := self._missed(mode, table, tensor))), "")

    def reset(self, scale: float) -> None:
        """Restore the values, clear the flag and set the scale."""
        self.buffer.copy_(self.original)
        self.found_inf.zero_()
        self.scale.fill_(scale)

    def copy(self) -> None:
        """Copy the buffer, to measure the device's bandwidth."""
        self.spare.copy_(self.buffer)

    @functools.cached_property
    def _thirds(self) -> Tensor:
        wanted = self.original.clone()
        inv_scale = torch.tensor(3.0, dtype=torch.float64, device=self.device).reciprocal().float()
        wide = torch.promote_types(self.dtype, torch.float32)
        for view in self._views(wanted):
            view.copy_(view.to(wide) * inv_scale.to(wide))
        return wanted

    def _missed(self, mode: str, table: GradTable, tensor: int) -> str:
        """Return a description if an Inf in the last element of a tensor is missed."""
        self.reset(3.0)
        self.buffer[self._starts[tensor] + self.numels[tensor] - 1] = float("inf")
        self._launch(mode, table)
        return "" if self.found_inf.item() == 1 else "an Inf was missed"

    def _launch(self, mode: str, table: GradTable) -> None:
        if mode == "unscale":
            launch_unscale(table, self.scale, self.found_inf, inverse=False)
        else:
            launch_check_nonfinite(table, self.found_inf)

    def _table(self, config: LaunchConfig) -> GradTable:
        table = GradTable(self.numels, self.dtype, self.device, config)
        table.set_addresses([view.data_ptr() for view in self._views(self.buffer)])
        return table

    def _views(self, buffer: Tensor) -> Iterator[Tensor]:
        for start, numel in zip(self._starts, self.numels, strict=True):
            yield buffer[start : start + numel]


def _places(numels: Sequence[int], alignment: int) -> tuple[list[int], int]:
    """Return the first element of each tensor, with a gap before it and after it, and the elements in all."""
    starts, end = [], 0
    for numel in numels:
        starts.append((end // alignment + 1) * alignment)
        end = starts[-1] + numel
    return starts, end + alignment


def _same_bits(x: Tensor, y: Tensor) -> bool:
    bits = _BITS[x.element_size()]
    return torch.equal(x.view(bits), y.view(bits))

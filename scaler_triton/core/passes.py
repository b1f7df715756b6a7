"""The passes of every step over a batch, each a kernel or an op of torch's: check and unscale.

check:   found_inf = any gradient is NaN or Inf          reads every gradient
unscale: that, and g *= 1 / scale                        reads and writes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.core import torch_ops
from scaler_triton.core.dispatch import kernels
from scaler_triton.core.memory import fp32_on
from scaler_triton.core.plan import Batch, Layout
from scaler_triton.kernels.config import config_for

if TYPE_CHECKING:
    from scaler_triton.kernels.table import GradTable


Pass = Callable[[Any], object]  # what a look does with all gradients of one layout, a sequence of tensors


def unscale_batch_(
    batch: Batch, scale: Tensor, found_inf: Tensor, *, inverse: bool = False, filled: bool = False
) -> None:
    """Multiply a batch by 1 / scale, and set `found_inf` to 1 if a gradient was not finite before.

    Args:
        batch: written; its backend is chosen.
        scale: one element, any device; with `inverse` it is 1 / scale.
        found_inf: fp32, one element, the batch's device.
        filled: whether the last such pass over this layout was over these very tensors, where they are now.
    """
    layout, by_torch = batch.layout, batch.layout.backend == "torch"
    factor = torch_ops.inverse(scale) if by_torch and not inverse else scale
    if factor.device != layout.device or factor.dtype is not torch.float32:
        factor = fp32_on(layout.device, factor)
    if by_torch:
        torch_ops.unscale_(batch.present, factor, found_inf)
    else:
        kernels().unscale.launch_unscale(table_of(batch, "unscale", filled=filled), factor, found_inf, inverse=inverse)


def check_batch(batch: Batch, found_inf: Tensor, *, filled: bool = False) -> None:
    """Set `found_inf` to 1 if a gradient is not finite; arguments as of `unscale_batch_`, the batch is read only."""
    if batch.layout.backend == "torch":
        torch_ops.check(batch.present, found_inf)
    else:
        kernels().unscale.launch_check(table_of(batch, "check", filled=filled), found_inf)


def bind_unscale(layout: Layout, scale: Tensor, found_inf: Tensor) -> Pass | None:
    """Return a function that does what `unscale_batch_` does with all gradients of a layout; None: there is none.

    Args:
        layout: its backend is chosen.
        scale: one element, fp32, on the layout's device; read at each call.
        found_inf: as of `unscale_batch_`.
    """
    if layout.backend == "torch":
        if not torch_ops.serves(layout.device.type == "cpu", layout.key.dtype):
            return None
        return lambda tensors: torch._amp_foreach_non_finite_check_and_unscale_(
            tensors,
            found_inf,
            torch_ops.inverse(scale),
        )
    return _bind_launch(layout, "unscale", found_inf, scale)


def bind_check(layout: Layout, found_inf: Tensor) -> Pass | None:
    """Return a function that does what `check_batch` does with all gradients of a layout; None: there is none."""
    if layout.backend == "torch":
        if not torch_ops.serves(layout.device.type == "cpu", layout.key.dtype):
            return None
        one = torch_ops.constants(found_inf, torch.float32, 1.0)
        return lambda tensors: torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, one)
    return _bind_launch(layout, "check", found_inf, found_inf)


def _bind_launch(layout: Layout, mode: str, found_inf: Tensor, scale: Tensor) -> Pass:
    table = _table_for(layout, mode)
    launch, n_chunks = kernels().unscale.launch_of(table, mode), table.n_chunks

    def run(tensors: Sequence[Tensor]) -> None:
        table.set_addresses(map(Tensor.data_ptr, tensors))
        if n_chunks:
            launch(n_chunks, table.addresses, found_inf, scale)

    return run


def table_of(batch: Batch, mode: str, *, filled_by: str = "", filled: bool = False) -> GradTable:
    """Return the kernels' table for a pass over a batch, with the addresses of its gradients.

    They are there already if it is `filled`, or is that of the pass `filled_by`, which has just read the batch.
    """
    layout, present = batch.layout, batch.present
    table = _table_for(layout, mode)
    if filled or table is layout.tables.get(filled_by):
        return table
    if present is batch.tensors:
        table.set_addresses(map(Tensor.data_ptr, present))
    else:
        table.set_addresses(0 if tensor is None else tensor.data_ptr() for tensor in batch.tensors)
    return table


def _table_for(layout: Layout, mode: str) -> GradTable:
    """Return a layout's table for a pass, perhaps that of another pass with an equal launch configuration."""
    table = layout.tables.get(mode)
    if table is None:
        key = layout.key
        config = config_for(key.device, mode, key.dtype.itemsize, layout.numels)
        table = next((each for each in layout.tables.values() if each.config == config), None)
        if table is None:
            skip_count = None if layout.skip_count is None else layout.skip_count()
            table = kernels().table.GradTable(layout.numels, key.dtype, key.device, config, skip_count)
        layout.tables[mode] = table
    return table

"""The passes of every step over a batch, each a kernel or an op of torch's: check and unscale.

check:   found_inf = any gradient is NaN or Inf          reads every gradient
unscale: that, and g *= 1 / scale                        reads and writes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton.core import torch_ops
from scaler_triton.core.dispatch import kernels
from scaler_triton.core.memory import fp32_on
from scaler_triton.core.plan import Batch, Layout
from scaler_triton.kernels.config import config_for

if TYPE_CHECKING:
    from scaler_triton.kernels.table import GradTable


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


def table_of(batch: Batch, mode: str, *, filled_by: str = "", filled: bool = False) -> GradTable:
    """Return the kernels' table for a pass over a batch, with the addresses of its gradients.

    They are there already if it is `filled`, or is that of the pass `filled_by`, which has just read the batch.
    """
    layout, present = batch.layout, batch.present
    table = layout.tables.get(mode)
    if table is None:
        table = layout.tables[mode] = _new_table(layout, mode)
    if filled or table is layout.tables.get(filled_by):
        return table
    if present is batch.tensors:
        table.set_addresses(map(Tensor.data_ptr, present))
    else:
        table.set_addresses(0 if tensor is None else tensor.data_ptr() for tensor in batch.tensors)
    return table


def _new_table(layout: Layout, mode: str) -> GradTable:
    """Return a table for a pass over a layout, perhaps another pass's with an equal launch configuration."""
    key = layout.key
    config = config_for(key.device, mode, key.dtype.itemsize, layout.numels)
    for table in layout.tables.values():
        if table.config == config:
            return table
    skip_count = None if layout.skip_count is None else layout.skip_count()
    made: GradTable = kernels().table.GradTable(layout.numels, key.dtype, key.device, config, skip_count)
    return made

"""The passes over a plan's batches: measure, check, unscale, norm, clip. Each is a kernel or an op of torch's.

measure: [largest, zeros, subnormals, elements], see `headroom.py`    reads every gradient, where it is asked for
check:   found_inf = any gradient is NaN or Inf                       reads
unscale: that, and g *= 1 / scale                                     reads and writes
norm:    that of check, and totals = [sum of squares, ...]            reads
clip:    g *= 1 / scale; g *= coef(totals)                            reads and writes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton.core import torch_ops
from scaler_triton.core.dispatch import kernels
from scaler_triton.core.flag import Flag, Flags, fp32_on
from scaler_triton.core.plan import Batch, GradPlan, Layout
from scaler_triton.kernels.abi import OVERFLOWS, TOTALS
from scaler_triton.kernels.config import config_for

if TYPE_CHECKING:
    from scaler_triton.kernels.table import GradTable


def check(
    plan: GradPlan,
    batches: Sequence[Batch],
    scale: Tensor,
    flag: Flag,
    *,
    divide: bool = False,
    inverse: bool = False,
    weights: Sequence[list[float] | None] | None = None,
) -> tuple[Flags, list[Tensor]]:
    """Check every gradient in one pass, which may also divide all but Partial ones by the scale, or give the norm.

    A flag that measures has all but Partial ones measured before that, as they are.
    Afterwards `plan.written` says whether an error came after a write, `plan.marks` which gradients were not finite.

    Args:
        batches: what `plan.collect` returned.
        scale: one element, on the device of `flag`; with `inverse` it is 1 / scale.
        weights: of the norm, for each batch as of `norm_batch`; None: no norm.

    Returns: the flag of each device that holds gradients: on the device of `flag` its `found_inf`; and with `weights`
        each batch's totals, on the device of `flag`.
    """
    flags: Flags = {}
    totals: list[Tensor] = []
    for batch in batches:
        layout = batch.layout
        device, on_torch = layout.device, (layout.backend if weights is None else layout.clips) == "torch"
        at_home = device == flag.device
        found_inf = flags.get(device)
        if found_inf is None:
            found_inf = flags[device] = flag.found_inf if at_home else torch.zeros_like(flag.found_inf, device=device)
        to_be_marked = on_torch and layout.marked_on_host
        if not on_torch and layout.counters is not plan.marks.counters.values:
            plan.marks.follow(layout, flag.device)
        if flag.measured is not None and not batch.is_partial:
            measure_batch(batch, flag.measured)
        if weights is not None:
            here = fp32_on(device, scale)
            total = norm_batch(batch, here, found_inf, weights[len(totals)])
            totals.append(torch_ops.wide_on(flag.device, total))
        elif not divide or batch.is_partial:
            check_batch(batch, found_inf)
        else:
            here = scale if at_home and (on_torch or scale.dtype is torch.float32) else fp32_on(device, scale)
            if on_torch and not inverse:
                here = torch_ops.inverse(here)
            if to_be_marked and abs(here.item()) > 1.0:
                # Unscaling may make finite gradients infinite, which is no overflow: mark before it.
                check_batch(batch, found_inf)
                if found_inf.item():
                    plan.marks.mark_on_host(batch)
                to_be_marked = False
            plan.written = True
            if on_torch:
                torch_ops.unscale_(batch.present, here, found_inf)
            else:
                unscale_batch_(batch, here, found_inf, inverse=inverse)
        if to_be_marked and (flag.is_set() if at_home else found_inf.item()):
            plan.marks.mark_on_host(batch)
    return flags, totals


def measure_batch(batch: Batch, measured: Tensor) -> None:
    """Add the largest finite gradient, zeros, fp16 subnormals and elements of a batch to `measured`.

    Args:
        batch: read only; its backend is chosen.
        measured: as `torch_ops.measure` takes it, but on any device; mutated.
    """
    layout = batch.layout
    at_home = layout.device == measured.device
    here = measured if at_home else torch_ops.wide_on(layout.device, torch.zeros_like(measured))
    if layout.backend == "torch":
        torch_ops.measure(batch.present, here)
    else:
        kernels().measure.launch_measure(_filled(batch, "measure"), here)
    if not at_home:
        torch_ops.combine_(measured, torch_ops.wide_on(measured.device, here))


def unscale_batch_(batch: Batch, scale: Tensor, found_inf: Tensor, *, inverse: bool) -> None:
    """Multiply a batch by 1 / scale, and set `found_inf` to 1 if a gradient was not finite before.

    Args:
        batch: written; its backend is chosen.
        scale, found_inf: fp32, one element, the batch's device; with `inverse` the scale is 1 / scale.
    """
    if batch.layout.backend == "torch":
        torch_ops.unscale_(batch.present, scale if inverse else torch_ops.inverse(scale), found_inf)
        return
    kernels().unscale.launch_unscale(_filled(batch, "unscale"), scale, found_inf, inverse=inverse)


def check_batch(batch: Batch, found_inf: Tensor) -> None:
    """Set `found_inf` to 1 if a gradient is not finite; the batch is read only. Arguments as of `unscale_batch_`."""
    if batch.layout.backend == "torch":
        torch_ops.check(batch.present, found_inf)
        return
    kernels().unscale.launch_check(_filled(batch, "check"), found_inf)


def norm_batch(batch: Batch, scale: Tensor, found_inf: Tensor, weights: list[float] | None) -> Tensor:
    """Check a batch, and return the weighted sum of its squares as if it were unscaled; the batch is read only.

        squares = sum(w * (grad.double() * inv_scale).square().sum() for grad, w in zip(batch.tensors, weights))
        totals = [squares, found_inf, 0, scale, 1 / scale]    # in the order of `kernels.abi`; may be summed

    Args:
        scale, found_inf: as `unscale_batch_` takes them.
        weights: for each slot of the layout 1 / the number of ranks that hold the gradient; None: 1 for all.

    Returns: totals, fp64 [TOTALS], on the batch's device; fp32 if that has no fp64.
    """
    layout = batch.layout
    if layout.clips == "torch":
        if weights is not None:
            weights = [weight for tensor, weight in zip(batch.tensors, weights, strict=True) if tensor is not None]
        wide = torch_ops.wide_dtype(layout.device)
        factor = scale.to(wide).reshape(())
        inv_scale = torch_ops.inverse(factor).to(wide)
        if wide is torch.float64:
            squares = torch_ops.sum_of_squares(batch.present, found_inf, weights) * inv_scale * inv_scale
        else:
            squares = torch_ops.sum_of_squares_in_fp32(batch.present, inv_scale, found_inf, weights)
        failures = torch.zeros_like(squares)
        return torch.stack([squares, found_inf.to(wide).reshape(()), failures, factor, factor.reciprocal()])
    table = _filled(batch, "norm")
    table.set_weights(weights)
    totals = torch.empty(TOTALS, dtype=torch.float64, device=layout.device)
    kernels().norm.launch_sum_of_squares(table, scale, found_inf, totals)
    return totals


def clip_batch_(
    batch: Batch, scale: Tensor, totals: Tensor, max_norm: float, status: Tensor | None, ranks: int
) -> tuple[Tensor, bool]:
    """Unscale a batch, then multiply it by the clip coefficient, to the bit as `kernels.clip.launch_clip` says.

    Args:
        batch: written; the last one of its layout that `norm_batch` read.
        scale: fp32, one element, the batch's device.
        totals: fp64 [TOTALS], the batch's device: the sum of what `norm_batch` returned, on `ranks` ranks.
        status: fp32 [STATUS], the batch's device; a kernel computes it from the totals unless it is None.

    Returns: the norm, fp32, `()`, on the batch's device; whether the status was written.
    """
    layout = batch.layout
    if layout.clips == "torch":
        norm = torch_ops.norm_of(totals)
        coef = torch_ops.coefficient(totals[OVERFLOWS], norm, max_norm)
        torch_ops.clip_(batch.present, torch_ops.inverse(scale), coef)
        return norm, False
    table = _filled(batch, "clip")
    if not table.n_chunks:
        return torch_ops.norm_of(totals), False
    norm = torch.empty((), dtype=torch.float32, device=layout.device)
    kernels().clip.launch_clip(table, scale, totals, max_norm, norm, status, ranks)
    torch_ops.increment_version(batch.present)  # as `torch._foreach_mul_` does, unlike the op that unscales
    return norm, status is not None


def _filled(batch: Batch, mode: str) -> GradTable:
    """Return the kernels' table for a pass over a batch, with the addresses of its gradients."""
    layout, present = batch.layout, batch.present
    table = layout.tables.get(mode)
    if table is None:
        table = layout.tables[mode] = _new_table(layout, mode)
    if mode == "clip" and table is layout.tables.get("norm"):
        return table  # the norm's pass has filled it
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
    made: GradTable = kernels().table.GradTable(layout.numels, key.dtype, key.device, config)
    if layout.generation is not None:
        made.mark_with(layout.generation)
    return made

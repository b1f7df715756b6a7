"""The ops on batches for clipping: the sum of squares, and unscaling and clipping by a known norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton import batch_ops
from scaler_triton.batch import Batch
from scaler_triton.clipping import reference_clip, reference_norm
from scaler_triton.dispatch import Backend

if TYPE_CHECKING:
    from scaler_triton.verdict import Verdict


def sum_of_squares_batch(
    batch: Batch,
    factor: Tensor,
    found_inf: Tensor,
    weights: Sequence[float] | None,
    backend: Backend,
    *,
    inverse: bool,
) -> Tensor:
    """Return the weighted sum of squares of a batch as if it were unscaled, and flag what is not finite in it.

        squares = sum(w * (grad.double() * inv_scale).square().sum() for grad, w in zip(batch.tensors, weights))
        totals = [squares, found_inf, 0, factor, 1 / factor]    # in the order of `reference_norm`; may be summed

    Args:
        batch: read only.
        factor: fp32, one element, the batch's device: `inv_scale` if `inverse`, else the scale itself.
        found_inf: fp32, one element, the batch's device; set to 1.0 on overflow, else left as it is.
        weights: for each slot of the batch's layout 1 / the number of ranks that hold the gradient; None: 1 for all.
            New weights are copied to the device.
        inverse: see `factor`.

    Returns: totals, fp64, [5], on the batch's device.
    """
    if backend == "torch":
        return _reference_totals(batch, factor, found_inf, weights, inverse)
    dense = batch_ops.dense_batch(batch)  # kept until the launch: an address keeps nothing alive
    table = batch_ops.filled_table(dense, "check")
    table.set_weights(weights)
    totals = torch.empty(reference_norm.COLUMNS, dtype=torch.float64, device=batch.layout.key.device)
    batch_ops.kernels().norm.launch_sum_of_squares(table, factor, found_inf, totals, inverse=inverse)
    return totals


def clip_batch_(
    batch: Batch,
    scale: Tensor,
    totals: Tensor,
    max_norm: float,
    backend: Backend,
    verdict: Verdict | None = None,
) -> Tensor:
    """Unscale a batch, then multiply it by the clip coefficient: two products, each rounded.

        norm = totals[0].sqrt().float()
        coef = 1.0 if totals[1] else (max_norm / (norm + 1e-6)).clamp(max=1.0)

    Equivalent PyTorch: `torch._amp_foreach_non_finite_check_and_unscale_(grads, ignored, inv_scale)`, then
    `torch._foreach_mul_(grads, coef)` as on the CPU.

    Args:
        batch: written; of its layout the last one that `sum_of_squares_batch` read.
        scale: fp32, one element, the batch's device.
        totals: fp64, [5], the batch's device: the sum of what `sum_of_squares_batch` returned.
        max_norm: >= 0.
        verdict: on the batch's device; the kernel, if one is launched, writes its status.

    Returns: the norm, fp32, `()`, on the batch's device.
    """
    if backend == "torch":
        norm, coef = reference_clip.norm_and_coefficient(totals, max_norm)
        _reference_clip_(batch, batch.layout.inverse.of(scale), coef)
        return norm
    dense = batch_ops.dense_batch(batch)
    table = batch_ops.filled_table(dense, "unscale", after="check" if dense is batch else None)
    if table.n_chunks:
        norm = torch.empty((), dtype=torch.float32, device=table.device)
        status = () if verdict is None else verdict.leave_to_kernel()
        batch_ops.kernels().clip.launch_clip(table, scale, totals, max_norm, norm, *status)
    else:
        norm = reference_norm.norm_of(totals)
    batch_ops.copy_back(dense, batch)
    torch.autograd.graph.increment_version(batch.present)  # as `torch._foreach_mul_` does, unlike the op that unscales
    return norm


def deferred(
    totals: Tensor, scale: Tensor, max_norm: float, backend: Backend, verdict: Verdict
) -> tuple[Tensor, Tensor]:
    """Return the norm, and the `grad_scale` by which an optimizer unscales and clips at once: scale / coef.

    Args:
        totals: fp64, [5]: as for `clip_batch_`, which also defines norm and coef.
        scale: one element, on the same device.
        max_norm: >= 0.
        backend: what `dispatch.choose_for_scale` returned.
        verdict: the kernel, if one is launched, writes its status.

    Returns: fp32, `()`, twice.
    """
    if backend == "torch":
        norm, coef = reference_clip.norm_and_coefficient(totals, max_norm)
        return norm, scale.reshape(()) / coef
    norm, factor = (torch.empty((), dtype=torch.float32, device=totals.device) for _ in range(2))
    batch_ops.kernels().clip.launch_defer(scale, totals, max_norm, norm, factor, *verdict.leave_to_kernel())
    return norm, factor


def _reference_totals(
    batch: Batch, factor: Tensor, found_inf: Tensor, weights: Sequence[float] | None, inverse: bool
) -> Tensor:
    inv_scale = factor if inverse else batch.layout.inverse.of(factor)
    if weights is not None:
        weights = [weight for tensor, weight in zip(batch.tensors, weights, strict=True) if tensor is not None]
    if batch.layout.key.plain and inv_scale.is_cpu:
        total = reference_norm.sum_on_host(batch.present, found_inf, weights)
        inv, scale = inv_scale.item(), factor.item()
        numbers = (total * inv * inv, found_inf.item(), 0.0, scale, 1.0 / scale if scale else math.inf)
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")
    if batch.layout.key.plain:
        squares = reference_norm.sum_one_by_one(batch.present, found_inf, weights)
    else:  # tensor subclasses implement torch's ops themselves
        batch_ops.check_batch(batch, found_inf, "torch")
        squares = reference_norm.sum_one_by_one(batch.present, torch.zeros_like(found_inf), weights)
    inv_scale, factor, flag = (number.double().reshape(()) for number in (inv_scale, factor, found_inf))
    squares = squares * inv_scale * inv_scale
    return torch.stack([squares, flag, torch.zeros_like(squares), factor, factor.reciprocal()])


def _reference_clip_(batch: Batch, inv_scale: Tensor, coef: Tensor) -> None:
    if batch.layout.key.plain:
        reference_clip.clip_(batch.present, inv_scale, coef, batch.neighbours)
    else:
        tensors = list(batch.present)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.zeros_like(inv_scale), inv_scale)
        torch._foreach_mul_(tensors, coef.reshape(()))

"""The look that clipping takes: the sum of squares of all gradients, each shard counted once.

norm: found_inf = any gradient is NaN or Inf; totals = [sum of squares, found_inf, ...]    reads every gradient
clip: g *= 1 / scale; g *= coef(totals)                                                    reads and writes
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scaler_triton.clipping import torch_ops
from scaler_triton.clipping.replicas import replicas_of
from scaler_triton.core import gradients
from scaler_triton.core.dispatch import choose, kernels
from scaler_triton.core.flag import Flag
from scaler_triton.core.look import Look
from scaler_triton.core.memory import fp32_on
from scaler_triton.core.message import write_scales
from scaler_triton.core.passes import table_of
from scaler_triton.core.plan import Batch, GradPlan, Layout
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.torch_ops import increment_version, inverse, wide_dtype, wide_on
from scaler_triton.kernels.abi import OVERFLOWS, SCALES, TOTALS


class Norm(Look):
    """totals = [sum(abs(g / scale) ** 2 / replicas), found_inf, ...], of all optimizers that are clipped together.

    Args:
        device: the scale's.
        model: as of `replicas_in`.
        guess: as of `replicas_in`.
    """

    n_sums = 0  # it gives the message's own numbers

    def __init__(self, device: torch.device, model: nn.Module | None = None, *, guess: bool = False) -> None:
        self.device, self._model, self._guess = device, model, guess
        self._every: list[Tensor] = []  # of each batch
        self._scale: Any = None
        self._peers: Ranks | None = None

    def begin(
        self, plan: GradPlan, parameters: Sequence[Tensor], peers: Ranks | None, flag: Flag, scale: Tensor
    ) -> None:
        """Prepare the weights, by which each shard counts once."""
        self._plan, self._parameters, self._requested = plan, parameters, plan.requested
        self._replicas = replicas_in(plan, parameters, peers, self._model, guess=self._guess)
        self._counts: Sequence[int] | None = None  # of the gradients, which backward may shard differently
        self._scale, self._peers = scale, peers

    def run(self, batch: Batch, scale: Tensor, flag: Flag) -> None:
        """Add a batch's sum of squares."""
        device = batch.layout.device
        if self._counts is None:
            self._counts = self._replicas_of_gradients()
        weights = _weights(batch, self._counts)
        total = norm_batch(batch, fp32_on(device, scale), flag.found_inf_on(device), weights, self._requested)
        self._every.append(wide_on(self.device, total))

    @property
    def totals(self) -> Tensor:  # type: ignore[override]
        """This rank's totals, `wide_dtype` [TOTALS], on the scale's device; the same tensor at each call."""
        if len(self._every) != 1:
            if self._every:
                summed = torch.stack(self._every).sum(0)
            else:
                summed = torch.zeros(TOTALS, dtype=wide_dtype(self.device), device=self.device)
            if self._peers is not None:  # nobody else compares them
                write_scales(summed[SCALES:], self._scale)
            self._every = [summed]
        return self._every[0]  # a batch's hold the scale

    def _replicas_of_gradients(self) -> Sequence[int]:
        grad_shards = self._plan.grad_shards
        if not grad_shards:
            return self._replicas  # the same list: see `_weights`
        counts = list(self._replicas)
        for index, shards in grad_shards.items():
            counts[index] = counts[index] * gradients.num_shards(self._parameters[index]) // shards
        return counts


def replicas_in(
    plan: GradPlan, parameters: Sequence[Tensor], peers: Ranks | None, model: nn.Module | None, *, guess: bool = False
) -> list[int]:
    """Return `replicas_of` the plan's parameters, which the plan keeps; to `guess`, those of any model will do."""
    key = (peers, None if model is None else weakref.ref(model), guess)
    entry = plan.notes.get("replicas")
    if entry is None or (entry[0] != key and not (guess and entry[0][0] == peers)):
        entry = plan.notes["replicas"] = key, replicas_of(parameters, peers, model, guess=guess)
    replicas: list[int] = entry[1]
    return replicas


def _weights(batch: Batch, replicas: Sequence[int]) -> list[float] | None:
    """Return 1 / replicas for each gradient, None if all are 1; the same list as long as `replicas` is the same."""
    layout = batch.layout
    entry = layout.notes.get("weights")
    if entry is None or entry[0] is not replicas:
        weights = [1.0 / replicas[position] for position in layout.positions]
        entry = layout.notes["weights"] = replicas, None if set(weights) <= {1.0} else weights
    of_batch: list[float] | None = entry[1]
    return of_batch


def backend_of(layout: Layout, requested: str) -> str:
    """Return the backend of norms and clipping, which is chosen once; that of checks is known."""
    backend: str | None = layout.notes.get("clipping")
    if backend is None:
        by_torch = layout.backend == "torch"
        key = layout.key
        backend = "torch" if by_torch else choose(key.device, key.dtype, requested, task="clipping")
        layout.notes["clipping"] = backend
    return backend


def norm_batch(
    batch: Batch,
    scale: Tensor,
    found_inf: Tensor,
    weights: list[float] | None,
    requested: str = "auto",
    *,
    filled: bool = False,
) -> Tensor:
    """Check a batch, and return the weighted sum of its squares as if it were unscaled; the batch is read only.

        squares = sum(w * (grad.double() * inv_scale).square().sum() for grad, w in zip(batch.tensors, weights))
        totals = [squares, found_inf, 0, scale, 1 / scale]    # in the order of `kernels.abi`; may be summed

    Args:
        scale, found_inf: fp32, one element, the batch's device.
        weights: for each slot of the layout 1 / the number of ranks that hold the gradient; None: 1 for all.
        requested: the backend.
        filled: as of `unscale_batch_`.

    Returns: totals, fp64 [TOTALS], on the batch's device; fp32 if that has no fp64.
    """
    layout = batch.layout
    if backend_of(layout, requested) == "torch":
        if weights is not None:
            weights = [weight for tensor, weight in zip(batch.tensors, weights, strict=True) if tensor is not None]
        if torch_ops.is_on_host(scale, found_inf):
            return _totals_on_host(batch.present, scale, found_inf, weights)
        wide = wide_dtype(layout.device)
        factor = scale.to(wide).reshape(())
        inv_scale = inverse(factor).to(wide)
        if wide is torch.float64:
            squares = torch_ops.sum_of_squares(batch.present, found_inf, weights) * inv_scale * inv_scale
        else:
            squares = torch_ops.sum_of_squares_in_fp32(batch.present, inv_scale, found_inf, weights)
        failures = torch.zeros_like(squares)
        return torch.stack([squares, found_inf.to(wide).reshape(()), failures, factor, factor.reciprocal()])
    table = table_of(batch, "norm", filled=filled)
    table.set_weights(weights)
    totals = torch.empty(TOTALS, dtype=torch.float64, device=layout.device)
    kernels().norm.launch_sum_of_squares(table, scale, found_inf, totals)
    return totals


def _totals_on_host(
    tensors: Sequence[Any], scale: Tensor, found_inf: Tensor, weights: Sequence[float] | None
) -> Tensor:
    number, inv_scale = scale.item(), inverse(scale).item()
    squares = torch_ops.sum_of_squares(tensors, found_inf, weights).item() * inv_scale * inv_scale
    totals = squares, found_inf.item(), 0.0, number, 1 / number if number else math.inf
    return torch.from_numpy(np.array(totals))


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
    if layout.notes["clipping"] == "torch":
        norm = torch_ops.norm_of(totals)
        coef = torch_ops.coefficient(totals[OVERFLOWS], norm, max_norm)
        torch_ops.clip_(batch.present, inverse(scale), coef)
        return norm, False
    table = table_of(batch, "clip", filled_by="norm")
    if not table.n_chunks:
        return torch_ops.norm_of(totals), False
    norm = torch.empty((), dtype=torch.float32, device=layout.device)
    kernels().clip.launch_clip(table, scale, totals, max_norm, norm, status, ranks)
    increment_version(batch.present)  # as `torch._foreach_mul_` does, unlike the op that unscales
    return norm, status is not None

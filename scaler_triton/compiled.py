"""The ops for compiled callers: custom ops, which Dynamo puts into its graph and never looks into.

Imported when the first function that calls one of the ops is traced: a custom op costs something a call and something
a tensor, which nobody else shall pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scaler_triton import ops
from scaler_triton.batch import local_tensor
from scaler_triton.clipping import norms

# A kernel's table of addresses may be filled anew at every call, so inductor's own CUDA graphs go around the ops.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("scaler_triton::unscale_", mutates_args=("grads", "found_inf"), tags=_TAGS)
def _unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, backend: str | None) -> None:
    ops.unscale_(grads, inv_scale, found_inf, backend=backend)


@torch.library.custom_op("scaler_triton::check_nonfinite", mutates_args=("found_inf",), tags=_TAGS)
def _check_nonfinite(grads: Sequence[Tensor], found_inf: Tensor, backend: str | None) -> None:
    ops.check_nonfinite(grads, found_inf, backend=backend)


@torch.library.custom_op("scaler_triton::update_scale_", mutates_args=("scale", "growth_tracker"), tags=_TAGS)
def _update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    backend: str | None,
) -> None:
    numbers = growth_factor, backoff_factor, growth_interval
    ops.update_scale_(scale, growth_tracker, found_inf, *numbers, backend=backend)


@torch.library.custom_op("scaler_triton::grad_norm", mutates_args=("found_inf",), tags=_TAGS)
def _grad_norm(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, norm_type: float, backend: str | None
) -> Tensor:
    return norms.grad_norm(grads, found_inf, inv_scale=inv_scale, norm_type=norm_type, backend=backend)


@_grad_norm.register_fake
def _(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, norm_type: float, backend: str | None
) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=_home(grads))


def _home(grads: Sequence[Tensor]) -> torch.device:
    return grads[0].device if len(grads) else torch.device("cpu")


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, backend: str | None = None) -> None:
    """`ops.unscale_` within a graph; what it raises comes when the graph runs."""
    _unscale_([local_tensor(grad) for grad in grads], inv_scale, found_inf, backend)


def check_nonfinite(grads: Sequence[Tensor], found_inf: Tensor, *, backend: str | None = None) -> None:
    """`ops.check_nonfinite` within a graph; what it raises comes when the graph runs."""
    _check_nonfinite([local_tensor(grad) for grad in grads], found_inf, backend)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    backend: str | None = None,
) -> None:
    """`ops.update_scale_` within a graph; what it raises comes when the graph runs."""
    _update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, backend)


def grad_norm(
    grads: Sequence[Tensor],
    found_inf: Tensor | None = None,
    *,
    inv_scale: Tensor | None = None,
    norm_type: float = 2.0,
    backend: str | None = None,
) -> Tensor:
    """`ops.grad_norm` within a graph; what it raises comes when the graph runs."""
    if found_inf is None:  # inductor takes no None where an op that returns something may write
        found_inf = torch.zeros((), dtype=torch.float32, device=_home(grads))
    norm: Tensor = _grad_norm([local_tensor(grad) for grad in grads], found_inf, inv_scale, norm_type, backend)
    return norm

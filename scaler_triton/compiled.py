"""The ops for compiled callers: custom ops, which Dynamo puts into its graph without tracing into them.

Imported when a function that calls one of the ops is traced: a custom op has host costs per call and per tensor, which
eager callers need not pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scaler_triton import ops
from scaler_triton.batch import first_device

# Each call may write a table of addresses, so inductor must not capture the ops in its own CUDA graphs.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("scaler_triton::unscale_", mutates_args=("grads", "found_inf"), tags=_TAGS)
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, backend: str | None) -> None:
    ops.unscale_(grads, inv_scale, found_inf, backend=backend)


@torch.library.custom_op("scaler_triton::check_nonfinite", mutates_args=("found_inf",), tags=_TAGS)
def check_nonfinite(grads: Sequence[Tensor], found_inf: Tensor, backend: str | None) -> None:
    ops.check_nonfinite(grads, found_inf, backend=backend)


@torch.library.custom_op("scaler_triton::update_scale_", mutates_args=("scale", "growth_tracker"), tags=_TAGS)
def update_scale_(
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
def grad_norm(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, norm_type: float, backend: str | None
) -> Tensor:
    return ops.grad_norm(grads, found_inf, inv_scale=inv_scale, norm_type=norm_type, backend=backend)


@grad_norm.register_fake
def _(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, norm_type: float, backend: str | None
) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=first_device(grads))

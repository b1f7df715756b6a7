"""The two scalers that are compared, ready for their first `unscale_`."""

from typing import Any

import torch
from torch import Tensor

import scaler_triton

SCALE = 2.0**16


def scalers(device: str, *, backend: str | None = None, scale: float = SCALE) -> dict[str, Any]:
    """Return a scaler of torch's and one of ours; "torch" comes first, since it is what ours must equal.

    Args:
        device: device type the scale lives on.
        backend: for ours.
        scale: the first one; it grows only after more steps than any bench takes.
    """
    pair = {
        "torch": torch.amp.GradScaler(device, init_scale=scale, growth_interval=10**6),
        "ours": scaler_triton.GradScaler(device, init_scale=scale, growth_interval=10**6, backend=backend),
    }
    for scaler in pair.values():
        scaler.scale(torch.zeros((), device=device))  # makes the scale
    return pair


def state(scaler: Any) -> list[Tensor]:
    """Return a scaler's scale and growth tracker."""
    return [scaler._scale, scaler._growth_tracker]


def flags(scaler: Any, optimizer: Any) -> list[Tensor]:
    """Return the flags of this step, one a device."""
    return list(scaler._found_inf_per_device(optimizer).values())


def unscale_here(scaler: Any, optimizer: Any, cleared: Tensor) -> dict[torch.device, Tensor]:
    """Do what `unscale_` does on this rank, for fp16 gradients too, and return the flags.

    torch's makes an inverse and a flag for each step; ours takes the inverse in the kernel, and a flag that its last
    update has cleared.

    Args:
        cleared: ours, fp32, `()`, on the scale's device, 0.
    """
    flags: dict[torch.device, Tensor]
    if isinstance(scaler, scaler_triton.GradScaler):
        flags = scaler._unscale_batches_(scaler._records.plan(optimizer), {}, None, cleared, True)
    else:
        inverse = scaler._scale.double().reciprocal().float()
        flags = scaler._unscale_grads_(optimizer, inverse, torch.zeros_like(cleared), True)
    return flags

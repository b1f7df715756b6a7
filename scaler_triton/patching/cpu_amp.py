"""GradScaler as `torch.cpu.amp` has it, for `patch_torch`; a module of its own, so that it pickles by torch's name."""

from __future__ import annotations

import warnings

from scaler_triton import grad_scaler


class GradScaler(grad_scaler.GradScaler):
    """Drop-in for `torch.cpu.amp.GradScaler`, which is deprecated: `scaler_triton.GradScaler("cpu", ...)`.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as `scaler_triton.GradScaler`.

    Raises: as `scaler_triton.GradScaler`.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        warnings.warn(
            "`torch.cpu.amp.GradScaler(args...)` is deprecated. "
            "Please use `torch.amp.GradScaler('cpu', args...)` instead.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)

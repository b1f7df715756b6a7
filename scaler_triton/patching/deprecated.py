"""What torch's two deprecated scalers share, `torch.cuda.amp.GradScaler` and `torch.cpu.amp.GradScaler`."""

from __future__ import annotations

import warnings

from scaler_triton import grad_scaler


class DeprecatedGradScaler(grad_scaler.GradScaler):
    """A GradScaler without `device`, which gives torch's FutureWarning.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as `scaler_triton.GradScaler`.

    Raises: as `scaler_triton.GradScaler`.
    """

    _kind: str  # of device

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        warnings.warn(
            f"`torch.{self._kind}.amp.GradScaler(args...)` is deprecated. "
            f"Please use `torch.amp.GradScaler('{self._kind}', args...)` instead.",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(self._kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


DeprecatedGradScaler.__init__.__qualname__ = "GradScaler.__init__"  # which Python names in its errors

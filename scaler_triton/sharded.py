"""ShardedGradScaler, the scaler for FSDP; it has its own file because the import of FSDP takes half a second."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

if not torch.distributed.is_available():
    raise ImportError("ShardedGradScaler needs torch.distributed, which this torch was built without: use GradScaler")

from torch.distributed.fsdp import sharded_grad_scaler as _torch_sharded

from scaler_triton.grad_scaler import GradScaler, Outputs
from scaler_triton.parts import Parts


class ShardedGradScaler(GradScaler, _torch_sharded.ShardedGradScaler):
    """Drop-in for `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, and for FSDP2 too.

    If any rank's gradients overflow, no rank steps, whatever the optimizer: plain, foreach or fused.

    Args:
        process_group: the ranks that must agree; None: the default group of the moment.

    The other arguments are those of `GradScaler`, in torch's order: backoff before growth.

    Raises: as `GradScaler`; at the first unscale or step, torch's ValueError if there is no default group, and
        ValueError if this rank is not in the group or a parameter's mesh has ranks outside it.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float | str = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        *,
        backend: str | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        scale_policy: str = "probe",
        headroom_bits: int = 2,
        headroom_window: int = 16,
        measure: bool = False,
    ) -> None:
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            process_group=process_group,
            backend=backend,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            max_consecutive_skips=max_consecutive_skips,
            scale_policy=scale_policy,
            headroom_bits=headroom_bits,
            headroom_window=headroom_window,
            measure=measure,
        )

    @functools.cached_property
    def _ours(self) -> Parts:
        return Parts(sharded=True)

    def scale(self, outputs: Outputs) -> Outputs:
        """Return the outputs times the scale, each in its own dtype; like torch's, it compiles with `fullgraph=True`.

        Args:
            outputs: a loss, or an iterable of them, of any shape and dtype, on any device but meta; read.

        Returns: the products; the outputs themselves on a disabled scaler.

        Raises: as `GradScaler.scale`.
        """
        if torch.compiler.is_compiling():
            if self._enabled:
                self._ours.steps.scaled = True  # Dynamo keeps this write; it could not trace `loss_scaled`
            scaled: Outputs = super(GradScaler, self).scale(outputs)  # type: ignore[call-overload]  # torch's
            return scaled
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor) and self._scale is not None:  # else torch's class keeps the dtype
            return super().scale(outputs).type(outputs.dtype)  # type: ignore[return-value]
        if _is_on_apples(outputs):  # torch's class refuses its GPU
            if isinstance(outputs, (list, tuple)):
                return type(outputs)(map(self.scale, outputs))
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)  # type: ignore[attr-defined]
        return super().scale(outputs)


def _is_on_apples(outputs: Any) -> bool:
    """Return whether an output, or one of several in a list, is on Apple's GPU."""
    several = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    return any(isinstance(each, Tensor) and each.is_mps for each in several)

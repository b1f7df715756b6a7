"""A drop-in gradient scaler for fp16 training: every rank agrees on whether a step is skipped."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaler_triton import ops
    from scaler_triton.auditing.running import audit
    from scaler_triton.grad_scaler import GradScaler
    from scaler_triton.patching import patch_torch, unpatch_torch
    from scaler_triton.sharded import ShardedGradScaler
    from scaler_triton.step_guard import StepGuard
    from scaler_triton.update import ScalerStats, SkipStreakError

__version__ = "0.2.0"
__all__ = [
    "GradScaler",
    "ScalerStats",
    "ShardedGradScaler",
    "SkipStreakError",
    "StepGuard",
    "__version__",
    "audit",
    "ops",
    "patch_torch",
    "unpatch_torch",
]

_HOMES = {
    "GradScaler": "grad_scaler",
    "ScalerStats": "update",
    "ShardedGradScaler": "sharded",
    "SkipStreakError": "update",
    "StepGuard": "step_guard",
    "audit": "auditing.running",
    "patch_torch": "patching",
    "unpatch_torch": "patching",
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        # Only those who ask pay: torch's FSDP takes half a second, and `--help` needs no torch at all.
        if name == "ops":
            return import_module("scaler_triton.ops")
        if name in _HOMES:
            return getattr(import_module(f"scaler_triton.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A drop-in gradient scaler for fp16 training: every rank agrees on whether a step is skipped."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaler_triton import ops
    from scaler_triton.auditing.running import audit
    from scaler_triton.core.update import SkipStreakError
    from scaler_triton.core.warning import ScalerWarning
    from scaler_triton.grad_scaler import GradScaler
    from scaler_triton.guard.step_guard import StepGuard
    from scaler_triton.integrations.accelerate import use_scaler_triton, use_step_guard
    from scaler_triton.integrations.lightning import fsdp_precision, mixed_precision, step_guard_precision
    from scaler_triton.patching import patch_torch, unpatch_torch
    from scaler_triton.sharded import ShardedGradScaler
    from scaler_triton.stats import ScalerStats

__version__ = "0.2.0"
__all__ = [
    "GradScaler",
    "ScalerStats",
    "ScalerWarning",
    "ShardedGradScaler",
    "SkipStreakError",
    "StepGuard",
    "__version__",
    "audit",
    "fsdp_precision",
    "mixed_precision",
    "ops",
    "patch_torch",
    "step_guard_precision",
    "unpatch_torch",
    "use_scaler_triton",
    "use_step_guard",
]

_HOMES = {
    "GradScaler": "grad_scaler",
    "ScalerStats": "stats",
    "ScalerWarning": "core.warning",
    "ShardedGradScaler": "sharded",
    "SkipStreakError": "core.update",
    "StepGuard": "guard.step_guard",
    "audit": "auditing.running",
    "fsdp_precision": "integrations.lightning",
    "mixed_precision": "integrations.lightning",
    "patch_torch": "patching",
    "step_guard_precision": "integrations.lightning",
    "unpatch_torch": "patching",
    "use_scaler_triton": "integrations.accelerate",
    "use_step_guard": "integrations.accelerate",
}
_FRAMEWORKS = ("accelerate",)  # which a module of ours imports


def __dir__() -> list[str]:
    return __all__


def _without(framework: str, name: str) -> Any:
    """Return a function that raises: an error of the import would break `help` and `from scaler_triton import *`."""

    def absent(*args: Any, **kwargs: Any) -> None:
        raise ImportError(f"{name} needs {framework}, which is not installed here: pip install {framework}")

    absent.__name__ = absent.__qualname__ = name
    return absent


if not TYPE_CHECKING:  # a type checker would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        # Only those who ask pay: torch's FSDP takes half a second, and `--help` needs no torch at all.
        if name == "ops":
            return import_module("scaler_triton.ops")
        if name in _HOMES:
            try:
                return getattr(import_module(f"scaler_triton.{_HOMES[name]}"), name)
            except ModuleNotFoundError as error:
                if error.name not in _FRAMEWORKS:
                    raise
                return _without(error.name, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

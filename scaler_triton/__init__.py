"""A drop-in gradient scaler for fp16 training: every rank agrees on the flag, and it runs in Triton."""

from typing import TYPE_CHECKING, Any

from scaler_triton import ops
from scaler_triton._version import __version__
from scaler_triton.grad_scaler import GradScaler

if TYPE_CHECKING:
    from scaler_triton.sharded import ShardedGradScaler

__all__ = ["GradScaler", "ShardedGradScaler", "__version__", "ops"]


def __getattr__(name: str) -> Any:
    # torch's FSDP takes about half a second to import: only those who ask for the class pay for it.
    if name == "ShardedGradScaler":
        from scaler_triton.sharded import ShardedGradScaler

        return ShardedGradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

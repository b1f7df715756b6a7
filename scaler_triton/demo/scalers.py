"""The two implementations under their common names."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scalers:
    """One implementation's classes.

    Args:
        label: how to call it in print, with its version.
        plain: its GradScaler.
        sharded: its ShardedGradScaler.
    """

    label: str
    plain: type[torch.amp.GradScaler]
    sharded: type[torch.amp.GradScaler]


def load_scalers(name: str) -> Scalers:
    """Return the classes of "torch" or "ours"."""
    if name == "torch":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return Scalers(f"torch {torch.__version__}", torch.amp.GradScaler, ShardedGradScaler)
    import scaler_triton

    label = f"scaler_triton {scaler_triton.__version__}"
    return Scalers(label, scaler_triton.GradScaler, scaler_triton.ShardedGradScaler)

"""Refuses a backward between unscaling and the step, which would add scaled gradients to unscaled ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scaler_triton.left_unscaled import snapshots_of, unchanged_since


@contextmanager
def refused_between_unscaling_and_step(scaler: Any) -> Iterator[None]:
    """Run a backward, and raise if it wrote or replaced gradients that are unscaled.

    Args:
        scaler: of this package.

    Raises: RuntimeError naming the optimizer that waits for its step; its gradients are written then.
    """
    waiting = [(optimizer, snapshots_of(optimizer)) for optimizer in scaler._awaiting_step()]
    yield
    for optimizer, snapshots in waiting:
        if not unchanged_since(snapshots, optimizer):
            raise RuntimeError(
                f"backward() has written gradients of {type(optimizer).__name__} between clipping, which unscaled "
                "them, and the step. Clip right before the step; to leave a step out, call the scaler's update() and "
                "drop the gradients."
            )

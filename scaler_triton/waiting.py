"""Waits for a GPU that are made once, or by a setter: `torch.cuda.set_sync_debug_mode` is to show a loop's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unnoticed(device: torch.device) -> Iterator[None]:
    """Let a block wait for `device`, whatever the mode says: torch's scaler does not wait there."""
    asked = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    mode = torch.cuda.get_sync_debug_mode() if asked else 0
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)

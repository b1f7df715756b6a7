"""CUDA graph capture: whether one is under way, and an error for what cannot be captured."""

from __future__ import annotations

import torch
from torch import Tensor


def is_captured(tensor: Tensor) -> bool:
    """Tell whether ops on `tensor` are being captured into a graph, not run."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise RuntimeError while a graph is captured on `device`: `what` has to be done once before."""
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} cannot be captured in a graph: take one step like it before")

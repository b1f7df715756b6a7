"""torchvision beside a torch that it was not built for."""

from __future__ import annotations

import importlib

import torch

OPS = torch.library.Library("torchvision", "FRAGMENT")


def make_importable() -> None:
    """Declare the operators that torchvision's import looks for, and that nothing here uses."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""Composer on a machine without a GPU; what it is made of that tests need."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import vision


def make_importable() -> None:
    """Stand in for two things that Composer imports and nothing here uses: torchvision's operators, a client."""
    if importlib.util.find_spec("composer") is None:
        return
    if importlib.util.find_spec("mcli") is None:
        sys.modules.setdefault("mcli", ModuleType("mcli"))
    vision.make_importable()


def line() -> Any:
    """Return a model of Composer's with two weights, the same each time."""
    from composer.models import ComposerModel

    class Line(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.constant_(self.layer.weight, 0.5)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.layer(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return (outputs - batch[1]).square().mean()

    return Line()

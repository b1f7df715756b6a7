"""What the tests of difference 18 share."""

from __future__ import annotations

from typing import Any

import torch
from helpers import sgd

SCALE = 4.0


def optimizer_of(kind: str, device: str, value: float = 8.0) -> torch.optim.Optimizer:
    """Return SGD with learning rate 0.5 over one parameter at 0, its gradient `value`."""
    return sgd([torch.full((3,), value)], device, **({"fused": True} if kind == "fused" else {}))


def only(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    return parameter


def postpone(scaler: Any, late: torch.optim.Optimizer, early: torch.optim.Optimizer) -> None:
    """Unscale both, step `early` alone, and end the step."""
    scaler.unscale_(late)
    scaler.step(early)
    scaler.update()

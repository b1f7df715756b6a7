"""What the tests of limits share: steps that overflow or do not, on every device and backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers import Place, places, sgd, started

from scaler_triton import GradScaler

EVERYWHERE = pytest.mark.parametrize("place", places(), ids=str)
GOOD, BAD = 1.0, math.inf


def step(scaler: Any, gradient: float, *, device: str = "cpu", fused: bool = False) -> float:
    """Return the scale after one step and update."""
    scaler.step(sgd([torch.tensor([gradient])], device, fused=fused))
    scaler.update()
    return float(scaler.get_scale())


def steps(scaler: Any, gradients: Iterable[float], device: str = "cpu") -> list[float]:
    return [step(scaler, gradient, device=device) for gradient in gradients]


def at(place: Place, **kwargs: Any) -> Any:
    return started(GradScaler, place.device, backend=place.backend, **kwargs)

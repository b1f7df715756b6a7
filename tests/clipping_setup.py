"""What the tests of clipping on one process share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Place, places, started
from torch import Tensor

from scaler_triton import GradScaler

PLACES = pytest.mark.parametrize("place", places(), ids=str)
SCALE = 8.0


def scaler_on(place: Place, **kwargs: Any) -> Any:
    return started(GradScaler, place.device, **{"init_scale": SCALE, "backend": place.backend, **kwargs})


def some_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (), (3, 5), (0,), (130,)]
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for shape in shapes]


def grads(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def true_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum((t.double() / SCALE).square().sum().item() for t in tensors))

"""`check_unscaled=True`: what becomes infinite only by unscaling is an overflow, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Place, flags, places, sgd, started

from scaler_triton import GradScaler

PLACES = pytest.mark.parametrize("place", places(), ids=str)
SCALE = 2.0**-10
HUGE = 1e38  # finite, but not divided by the scale


def explicit(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)


def clipped(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.clip_grad_norm_(optimizer, 1e30)


def implicit(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Leave it to step."""


class Own(GradScaler):
    """Unscales as the class it is made from does, and so is told the inverse of the scale."""

    def _unscale_grads_(self, *args: Any) -> Any:
        return super()._unscale_grads_(*args)


@PLACES
@pytest.mark.parametrize("cls", [GradScaler, Own])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("before", [explicit, clipped, implicit])
@pytest.mark.parametrize("value", [HUGE, 1.0])
def test_an_infinite_product_skips(
    place: Place, cls: type, fused: bool, before: Callable[..., None], value: float
) -> None:
    optimizer = sgd([torch.tensor([1.0, value])], place.device, fused=fused)
    scaler = started(cls, place.device, init_scale=SCALE, check_unscaled=True, backend=place.backend)
    before(scaler, optimizer)
    scaler.step(optimizer)
    assert flags(scaler, optimizer) == [float(value == HUGE)]
    scaler.update()
    (parameter,) = optimizer.param_groups[0]["params"]
    assert parameter[0].item() == (0.0 if value == HUGE else -0.5 / SCALE)
    assert scaler.get_scale() == (SCALE / 2 if value == HUGE else SCALE)


def test_off_by_default_as_in_torch() -> None:
    optimizer = sgd([torch.tensor([1.0, HUGE])])
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [0.0]


def test_a_deferred_clip_cannot_check() -> None:
    optimizer = sgd([torch.tensor([1.0])], fused=True)
    scaler = started(GradScaler, "cpu", check_unscaled=True)
    with pytest.raises(ValueError, match="^defer=True leaves gradients scaled"):
        scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    scaler.step(optimizer)

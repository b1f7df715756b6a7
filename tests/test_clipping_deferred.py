"""`clip_grad_norm_(defer=True)`: the step clips; nothing else may come between."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clipping_setup import PLACES, SCALE, grads, scaler_on
from helpers import Place, sgd


@PLACES
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("value", [math.nan, 1e38])
def test_a_deferred_clip_that_is_refused_leaves_nothing_to_the_step(place: Place, value: float, steps: bool) -> None:
    optimizer = sgd([torch.full((100,), value)], place.device, fused=True)
    scaler = scaler_on(place, init_scale=1.0)
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True, defer=True)
    if steps:
        scaler.step(optimizer)
        assert scaler.was_skipped(optimizer)
    scaler.update()
    assert not optimizer.param_groups[0]["params"][0].detach().any()
    assert scaler.stats().skipped == 1
    assert scaler.get_scale() == 0.5


@PLACES
def test_deferred_clipping_is_done_by_the_step(place: Place) -> None:
    start = [torch.full((3,), 24.0), torch.full((1,), 32.0)]
    optimizer = sgd(start, place.device, fused=True)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    assert grads(optimizer)[0].tolist() == [24.0] * 3  # scaled still
    scaler.step(optimizer)
    scaler.update()
    stepped = [-0.5 * value / norm.item() for value in (3.0, 4.0)]
    assert [p[0].item() for p in optimizer.param_groups[0]["params"]] == pytest.approx(stepped, rel=1e-5)
    assert not hasattr(optimizer, "grad_scale")


@PLACES
def test_a_users_own_factor_is_multiplied_in(place: Place) -> None:
    optimizer = sgd([torch.full((3,), 24.0)], place.device, fused=True)
    scaler = scaler_on(place)
    optimizer.grad_scale = torch.tensor(2.0, device=place.device)
    scaler.clip_grad_norm_(optimizer, 1e3, defer=True)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [-0.75] * 3
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize(("gradient", "stepped"), [(24.0, -1.5), (math.inf, 0.0)])
def test_deferred_clipping_is_done_by_the_step_of_a_wrapper_that_does_not_tell(gradient: float, stepped: float) -> None:
    optimizer = sgd([torch.full((3,), gradient)], fused=True)
    wrapper = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups, step=optimizer.step)
    scaler = scaler_on(Place("cpu", "torch"))
    scaler.clip_grad_norm_(optimizer, 1e3, defer=True)
    scaler.step(wrapper)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].tolist() == [stepped] * 3
    assert not hasattr(optimizer, "grad_scale")


@PLACES
@pytest.mark.parametrize(("norm_type", "defer"), [(2.0, False), (2.0, True), (math.inf, False)])
def test_clipping_to_0_leaves_nothing_of_the_gradients(place: Place, norm_type: float, defer: bool) -> None:
    optimizer = sgd([torch.full((3,), 24.0), torch.full((1,), -32.0)], place.device, fused=defer)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, 0.0, norm_type, defer=defer)
    assert norm.item() == pytest.approx(math.sqrt(3 * 3.0**2 + 4.0**2) if norm_type == 2.0 else 4.0)
    scaler.step(optimizer)
    scaler.update()
    assert not any(p.detach().any() for p in optimizer.param_groups[0]["params"])
    assert not scaler.was_skipped(optimizer)


@PLACES
def test_a_deferred_overflow_skips(place: Place) -> None:
    optimizer = sgd([torch.tensor([math.inf, 8.0])], place.device, fused=True)
    scaler = scaler_on(place)
    scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.param_groups[0]["params"][0].detach().any()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda scaler, optimizer: scaler.unscale_(optimizer), r"^unscale_\(\) has already been called"),
        (lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0), r"^unscale_\(\) has already been called"),
        (
            lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0, parameters=[]),
            r"^unscale_\(\) has already been called",
        ),
        (lambda scaler, optimizer: scaler.update(), r"^update\(\) is being called before the step\(\)"),
    ],
)
def test_between_a_deferred_clip_and_its_step_nothing_else_is_allowed(call: Callable[..., Any], text: str) -> None:
    optimizer = sgd([torch.full((3,), 24.0)], fused=True)
    scaler = scaler_on(Place("cpu", "torch"))
    scaler.clip_grad_norm_(optimizer, 1e3, defer=True)
    with pytest.raises(RuntimeError, match=text):
        call(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].tolist() == [-1.5] * 3


class AsksTheScaler(torch.optim.SGD):
    """Unscales by the scaler's own scale, as Transformer Engine's and capturable ones of apex do."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(grad_scaler._get_scale_async())
        super().step()


def test_a_step_that_asks_the_scaler_cannot_be_left_the_clipping() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 24.0)
    optimizer = AsksTheScaler([parameter], lr=0.5)
    scaler = scaler_on(Place("cpu", "torch"))
    with pytest.raises(ValueError, match=r"^defer=True needs optimizers that take grad_scale \(fused=True\), got Asks"):
        scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    assert parameter.grad.tolist() == [24.0] * 3
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(optimizer)
    assert parameter.tolist() == [-1.5] * 3


def test_an_optimizer_that_is_gone_leaves_no_clipping_to_wait_for() -> None:
    optimizer = sgd([torch.full((3,), 24.0)], fused=True)
    scaler = scaler_on(Place("cpu", "torch"), growth_interval=1)
    scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    del optimizer
    scaler.update()
    assert scaler.get_scale() == 2 * SCALE

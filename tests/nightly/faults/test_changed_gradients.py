"""Gradients and parameters that are moved, resized, converted or swapped under the scaler's feet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import PLACES, WAYS, Place, assert_all_same, parameters, take_step
from torch import Tensor, nn

from scaler_triton import GradScaler

STEPS, CHANGE_AT = 5, 2
Change = Callable[[list[Tensor]], None]


def move_into_one_storage(params: list[Tensor]) -> None:
    flat = torch.cat([param.grad.flatten() for param in params])
    sizes = [param.numel() for param in params]
    for param, piece in zip(params, flat.split(sizes), strict=True):
        param.grad = piece.view(param.shape)


def resize(params: list[Tensor]) -> None:
    """As wrappers do that swap a parameter's data, FSDP1 among them."""
    grad = params[0].grad
    params[0].grad = None
    params[0].data = torch.ones(7, dtype=params[0].dtype, device=params[0].device)
    params[0].grad = torch.full_like(params[0], grad.flatten()[0].item())


def convert(dtype: torch.dtype) -> Change:
    return lambda params: nn.ParameterList(params).to(dtype)  # keeps the parameters, swaps their data and gradients


# Gradients that are freed, replaced or laid out anew are what tests/fuzz draws.
CHANGES: dict[str, Change] = {
    "move into one storage": move_into_one_storage,
    "resize": resize,
    "widen": convert(torch.float64),
    "narrow": convert(torch.bfloat16),
}


def run(scaler: Any, device: str, change: Change, when: str, bad: bool, fused: bool) -> list[Tensor]:
    """Train with hand-made gradients; at one step `change` comes before or after `unscale_`. All that was seen."""
    params = parameters([torch.zeros(3), torch.zeros(2, 4)], device)
    optimizer, seen = torch.optim.SGD(params, lr=0.25, fused=fused), []
    for step in range(STEPS):
        factor = scaler.scale(torch.ones((), device=device))
        for index, param in enumerate(params):
            param.grad = (torch.full_like(param, step + index + 1) * factor).to(param.dtype)
        if bad and step == CHANGE_AT:
            params[1].grad[1, 2] = torch.inf
        for moment in ("before", "after"):
            if step == CHANGE_AT and when == moment:
                with torch.no_grad():
                    change(params)
            if moment == "before":
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler._scale.clone(), *(param.detach().clone() for param in params)]
        seen += [param.grad.clone() for param in params if param.grad is not None]
    return seen


@PLACES
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_as_torch(place: Place, name: str, when: str, bad: bool) -> None:
    """Before and after `unscale_`, in a good step and in one that overflows, and in the steps that follow."""
    settings = {"init_scale": 4.0, "growth_interval": 2}
    fused, change = name not in ("widen", "narrow"), CHANGES[name]  # which torch's fused kernels refuse
    on = "cpu" if name == "narrow" else place.device  # torch's op has no bf16 on a GPU
    theirs = run(torch.amp.GradScaler(on, **settings), on, change, when, bad, fused)
    ours = run(GradScaler(place.device, backend=place.backend, **settings), place.device, change, when, bad, fused)
    assert_all_same(ours, theirs)
    assert ours[0].item() == 4.0


def give_gradients(scaler: Any, params: list[Tensor]) -> None:
    factor = scaler.scale(torch.ones((), device=scaler._device)).item()
    for param in params:
        param.grad = torch.full_like(param, 2.0 * factor)


@PLACES
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_can_be_swapped_after_a_step(place: Place, way: str, fused: bool) -> None:
    """As modules of FSDP2 are converted; torch swaps no tensor that somebody holds a weak reference to."""
    params = parameters([torch.ones(3), torch.ones(2, 4)], place.device)
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    for dtype in (torch.float64, torch.float32):
        give_gradients(scaler, params)
        take_step(scaler, optimizer, way)
        for param in params:
            grad, converted = param.grad, nn.Parameter(param.detach().to(dtype))
            converted.grad = grad.to(dtype)
            torch.utils.swap_tensors(param, converted)
            del converted
            torch.utils.swap_tensors(grad, grad.clone())


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("start", "end"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_parameters_move_to_another_device(start: str, end: str, when: str) -> None:
    """In mid-training, beside `unscale_`: every step is taken once, with the right gradients."""
    params = parameters([torch.zeros(3), torch.zeros(2, 4)], start)
    optimizer, scaler = torch.optim.SGD(params, lr=1.0, foreach=False), GradScaler("cuda", init_scale=4.0)
    for step in range(3):
        give_gradients(scaler, params)
        for moment in ("before", "after") if step == 1 else ():
            if moment == when:
                nn.ParameterList(params).to(end)
            if moment == "before":
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert {param.detach().unique().item() for param in params} == {-2.0 * (step + 1)}
    assert {param.device.type for param in params} == {end}

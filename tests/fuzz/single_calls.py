"""What a rule of a random program does in one world, and what it makes."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import torch
from optimizer_contents import parameters_of
from worlds import GradientSpec, ParameterSpec, World, half_of


def new_scale_tensor(value: float, size: int, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Return an argument for `update`, legal or not."""
    shape = () if size == 0 else (size,)
    return torch.full(shape, value, dtype=dtype, requires_grad=requires_grad)


def named_parameters(world: World) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{i}.{j}", p) for i, optimizer in enumerate(world.optimizers) for j, p in enumerate(parameters_of(optimizer))
    ]


def give(optimizer: torch.optim.Optimizer, gradients: list[GradientSpec]) -> None:
    for position, parameter in enumerate(parameters_of(optimizer)):
        gradients[position % len(gradients)].give(parameter)


def extend(optimizer: torch.optim.Optimizer, spec: ParameterSpec, half: torch.dtype) -> None:
    group = optimizer.param_groups[0]
    fused_momentum = bool(group["fused"] and group.get("momentum"))
    optimizer.add_param_group({"params": [spec.build(half_of(fused_momentum, half))]})


def failing_step(world: World, optimizer: torch.optim.Optimizer) -> Any:
    """Step, but for the optimizer's own step, which raises at its begin."""

    def raising(*args: Any, **kwargs: Any) -> None:
        raise OSError("out of order")

    with mock.patch.object(optimizer, "step", raising):
        return world.scaler.step(optimizer)


def rearrange(optimizer: torch.optim.Optimizer, whole: bool) -> None:
    """Reverse the order of an optimizer's parameters; where they are not to stay whole the first one leaves."""
    first = optimizer.param_groups[0]["params"]
    if not whole and len(first) > 1:
        del first[0]
    first.reverse()
    optimizer.param_groups.reverse()


def scaled(scaler: Any, loss: torch.Tensor, form: str) -> Any:
    losses = {
        "tensor": loss,
        "list": [loss, loss.reshape(1)],
        "tuple": (loss, [loss]),
        "generator": (each for each in [loss]),
        "number": 3,
    }
    result = scaler.scale(losses[form])
    return list(result) if form == "generator" else result


def numbers(found: dict[Any, torch.Tensor]) -> list[float]:
    return [flag.item() for flag in found.values()]


def fill(tensors: dict[Any, torch.Tensor], value: float) -> None:
    for tensor in tensors.values():
        tensor.fill_(value)


def assign(scaler: Any, value: float, size: int) -> None:
    scaler._scale = torch.full((1,) if size else (), value)


def asked(scaler: Any) -> list[Any]:
    getters = (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval)
    return [scaler.is_enabled(), scaler.get_scale(), scaler._get_growth_tracker(), *(getter() for getter in getters)]


def replace_scaler(world: World, how: str) -> None:
    copies = {"pickle": lambda s: pickle.loads(pickle.dumps(s)), "deepcopy": copy.deepcopy, "copy": copy.copy}
    world.scaler = copies[how](world.scaler)

"""What the specification asks about an optimizer: its parameters, its gradients, what was written to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return an optimizer's parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_coalesced_fp16(gradient: Tensor) -> bool:
    """Tell whether it is sparse and in fp16, without duplicates."""
    return is_fp16(gradient) and gradient.is_sparse and gradient.is_coalesced()


def gradients_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the gradients that there are."""
    return (parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)


def values_in(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, which may be sparse, sharing its memory."""
    return gradient._values() if gradient.is_sparse else gradient


def values_of(optimizer: Any) -> list[Tensor]:
    """Return the numbers of all gradients of an optimizer."""
    return [values_in(gradient) for gradient in gradients_of(optimizer)]


def first_gradient(optimizer: Any) -> Tensor | None:
    """The first gradient; if another one is in its place all are others, which no `unscale_` has seen."""
    return next(gradients_of(optimizer), None)


def writes_of(optimizer: Any) -> list[tuple[Tensor, int] | None]:
    """What tells whether gradients are the same ones, not written since: the objects, and torch's count of writes."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return [None if gradient is None else (gradient, gradient._version) for gradient in gradients]


def first_write_of(optimizer: Any) -> list[tuple[Tensor, int] | None]:
    return [each for each in writes_of(optimizer) if each is not None][:1]


def same_writes(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        (one is None and other is None) or (one and other and one[0] is other[0] and one[1] == other[1])
        for one, other in zip(before, now, strict=True)
    )


def is_fp16(gradient: Tensor) -> bool:
    """Tell whether GradScaler refuses to unscale it."""
    return gradient.dtype is torch.float16


def overlaps(gradient: Tensor) -> bool:
    """Tell whether elements share memory."""
    if gradient.layout is not torch.strided or not gradient.numel():
        return False
    return any(stride == 0 < size - 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True))


def lacks_momentum(optimizer: Any) -> bool:
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
        if parameter.grad is not None
    )


def sum_up(parameters: Any) -> None:
    """Sum duplicates in sparse gradients: a norm is that of the sums."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and not gradient.is_coalesced():
            parameter.grad = gradient.float().coalesce().half() if is_fp16(gradient) else gradient.coalesce()


def together(parameters: Sequence[Tensor]) -> Tensor:
    """Return all numbers of all gradients in fp64."""
    parts = [values_in(p.grad).double().flatten() for p in parameters if p.grad is not None]
    whole = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    return whole if whole.numel() else torch.zeros(1, dtype=torch.float64)  # torch has no inf-norm of nothing

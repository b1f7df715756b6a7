"""What the models need of parameters and gradients: their kinds, their norm, and torch's arithmetic."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from helpers import params_of
from torch import Tensor

TOLERANCE = 1e-6  # what `clip_grad_norm_` promises of its norm


def gradients_of(optimizer: Any) -> Iterator[Tensor]:
    return (parameter.grad for parameter in params_of(optimizer) if parameter.grad is not None)


def is_fp16(gradient: Tensor) -> bool:
    """Return whether GradScaler refuses to unscale it."""
    return gradient.dtype is torch.float16


def overlaps(gradient: Tensor) -> bool:
    if gradient.layout is not torch.strided or not gradient.numel():
        return False
    return any(stride == 0 < size - 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True))


def has_duplicates(gradient: Tensor) -> bool:
    return gradient.is_sparse and not gradient.is_coalesced()


def summed(gradient: Tensor) -> Tensor:
    """Return a sparse gradient whose duplicates are added up, those of fp16 in fp32."""
    return gradient.float().coalesce().half() if is_fp16(gradient) else gradient.coalesce()


def lacks_momentum(optimizer: Any) -> bool:
    """Return whether it is an SGD whose momentum its next step will make."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    groups = [group for group in optimizer.param_groups if group["momentum"]]
    stepped = [each for group in groups for each in group["params"] if each.grad is not None]
    return any(optimizer.state.get(each, {}).get("momentum_buffer") is None for each in stepped)


def form(gradient: Tensor | None) -> Any:
    if gradient is None:
        return None
    if gradient.is_sparse:
        return gradient.dtype, gradient._nnz(), gradient.is_coalesced()
    return gradient.dtype, gradient.stride(), gradient.storage_offset()


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether parameters are the same objects, and their gradients of the same form."""
    return len(one) == len(other) and all(a is b and f == g for (a, f), (b, g) in zip(one, other, strict=True))


def values_in(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def sum_up(parameters: Iterable[Tensor], *, fp16_only: bool = False) -> None:
    """Sum duplicates in sparse gradients: a norm is that of the sums."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and has_duplicates(grad) and (is_fp16(grad) or not fp16_only):
            parameter.grad = summed(parameter.grad)


def together(parameters: Sequence[Tensor]) -> Tensor:
    parts = [values_in(p.grad).double().flatten() for p in parameters if p.grad is not None]
    whole = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    return whole if whole.numel() else torch.zeros(1, dtype=torch.float64)  # torch has no inf-norm of nothing


def multiply(parameters: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients in fp32 or more, and round once."""
    for parameter in parameters:
        if parameter.grad is not None:
            values = values_in(parameter.grad)
            values.copy_(values.to(torch.promote_types(values.dtype, torch.float32)) * coefficient)


def agreed(exact: Tensor, measured: Sequence[Tensor], promised: bool) -> Tensor:
    """Return the measured norm, which must be right if anything is promised; without one the exact norm."""
    want = exact.abs().float()
    if not measured:
        return want
    (norm,) = measured
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    same = torch.equal(norm, want) or bool(norm.isnan() and want.isnan()) or not promised
    # A last digit of fp32's, where it has fewer than seven, or lies at the end of its range.
    neighbours = torch.nextafter(want, torch.tensor(torch.inf)), torch.nextafter(want, torch.zeros(()))
    assert same or norm in neighbours or abs(norm.double() - exact.abs()) <= TOLERANCE * exact.abs(), (norm, exact)
    return norm.clone()

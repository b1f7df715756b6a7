"""A norm of any order over gradients that are sharded over ranks, and clipping by it: a pass each, after unscaling."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton.clipping.copies import copies_of_gradient
from scaler_triton.gradients import is_unreduced, reduced, sparse_values
from scaler_triton.placement import is_dtensor, local_tensor, num_shards

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement


def local_gradients(
    parameters: Iterable[Tensor], copies: Iterable[int], chosen: Container[int] | None
) -> tuple[list[Tensor], list[int]]:
    """Return this rank's shards of the gradients, and how many ranks hold each.

    Args:
        parameters: their unreduced gradients are replaced by the sums, which takes a collective for a Partial one.
        copies: for each parameter, how many of the ranks hold the same shard of it as this rank.
        chosen: the ids of the parameters that count; None: all.
    """
    gradients, counts = [], []
    for parameter, count in zip(parameters, copies, strict=True):
        if parameter.grad is None or (chosen is not None and id(parameter) not in chosen):
            continue
        if is_unreduced(parameter.grad):
            parameter.grad = reduced(parameter.grad)
        local = local_tensor(parameter.grad)
        gradients.append(sparse_values(local) if local.layout is torch.sparse_coo else local)
        placed = is_dtensor(parameter) and is_dtensor(parameter.grad)
        counts.append(copies_of_gradient(count, parameter, num_shards(parameter.grad)) if placed else count)
    return gradients, counts


def terms_of_norm(gradients: Sequence[Tensor], copies: Sequence[int], order: float, flag: Tensor) -> Tensor:
    """Return this rank's contribution to `norm_of_terms`, fp64, [2] or [3], on the flag's device.

    Args:
        gradients: floating point, of any devices; read.
        copies: for each, how many ranks hold it.
        order: > 0.
        flag: fp32, `()`, on the device where the norm is wanted; reduced together with it.
    """
    norms: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, count in zip(gradients, copies, strict=True):
        if gradient.numel():
            norms[count].append(torch.linalg.vector_norm(gradient, order, dtype=torch.float64).to(flag.device))
    if order == math.inf:
        largest = _stacked([norm for of_a_count in norms.values() for norm in of_a_count], flag).amax()
        is_nan = largest.isnan()  # apart: a MAX reduction may drop NaN
        return torch.stack([torch.where(is_nan, 0.0, largest), is_nan.double(), flag.double()])
    shares = [(torch.stack(of_a_count) ** order).sum() / count for count, of_a_count in norms.items()]
    return torch.stack([_stacked(shares, flag).sum(), flag.double()])


def unknown_terms(order: float, device: torch.device) -> Tensor:
    """Return the contribution of a rank that failed: it makes the norm NaN, and sets the flag."""
    return torch.tensor([0.0, 1.0, 1.0] if order == math.inf else [math.nan, 1.0], dtype=torch.float64, device=device)


def norm_of_terms(terms: Tensor, order: float, agreement: Agreement | None) -> tuple[Tensor, Tensor]:
    """Return the norm of all ranks' gradients, each shard counted once: one reduction, no host wait.

        (sum over ranks and shards of abs(g) ** order / copies) ** (1 / order), for inf the largest abs(g)

    Args:
        terms: this rank's, from `terms_of_norm`; written.
        order: as passed to `terms_of_norm`.
        agreement: the ranks; None: only this one.

    Returns: the norm, and 1.0 if the flag of any rank is set, else 0.0; both fp32, `()`.
    """
    if agreement is not None:
        (agreement.maximum_ if order == math.inf else agreement.sum_)(terms)
    if order == math.inf:
        return torch.where(terms[1] != 0, math.nan, terms[0]).float(), (terms[2] != 0).float()
    return (terms[0] ** (1.0 / order)).float(), (terms[1] != 0).float()


def _stacked(numbers: Sequence[Tensor], flag: Tensor) -> Tensor:
    return torch.stack([*numbers]) if numbers else torch.zeros(1, dtype=torch.float64, device=flag.device)


def multiply_(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients (of any devices, written) by a coefficient, fp32 `()`, as torch's clipping does."""
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        here = [gradient for gradient in gradients if gradient.device == device]
        torch._foreach_mul_(here, coefficient.to(device))

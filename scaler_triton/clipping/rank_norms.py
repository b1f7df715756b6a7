"""A norm of any order over gradients that several ranks hold, and clipping by it: a pass each, after unscaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scaler_triton.collectives import Agreement


def norm_over_ranks(
    gradients: Sequence[Tensor], copies: Sequence[int], order: float, agreement: Agreement | None, home: torch.device
) -> Tensor:
    """Return the norm of all ranks' gradients together, each piece counted once: one reduction, no host wait.

        (sum over ranks and pieces of abs(g) ** order / copies) ** (1 / order), for inf the largest abs(g)

    Args:
        gradients: floating point, of any devices; read.
        copies: for each, how many of the ranks hold it.
        order: > 0.
        agreement: the ranks; None: this one alone.
        home: where the answer is wanted.

    Returns: fp32, `()`, on `home`.
    """
    norms = [torch.linalg.vector_norm(g, order, dtype=torch.float64).to(home) for g in gradients if g.numel()]
    shares = torch.tensor([1.0 / count for g, count in zip(gradients, copies, strict=True) if g.numel()])
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=home)
    if order == math.inf:
        return _largest(stacked.amax(), agreement).float()
    weights = shares.to(device=home, dtype=torch.float64) if norms else 1.0
    total = (stacked**order * weights).sum().reshape(1)
    if agreement is not None:
        agreement.sum_(total)
    return (total[0] ** (1.0 / order)).float()


def _largest(mine: Tensor, agreement: Agreement | None) -> Tensor:
    """Return the largest of the ranks' numbers, NaN if one of them is: a maximum over ranks may pass over it."""
    if agreement is None:
        return mine
    is_nan = mine.isnan()
    both = torch.stack([torch.where(is_nan, 0.0, mine), is_nan])
    agreement.maximum_(both)
    return torch.where(both[1] != 0, math.nan, both[0])


def multiply_(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients (of any devices, written) by a coefficient, fp32 `()`, as torch's clipping does."""
    for device in dict.fromkeys(gradient.device for gradient in gradients):
        here = [gradient for gradient in gradients if gradient.device == device]
        torch._foreach_mul_(here, coefficient.to(device))

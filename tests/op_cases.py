"""What the tests of passes in plain torch share: tensors of every kind, and one that says it is on a GPU."""

import math

import torch
from helpers import randn
from torch import Tensor

SPECIALS = [None, math.nan, math.inf, -math.inf]


class Away(Tensor):
    """A tensor that says it is not on the CPU, as one on a GPU does: torch's op there lacks bf16, and true fp64."""

    is_cpu = False  # type: ignore[assignment]


def flag(value: float = 0.0) -> Tensor:
    return torch.tensor(value)


def some(dtype: torch.dtype, special: float | None = None) -> list[Tensor]:
    made = [randn(7, dtype), randn(0, dtype), randn(600_000, dtype, 1), randn(12, dtype, 2).view(3, 4).t()]
    made += [randn(9, dtype, 3)[::2], torch.tensor(3.0, dtype=dtype)]
    if special is not None:
        made[2][-1] = special
    return made

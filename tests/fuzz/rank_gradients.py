"""The gradients of a program for four ranks: what each of them is as a whole, and what a rank gets of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import torch
from rank_places import DTYPES, LETTERS, PLACES, Parameter, cut
from rank_programs import Program, Spot
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(described: Parameter, spot: Spot) -> Tensor:
    """Return all of a gradient: exact in every dtype, a term of a sum too, and so large that a step shows in bf16."""
    own = sum(PLACES[described.place].own.where(spot.rank))
    # Another one than in the step before, and with the largest scale not too large for fp16.
    value = (1 + spot.parameter + 4 * own) * 2.0 ** (spot.step % 3)
    return value * torch.arange(1, described.rows * 3 + 1).view(-1, 3).to(DTYPES[described.dtype])


def piece(described: Parameter, spot: Spot) -> Tensor:
    """Return what a rank holds of a gradient."""
    return cut(whole(described, spot), described.way(spot.step), PLACES[described.place].axes, spot.rank)


def distributed(described: Parameter, local: Tensor, way: str) -> Tensor:
    """Return the DTensor of which `local` is this rank's part."""
    mesh, placements = PLACES[described.place].mesh, [LETTERS[letter] for letter in way]
    assert mesh is not None
    size = {"shape": torch.Size((described.rows, 3)), "stride": (3, 1)}
    return DTensor.from_local(local, mesh(), placements, run_check=False, **size)


def backward(
    program: Program, spot: Spot, optimizer: torch.optim.Optimizer, scale: float, kept: dict[Any, Tensor]
) -> None:
    """Give all parameters of an optimizer their gradients; `kept` holds those of earlier steps."""
    planted = dict(program.planted)
    for index, parameter in enumerate(cases.params_of(optimizer)):
        here = replace(spot, parameter=index)
        described, parameter.grad = program.parameter_of(here), None
        if here not in program.missing:
            gradient = _gradient(described, here, scale, planted.get(here))
            if program.keeps:
                old = kept.setdefault((spot.optimizer, index, described.way(spot.step)), gradient)
                cases.local_of(old).copy_(cases.local_of(gradient))
                gradient = old
            parameter.grad = gradient


def _gradient(described: Parameter, spot: Spot, scale: float, planted: float | None) -> Tensor:
    local, way = piece(described, spot) * scale, described.way(spot.step)
    if planted is not None and local.numel():
        local.view(-1)[spot.rank % local.numel()] = planted
    if way in ("", "plain"):
        return local
    for letter, (size, _) in zip(way, PLACES[described.place].axes.dims, strict=True):
        local /= size if letter == "P" else 1  # a term of the sum
    return distributed(described, local, way)

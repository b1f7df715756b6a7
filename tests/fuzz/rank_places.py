"""Where parameters of four ranks live, and which part of a tensor each rank holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import cases
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

# A tensor's placements are a word of these, a letter for each dim of its mesh. "s" is FSDP2's beside TP's "0".
LETTERS = {"R": Replicate(), "0": Shard(0), "1": Shard(1), "P": Partial(), "s": _StridedShard(0, split_factor=2)}


@dataclass(frozen=True)
class Axes:
    """Dims of ranks 0 to 3, each as (size, stride): along it `rank` stands at rank // stride % size."""

    dims: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """How many places there are."""
        return math.prod(size for size, _ in self.dims)

    def where(self, rank: int) -> tuple[int, ...]:
        """Return where a rank stands."""
        return tuple(rank // stride % size for size, stride in self.dims)


@dataclass(frozen=True)
class Place:
    """Where a parameter lives.

    Args:
        mesh: makes its mesh, None for a plain tensor.
        axes: of the mesh.
        letters: its placements.
        own: along these, ranks hold shards of different tensors.
    """

    mesh: Callable[[], DeviceMesh] | None
    axes: Axes
    letters: str
    own: Axes = Axes(())

    @property
    def has_copies(self) -> bool:
        """Whether some ranks hold the same piece."""
        cut = math.prod(size for (size, _), letter in zip(self.axes.dims, self.letters, strict=True) if letter != "R")
        return self.own.size * cut < 4


def _dp() -> DeviceMesh:
    return cases.square()["dp"]


def _tp() -> DeviceMesh:
    return cases.square()["tp"]


def _one_replica() -> DeviceMesh:
    return cases.mesh((1, 4), ("replica", "shard"))


NOTHING, LINE, SQUARE, ROWS, COLUMNS = (Axes(d) for d in ((), ((4, 1),), ((2, 2), (2, 1)), ((2, 2),), ((2, 1),)))

PLACES = {
    "plain": Place(None, NOTHING, ""),
    "own": Place(None, NOTHING, "", LINE),  # plain, but every rank's is another: FSDP1's shards, pipeline stages
    "line-replicated": Place(cases.line, LINE, "R"),
    "line-sharded": Place(cases.line, LINE, "0"),
    "square-sharded": Place(cases.square, SQUARE, "01"),
    "square-replicated": Place(cases.square, SQUARE, "RR"),
    "hsdp": Place(cases.square, SQUARE, "R0"),
    "one-replica": Place(_one_replica, Axes(((1, 4), (4, 1))), "R0"),
    "square-half": Place(cases.square, SQUARE, "0R"),
    "fsdp-tp": Place(cases.square, SQUARE, "s0"),
    "dp-slice": Place(_dp, ROWS, "0", COLUMNS),
    "tp-slice": Place(_tp, COLUMNS, "0", ROWS),
}
SLICES = ("dp-slice", "tp-slice")
PLAIN = ("plain", "own")


@dataclass(frozen=True)
class Parameter:
    """A parameter, of three columns.

    Args:
        rows: 4 are even shards, of 5 the last of four ranks has none, of 1 only the first has one.
        grads: how backward places its gradients, step for step and over again: words of `LETTERS`, or "plain" for the
            local tensor alone; none: as the parameter.
    """

    place: str
    dtype: str = "fp32"
    rows: int = 4
    grads: tuple[str, ...] = ()

    def way(self, step: int) -> str:
        """Return how a step's gradient is placed."""
        return self.grads[step % len(self.grads)] if self.grads else PLACES[self.place].letters

    def held(self, step: int) -> tuple[Tensor, ...]:
        """Return which elements of a step's gradient each rank holds, by their positions in the whole."""
        return _held(self.place, self.way(step), self.rows)

    @property
    def moves(self) -> bool:
        """Whether gradients may be placed otherwise than the parameter."""
        return bool(self.grads)


@functools.cache
def _held(place: str, way: str, rows: int) -> tuple[Tensor, ...]:
    whole = torch.arange(rows * 3).view(rows, 3)
    return tuple(cut(whole, way, PLACES[place].axes, rank) for rank in range(4))


def cut(piece: Tensor, way: str, axes: Axes, rank: int) -> Tensor:
    """Return what a rank holds of a tensor that is placed this way."""
    dims = [] if way == "plain" else [*zip(way, axes.dims, axes.where(rank), strict=True)]
    for letter, (size, _), index in reversed(dims) if "s" in way else dims:  # TP cuts first
        if letter not in "RP":
            dim = int(letter == "1")
            parts = piece.chunk(size, dim)  # as many as there are elements for
            piece = parts[index] if index < len(parts) else piece.narrow(dim, 0, 0)
    return piece.contiguous()

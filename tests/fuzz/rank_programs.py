"""A program for four ranks as plain data: where parameters live, what is called, and what each rank's gradients are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from ranks import cases
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

RANKS = range(4)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

# A tensor's placements are a word of these, a letter for each dim of its mesh. "s" is FSDP2's beside TP's "0".
LETTERS = {"R": Replicate(), "0": Shard(0), "1": Shard(1), "P": Partial(), "s": _StridedShard(0, split_factor=2)}


# Dims of ranks 0 to 3, each as (size, stride): along it `rank` stands at rank // stride % size.
Axes = tuple[tuple[int, int], ...]


def stand(axes: Axes, rank: int) -> tuple[int, ...]:
    return tuple(rank // stride % size for size, stride in axes)


@dataclass(frozen=True)
class Place:
    """Where a parameter lives."""

    mesh: Callable[[], DeviceMesh] | None  # makes its mesh; None: a plain tensor
    axes: Axes  # of the mesh
    letters: str  # its placements
    own: Axes = ()  # along these, ranks hold shards of different tensors

    @property
    def has_copies(self) -> bool:
        """Whether some ranks hold the same piece."""
        cut = [size for (size, _), letter in zip(self.axes, self.letters, strict=True) if letter != "R"]
        return math.prod(cut + [size for size, _ in self.own]) < 4

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds all of it."""
        return set(self.letters) <= {"R"}

    @property
    def ways(self) -> list[str]:
        """How gradients can be placed."""
        words = ["".join(letters) for letters in itertools.product("RP01", repeat=len(self.letters))]
        return words + ["plain"] * self.is_whole + ["s0"] * (self.axes == SQUARE)


NOTHING, LINE, SQUARE, ROWS, COLUMNS = (), ((4, 1),), ((2, 2), (2, 1)), ((2, 2),), ((2, 1),)

PLACES = {
    "plain": Place(None, NOTHING, ""),
    "own": Place(None, NOTHING, "", LINE),  # plain, but every rank's is another: FSDP1's shards, pipeline stages
    "line-replicated": Place(cases.line, LINE, "R"),
    "line-sharded": Place(cases.line, LINE, "0"),
    "square-sharded": Place(cases.square, SQUARE, "01"),
    "square-replicated": Place(cases.square, SQUARE, "RR"),
    "hsdp": Place(cases.square, SQUARE, "R0"),
    "one-replica": Place(lambda: cases.mesh((1, 4), ("replica", "shard")), ((1, 4), (4, 1)), "R0"),
    "square-half": Place(cases.square, SQUARE, "0R"),
    "fsdp-tp": Place(cases.square, SQUARE, "s0"),
    "dp-slice": Place(lambda: cases.square()["dp"], ROWS, "0", COLUMNS),
    "tp-slice": Place(lambda: cases.square()["tp"], COLUMNS, "0", ROWS),
}
PLAIN = ("plain", "own")
# Optimizers that take gradients placed otherwise than a parameter that is cut, and plain ones beside a DTensor.
ON_MOVED = ["local", "local-fused"]


@dataclass(frozen=True)
class Parameter:
    """A parameter, of three columns."""

    place: str
    dtype: str = "fp32"
    rows: int = 4  # even shards; of 5 rows the last of four ranks has none, of 1 only the first has one
    # How backward places its gradients, step for step and over again: words of `LETTERS`, or "plain" for the local
    # tensor alone; none: as the parameter.
    grads: tuple[str, ...] = ()

    def way(self, step: int) -> str:
        return self.grads[step % len(self.grads)] if self.grads else PLACES[self.place].letters

    def held(self, step: int) -> list[Tensor]:
        """Return which elements of a step's gradient each rank holds, by their positions in the whole."""
        return _held(self.place, self.way(step), self.rows)


@functools.cache
def _held(place: str, way: str, rows: int) -> list[Tensor]:
    positions = torch.arange(rows * 3).view(rows, 3)
    return [cut(positions, way, PLACES[place].axes, rank) for rank in RANKS]


def cut(piece: Tensor, way: str, axes: Axes, rank: int) -> Tensor:
    """Return what a rank holds of a tensor that is placed this way."""
    dims = [] if way == "plain" else [*zip(way, axes, stand(axes, rank), strict=True)]
    for letter, (size, _), index in reversed(dims) if "s" in way else dims:  # TP cuts first
        if letter not in "RP":
            dim = int(letter == "1")
            parts = piece.chunk(size, dim)  # as many as there are elements for
            piece = parts[index] if index < len(parts) else piece.narrow(dim, 0, 0)
    return piece.contiguous()


# In torch 2.11 it does not.
ADAGRAD_TAKES_FLAG = hasattr(torch.optim.Adagrad([torch.zeros(1)], fused=True), "_step_supports_amp_scaling")


@dataclass(frozen=True)
class Optimizer:
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def has_dtensors(self) -> bool:
        return any(parameter.place not in PLAIN for parameter in self.parameters)

    @property
    def moves(self) -> bool:
        """Whether gradients may be placed otherwise than their parameters."""
        return any(parameter.grads for parameter in self.parameters)

    @property
    def takes_flag(self) -> bool:
        return self.name.endswith("-fused") and (self.name != "adagrad-fused" or ADAGRAD_TAKES_FLAG)


class Spot(NamedTuple):
    """One gradient of one rank at one step."""

    step: int
    rank: int
    optimizer: int
    parameter: int


@dataclass(frozen=True)
class Clip:
    """A call of `clip_grad_norm_` on all ranks."""

    optimizers: tuple[int, ...]  # their positions
    fraction: float  # `max_norm` is this part of the norm that the program expects
    order: float = 2.0
    subset: frozenset[int] | None = None  # which of their parameters, by position; None: `parameters=` is not given
    refuses: bool = False  # whether a norm that is not finite is an error

    @property
    def is_at_once(self) -> bool:
        """Whether one reduction carries norm, flags and scales."""
        return self.order == 2.0 and self.subset is None

    def members(self, program: Program) -> list[tuple[int, int]]:
        """Return which parameters are clipped, as (optimizer, position)."""
        everything = [(o, p) for o in self.optimizers for p in range(len(program.optimizers[o].parameters))]
        return [each for i, each in enumerate(everything) if self.subset is None or i in self.subset]


class Setting(NamedTuple):
    """A limit that is set on all ranks, as a step begins."""

    step: int
    name: str
    value: Any


class Split(NamedTuple):
    """As a step begins, one rank's scale becomes another; the program ends with this step."""

    step: int
    rank: int
    factor: float


@dataclass(frozen=True)
class Program:
    """What four ranks do."""

    kind: str  # "sharded", "grad", "world" or "guard", as `cases.new_scaler` takes them
    optimizers: tuple[Optimizer, ...]
    steps: int  # how many updates
    explicit: frozenset[tuple[int, int]] = frozenset()  # (rank, optimizer) pairs that call `unscale_` themselves
    missing: frozenset[Spot] = frozenset()  # gradients that are None
    planted: tuple[tuple[Spot, float], ...] = ()  # gradients that hold a non-finite value, and which
    clips: tuple[Clip | None, ...] = ()  # what is clipped in each step, before anything is stepped
    keeps: bool = False  # whether gradients that are placed alike stay the same tensors, written anew step for step
    hysteresis: int = 1  # at first
    max_consecutive_skips: int | None = None  # at first
    settings: tuple[Setting, ...] = ()  # what is set on the way; a later one counts
    # (step, optimizer) pairs: before this step comes a batch whose step fails on all ranks, without an update.
    given_up: frozenset[tuple[int, int]] = frozenset()
    split: Split | None = None  # what makes the ranks disagree, if anything does
    spike_sigma: float | None = None  # of a guard
    window: int = 2  # of a guard

    @property
    def limits(self) -> dict[str, Any]:
        """The scaler's limits at first, by the names of its arguments, but for the scale of a guard."""
        own = {"min_scale": 1.0, "max_scale": 1.0} if self.kind == "guard" else {"hysteresis": self.hysteresis}
        return {**own, "max_consecutive_skips": self.max_consecutive_skips}

    @property
    def options(self) -> dict[str, Any]:
        """What the scaler is made with, by the names of its arguments."""
        if self.kind != "guard":
            return self.limits
        return {name: getattr(self, name) for name in ("spike_sigma", "window", "max_consecutive_skips")}

    @property
    def finished(self) -> int:
        return self.steps if self.split is None else self.split.step

    def settings_of(self, step: int) -> dict[str, Any]:
        return {each.name: each.value for each in self.settings if each.step == step}

    def clip_of(self, step: int, optimizer: int | None = None) -> Clip | None:
        """What is clipped in a step; with an optimizer: what this one is clipped by."""
        clip = self.clips[step] if step < len(self.clips) else None
        return clip if clip is None or optimizer is None or optimizer in clip.optimizers else None

    def clip_agrees(self, clip: Clip) -> bool:
        return any(self.agrees(index) for index in clip.optimizers)

    def parameter_of(self, spot: Spot) -> Parameter:
        return self.optimizers[spot.optimizer].parameters[spot.parameter]

    def bad(self, step: int) -> list[Spot]:
        """Return the gradients that hold something non-finite: what is planted needs an element."""
        there = [spot for spot, _ in self.planted if spot.step == step and spot not in self.missing]
        return [spot for spot in there if self.parameter_of(spot).held(step)[spot.rank].numel() > 0]

    def clip_is_clean(self, step: int, clip: Clip) -> bool:
        """Whether nothing that the clip measures is planted."""
        members = clip.members(self)
        return not any((spot.optimizer, spot.parameter) in members for spot in self.bad(step))

    def agrees(self, optimizer: int) -> bool:
        """Whether this optimizer's ranks reduce their flag."""
        return self.kind != "grad" or self.optimizers[optimizer].has_dtensors

    def overflows(self, step: int, optimizers: tuple[int, ...]) -> bool:
        """Whether any rank holds a non-finite value of these."""
        return any(spot.optimizer in optimizers for spot in self.bad(step))


def whole(described: Parameter, spot: Spot) -> Tensor:
    """Return all of a gradient: exact in every dtype, a term of a sum too, and so large that a step shows in bf16."""
    own = sum(stand(PLACES[described.place].own, spot.rank))
    # Another one than in the step before, and with the largest scale not too large for fp16.
    value = (1 + spot.parameter + 4 * own) * 2.0 ** (spot.step % 3)
    return value * torch.arange(1, described.rows * 3 + 1).view(-1, 3).to(DTYPES[described.dtype])


def piece(described: Parameter, spot: Spot) -> Tensor:
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
        here = spot._replace(parameter=index)
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
    for letter, (size, _) in zip(way, PLACES[described.place].axes, strict=True):
        local /= size if letter == "P" else 1  # a term of the sum
    return distributed(described, local, way)

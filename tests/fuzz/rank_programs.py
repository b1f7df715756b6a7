"""A program for four ranks as plain data, the model of what must come of it, and how a rank executes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cases
import torch
from cases import GROWTH_INTERVAL, INIT_SCALE
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Where a parameter lives.

    Args:
        mesh: makes its mesh, None for a plain tensor.
        placements: on the mesh.
        shards: along which of the square's dims, (rank // 2, rank % 2), its values differ.
    """

    mesh: Callable[[], DeviceMesh] | None
    placements: tuple[Placement, ...]
    shards: tuple[int, ...]


def _dp() -> DeviceMesh:
    return cases.square()["dp"]


def _tp() -> DeviceMesh:
    return cases.square()["tp"]


PLACES = {
    "plain": Place(None, (), ()),
    "own": Place(None, (), (0, 1)),  # plain, but every rank's is another one: FSDP1's shards, pipeline stages
    "line-replicated": Place(cases.line, (Replicate(),), ()),
    "line-sharded": Place(cases.line, (Shard(0),), (0, 1)),
    "square-sharded": Place(cases.square, (Shard(0), Shard(1)), (0, 1)),
    "square-replicated": Place(cases.square, (Replicate(), Replicate()), ()),
    "hsdp": Place(cases.square, (Replicate(), Shard(0)), (1,)),
    "square-half": Place(cases.square, (Shard(0), Replicate()), (0,)),
    "dp-slice": Place(_dp, (Shard(0),), (0, 1)),
    "tp-slice": Place(_tp, (Shard(0),), (0, 1)),
}
SLICES = ("dp-slice", "tp-slice")
PLAIN = ("plain", "own")


@dataclass(frozen=True)
class Parameter:
    """A parameter: where it lives, of which dtype, and whether its gradients are still to be summed."""

    place: str
    dtype: str = "fp32"
    partial: bool = False


@dataclass(frozen=True)
class Optimizer:
    """An optimizer over some parameters, a param group each."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def has_dtensors(self) -> bool:
        """Whether a parameter lives on a mesh."""
        return any(parameter.place not in PLAIN for parameter in self.parameters)


@dataclass(frozen=True)
class Spot:
    """One gradient of one rank at one step."""

    step: int
    rank: int
    optimizer: int
    parameter: int


@dataclass(frozen=True)
class Program:
    """What four ranks do.

    Args:
        kind: "sharded", "grad" or "world", as `cases.new_scaler` takes them.
        steps: how many updates.
        explicit: (rank, optimizer) pairs that call `unscale_` themselves.
        missing: gradients that are None.
        planted: gradients that hold a non-finite value, and which.
    """

    kind: str
    optimizers: tuple[Optimizer, ...]
    steps: int
    explicit: frozenset[tuple[int, int]] = frozenset()
    missing: frozenset[Spot] = frozenset()
    planted: tuple[tuple[Spot, float], ...] = ()

    def agrees(self, optimizer: int) -> bool:
        """Whether this optimizer's ranks reduce their flag."""
        return self.kind != "grad" or self.optimizers[optimizer].has_dtensors

    def overflows(self, step: int, optimizer: int) -> bool:
        """Whether any rank holds a non-finite value."""
        return any(
            spot not in self.missing and (spot.step, spot.optimizer) == (step, optimizer) for spot, _ in self.planted
        )

    def expected_scales(self) -> list[tuple[str, int]]:
        """Scale and tracker after each update."""
        scale, tracker, trace = INIT_SCALE, 0, []
        for step in range(self.steps):
            tracker += 1
            if any(self.overflows(step, index) for index in range(len(self.optimizers))):
                scale, tracker = scale / 2, 0
            elif tracker >= GROWTH_INTERVAL:
                scale, tracker = scale * 2, 0
            trace.append((scale.hex(), tracker))
        return trace


@dataclass
class Trace:
    """What a program left on one rank; lists run over the steps."""

    scales: list[tuple[str, int]] = field(default_factory=list)
    stepped: list[list[bool | None]] = field(default_factory=list)  # of each optimizer; None: nothing to tell by
    collectives: list[list[int]] = field(default_factory=list)  # of each optimizer, those of `update` last
    digests: list[list[list[str]]] = field(default_factory=list)  # of each optimizer's parameters


def shard_of(rank: int, place: Place) -> int:
    """Return which of the different parts of a parameter `rank` holds."""
    coordinate = (rank // 2, rank % 2)
    return sum(2**dim * coordinate[dim] for dim in place.shards)


def execute(rank: int, program: Program) -> Trace:
    """Run the program on this rank."""
    scaler = cases.new_scaler(program.kind)
    optimizers = [_built(optimizer) for optimizer in program.optimizers]
    trace = Trace()
    for step in range(program.steps):
        scale = scaler.scale(torch.ones(())).item()
        for index, optimizer in enumerate(optimizers):
            _backward(program, Spot(step, rank, index, 0), optimizer, scale)
        _step(program, rank, scaler, optimizers, trace)
        trace.scales.append((float(scaler.get_scale()).hex(), int(scaler._growth_tracker)))
        trace.digests.append([[cases.digest(p) for p in cases.params_of(optimizer)] for optimizer in optimizers])
    return trace


def _step(program: Program, rank: int, scaler: Any, optimizers: Sequence[Any], trace: Trace) -> None:
    counts, stepped = [], []
    for index, optimizer in enumerate(optimizers):
        watched = [p for p in cases.params_of(optimizer) if p.grad is not None]
        before = [cases.digest(p) for p in watched]
        count = 0
        if (rank, index) in program.explicit:
            count = cases.collectives_of(scaler.unscale_, optimizer)
        counts.append(count + cases.collectives_of(scaler.step, optimizer))
        stepped.append([cases.digest(p) for p in watched] != before if watched else None)
    counts.append(cases.collectives_of(scaler.update))
    trace.collectives.append(counts)
    trace.stepped.append(stepped)


def _built(optimizer: Optimizer) -> torch.optim.Optimizer:
    # Groups of one: torch's foreach and fused kernels refuse a DTensor beside a plain tensor, or two meshes.
    groups = [{"params": [_parameter(each)]} for each in optimizer.parameters]
    return cases.new_optimizer(optimizer.name, groups)


def _parameter(parameter: Parameter) -> Tensor:
    place, dtype = PLACES[parameter.place], DTYPES[parameter.dtype]
    if place.mesh is None:
        return cases.plain_param(2, 3, dtype=dtype)
    return cases.dtensor_param(place.mesh(), place.placements, dtype)


def _backward(program: Program, spot: Spot, optimizer: torch.optim.Optimizer, scale: float) -> None:
    planted = dict(program.planted)
    for index, parameter in enumerate(cases.params_of(optimizer)):
        here = Spot(spot.step, spot.rank, spot.optimizer, index)
        described = program.optimizers[spot.optimizer].parameters[index]
        parameter.grad = None
        if here not in program.missing:
            parameter.grad = _gradient(described, parameter, here, scale, planted.get(here))


def _gradient(described: Parameter, parameter: Tensor, spot: Spot, scale: float, planted: float | None) -> Tensor:
    place = PLACES[described.place]
    # Exact in every dtype, and large enough that a step shows in bf16.
    value = (1 + spot.parameter + 4 * shard_of(spot.rank, place)) * 2.0**spot.step * scale
    local = torch.full_like(cases.local_of(parameter.detach()), value)
    if planted is not None:
        local.view(-1)[spot.rank] = planted
    if place.mesh is None:
        return local
    placements = [Partial()] * len(place.placements) if described.partial else place.placements
    return DTensor.from_local(local, place.mesh(), placements, run_check=False)

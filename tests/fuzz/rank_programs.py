"""A program for four ranks as plain data, the model of what must come of it, and how a rank executes it."""

from __future__ import annotations

import math
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

    @property
    def copies(self) -> int:
        """How many of the four ranks hold the same piece, as far as placements tell."""
        sizes = 4 if self.mesh is cases.line else 2
        return 4 // math.prod(sizes for placement in self.placements if placement.is_shard())


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
class Clip:
    """A call of `clip_grad_norm_` on all ranks.

    Args:
        optimizers: their positions.
        fraction: `max_norm` is this part of the norm that the program expects.
        subset: which of their parameters, by position; None: `parameters=` is not given.
    """

    optimizers: tuple[int, ...]
    fraction: float
    order: float = 2.0
    subset: frozenset[int] | None = None
    defer: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether checking, measuring and agreeing is one."""
        return self.order == 2.0 and self.subset is None

    def members(self, program: Program) -> list[tuple[int, int]]:
        """Return which parameters are clipped, as (optimizer, position)."""
        everything = [(o, p) for o in self.optimizers for p in range(len(program.optimizers[o].parameters))]
        return [each for i, each in enumerate(everything) if self.subset is None or i in self.subset]


@dataclass(frozen=True)
class Program:
    """What four ranks do.

    Args:
        kind: "sharded", "grad" or "world", as `cases.new_scaler` takes them.
        steps: how many updates.
        explicit: (rank, optimizer) pairs that call `unscale_` themselves.
        missing: gradients that are None.
        planted: gradients that hold a non-finite value, and which.
        clips: what is clipped in each step, before anything is stepped.
    """

    kind: str
    optimizers: tuple[Optimizer, ...]
    steps: int
    explicit: frozenset[tuple[int, int]] = frozenset()
    missing: frozenset[Spot] = frozenset()
    planted: tuple[tuple[Spot, float], ...] = ()
    clips: tuple[Clip | None, ...] = ()

    def clip_of(self, step: int) -> Clip | None:
        """What is clipped in a step."""
        return self.clips[step] if step < len(self.clips) else None

    def clip_collectives(self, clip: Clip) -> int:
        """How many reductions a clip takes, beside the sums of Partial gradients."""
        together = self.kind != "grad" or any(self.optimizers[index].has_dtensors for index in clip.optimizers)
        alone = 0 if clip.is_joint else sum(self.agrees(index) for index in clip.optimizers)
        return alone + together

    def norm(self, step: int, clip: Clip) -> float:
        """Return the norm of all that the clip is of, each piece once, were nothing planted."""
        total = 0.0
        for optimizer, position in clip.members(self):
            parameter = self.optimizers[optimizer].parameters[position]
            for rank in range(4):
                spot = Spot(step, rank, optimizer, position)
                if spot not in self.missing:
                    values = unscaled(parameter, spot).double() * (4 if parameter.partial else 1)
                    power = torch.linalg.vector_norm(values, clip.order).item()
                    if clip.order == math.inf:
                        total = max(total, power)
                    else:
                        total += power**clip.order / PLACES[parameter.place].copies
        return total if clip.order == math.inf else total ** (1 / clip.order)

    def clip_is_clean(self, step: int, clip: Clip) -> bool:
        """Whether nothing that the clip measures is planted."""
        members = clip.members(self)
        return not any(
            spot.step == step and (spot.optimizer, spot.parameter) in members and spot not in self.missing
            for spot, _ in self.planted
        )

    def agrees(self, optimizer: int) -> bool:
        """Whether this optimizer's ranks reduce their flag."""
        return self.kind != "grad" or self.optimizers[optimizer].has_dtensors

    def overflows(self, step: int, optimizer: int) -> bool:
        """Whether any rank holds a non-finite value, of this optimizer or of one that it is clipped with."""
        clip = self.clip_of(step)
        together = clip.optimizers if clip is not None and optimizer in clip.optimizers else (optimizer,)
        return any(
            spot not in self.missing and spot.step == step and spot.optimizer in together for spot, _ in self.planted
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
    skipped: list[list[bool]] = field(default_factory=list)  # of each optimizer, what `was_skipped` says
    norms: list[float | None] = field(default_factory=list)  # None: nothing was clipped
    clip_collectives: list[int | None] = field(default_factory=list)


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
        trace.norms.append(None)
        trace.clip_collectives.append(None)
        for index, optimizer in enumerate(optimizers):
            _backward(program, Spot(step, rank, index, 0), optimizer, scale)
        clip = program.clip_of(step)
        if clip is not None:
            _clip(program, clip, Spot(step, rank, 0, 0), scaler, optimizers, trace)
        _step(program, rank, scaler, optimizers, trace)
        trace.scales.append((float(scaler.get_scale()).hex(), int(scaler._growth_tracker)))
        trace.digests.append([[cases.digest(p) for p in cases.params_of(optimizer)] for optimizer in optimizers])
    return trace


def _clip(program: Program, clip: Clip, here: Spot, scaler: Any, optimizers: Sequence[Any], trace: Trace) -> None:
    chosen = [optimizers[index] for index in clip.optimizers]
    members = clip.members(program)
    parameters = [cases.params_of(optimizers[o])[p] for o, p in members]
    max_norm, norms = clip.fraction * program.norm(here.step, clip), []
    options = {"defer": True} if clip.defer else {}
    if clip.subset is not None:
        options["parameters"] = parameters
    call = lambda: norms.append(scaler.clip_grad_norm_(chosen, max_norm, clip.order, **options))  # noqa: E731
    trace.clip_collectives[-1] = cases.collectives_of(call)
    trace.norms[-1] = norms[0].item()
    bad = any(program.overflows(here.step, index) for index in clip.optimizers)
    if not bad and not clip.defer:
        _check_clipped(program, clip, here, parameters, (max_norm / (norms[0] + 1e-6)).clamp(max=1.0))


def _check_clipped(program: Program, clip: Clip, here: Spot, parameters: Sequence[Tensor], coefficient: Tensor) -> None:
    """Assert that gradients are what torch's two steps make of them, to the bit: a power of two unscales exactly."""
    for (optimizer, position), parameter in zip(clip.members(program), parameters, strict=True):
        if parameter.grad is not None:
            described = program.optimizers[optimizer].parameters[position]
            want = [unscaled(described, Spot(here.step, here.rank, optimizer, position))]
            if described.partial:
                want[0] *= 4
            torch._foreach_mul_(want, coefficient)
            got = cases.local_of(parameter.grad)
            assert torch.equal(got, want[0]), (optimizer, position, got, want[0])


def _step(program: Program, rank: int, scaler: Any, optimizers: Sequence[Any], trace: Trace) -> None:
    counts, stepped, clip = [], [], program.clip_of(len(trace.stepped))
    for index, optimizer in enumerate(optimizers):
        watched = [p for p in cases.params_of(optimizer) if p.grad is not None]
        before = [cases.digest(p) for p in watched]
        count = 0
        if (rank, index) in program.explicit and (clip is None or index not in clip.optimizers):
            count = cases.collectives_of(scaler.unscale_, optimizer)
        counts.append(count + cases.collectives_of(scaler.step, optimizer))
        stepped.append([cases.digest(p) for p in watched] != before if watched else None)
    trace.skipped.append([scaler.was_skipped(optimizer) for optimizer in optimizers])
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
            parameter.grad = _gradient(described, here, scale, planted.get(here))


def unscaled(described: Parameter, spot: Spot) -> Tensor:
    """Return what a rank holds of a gradient: exact in every dtype, and so large that a step shows in bf16."""
    value = (1 + spot.parameter + 4 * shard_of(spot.rank, PLACES[described.place])) * 2.0**spot.step
    return value * torch.arange(1, 7).view(2, 3).to(DTYPES[described.dtype])


def _gradient(described: Parameter, spot: Spot, scale: float, planted: float | None) -> Tensor:
    place = PLACES[described.place]
    local = unscaled(described, spot) * scale
    if planted is not None:
        local.view(-1)[spot.rank] = planted
    if place.mesh is None:
        return local
    placements = [Partial()] * len(place.placements) if described.partial else place.placements
    return DTensor.from_local(local, place.mesh(), placements, run_check=False)

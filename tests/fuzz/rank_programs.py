"""A program for four ranks as plain data, the model of what must come of it, and how a rank executes it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import cases
import pytest
import torch
from cases import GROWTH_INTERVAL, INIT_SCALE, LEARNING_RATE
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

NO_LIMITS = {"min_scale": 0.0, "max_scale": math.inf, "consecutive_hysteresis": False}
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
    return tuple(_cut(whole, way, PLACES[place].axes, rank) for rank in range(4))


def _cut(piece: Tensor, way: str, axes: Axes, rank: int) -> Tensor:
    dims = [] if way == "plain" else [*zip(way, axes.dims, axes.where(rank), strict=True)]
    for letter, (size, _), index in reversed(dims) if "s" in way else dims:  # TP cuts first
        if letter not in "RP":
            dim = int(letter == "1")
            parts = piece.chunk(size, dim)  # as many as there are elements for
            piece = parts[index] if index < len(parts) else piece.narrow(dim, 0, 0)
    return piece.contiguous()


@dataclass(frozen=True)
class Optimizer:
    """An optimizer over some parameters, a param group each."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def has_dtensors(self) -> bool:
        """Whether a parameter lives on a mesh."""
        return any(parameter.place not in PLAIN for parameter in self.parameters)

    @property
    def moves(self) -> bool:
        """Whether gradients may be placed otherwise than their parameters."""
        return any(parameter.moves for parameter in self.parameters)


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
        refuses: whether a norm that is not finite is an error.
    """

    optimizers: tuple[int, ...]
    fraction: float
    order: float = 2.0
    subset: frozenset[int] | None = None
    defer: bool = False
    refuses: bool = False

    def members(self, program: Program) -> list[tuple[int, int]]:
        """Return which parameters are clipped, as (optimizer, position)."""
        everything = [(o, p) for o in self.optimizers for p in range(len(program.optimizers[o].parameters))]
        return [each for i, each in enumerate(everything) if self.subset is None or i in self.subset]


@dataclass(frozen=True)
class Setting:
    """A call of one of the scaler's setters on all ranks, as a step begins."""

    step: int
    name: str
    value: Any


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
        keeps: whether gradients that are placed alike stay the same tensors, written anew step for step.
        hysteresis: the scaler's at first.
        check_unscaled: the scaler's; its scale is too large for it to find anything.
        settings: what is set on the way; a later one counts.
    """

    kind: str
    optimizers: tuple[Optimizer, ...]
    steps: int
    explicit: frozenset[tuple[int, int]] = frozenset()
    missing: frozenset[Spot] = frozenset()
    planted: tuple[tuple[Spot, float], ...] = ()
    clips: tuple[Clip | None, ...] = ()
    keeps: bool = False
    hysteresis: int = 1
    check_unscaled: bool = False
    settings: tuple[Setting, ...] = ()

    def settings_of(self, step: int) -> dict[str, Any]:
        """What is set in a step."""
        return {each.name: each.value for each in self.settings if each.step == step}

    def clip_of(self, step: int) -> Clip | None:
        """What is clipped in a step."""
        return self.clips[step] if step < len(self.clips) else None

    def clip_collectives(self, step: int, clip: Clip) -> int:
        """How many reductions a clip takes: those of Partial gradients, those of flags, that of the norm."""
        together = self.kind != "grad" or any(self.optimizers[index].has_dtensors for index in clip.optimizers)
        at_once = clip.order == 2.0 and clip.subset is None and not self.check_unscaled
        alone = 0 if at_once else sum(self.agrees(index) for index in clip.optimizers)
        return sum(self._sums(Spot(step, 0, *member)) for member in clip.members(self)) + alone + together

    def _sums(self, spot: Spot) -> int:
        parameter = self.parameter_of(spot)
        if spot in self.missing or "P" not in (way := parameter.way(spot.step)):
            return 0
        dims = PLACES[parameter.place].axes.dims
        return sum(letter == "P" and size > 1 for letter, (size, _) in zip(way, dims, strict=True))

    def parameter_of(self, spot: Spot) -> Parameter:
        """Return whose gradient it is."""
        return self.optimizers[spot.optimizer].parameters[spot.parameter]

    def norm(self, step: int, clip: Clip) -> float:
        """Return the norm of all that the clip is of in fp64, were nothing planted, as one process would take it.

        Where ranks hold different tensors of one name, or shards of such, it is of their mean power.
        """
        powers = [0.0]
        for member in clip.members(self):
            for spot in (Spot(step, rank, *member) for rank in range(4)):
                values = whole(self.parameter_of(spot), spot).double().view(-1)[self._is_there(spot)]
                if values.numel():
                    norm = torch.linalg.vector_norm(values, clip.order).item()
                    powers.append(norm if clip.order == math.inf else norm**clip.order / 4)
        return max(powers) if clip.order == math.inf else sum(powers) ** (1 / clip.order)

    def _is_there(self, spot: Spot) -> Tensor:
        """Tell which elements of the whole gradient, that a rank holds a piece of, some rank has."""
        parameter = self.parameter_of(spot)
        own, there = PLACES[parameter.place].own, torch.zeros(parameter.rows * 3, dtype=torch.bool)
        for rank, piece in enumerate(parameter.held(spot.step)):
            if own.where(rank) == own.where(spot.rank) and replace(spot, rank=rank) not in self.missing:
                there[piece.view(-1)] = True
        return there

    def bad(self, step: int) -> list[Spot]:
        """Return the gradients that hold something non-finite: what is planted needs an element."""
        return [
            spot
            for spot, _ in self.planted
            if spot.step == step
            and spot not in self.missing
            and self.parameter_of(spot).held(step)[spot.rank].numel() > 0
        ]

    def expected_report(self, step: int) -> set[tuple[Spot, str]]:
        """Return what held NaN or Inf, where what a rank held is no term of a sum."""
        values, shown = dict(self.planted), {True: "NaN", False: "Inf"}
        return {(spot, shown[math.isnan(values[spot])]) for spot in self.bad(step) if self.is_told_exactly(spot)}

    def is_told_exactly(self, spot: Spot) -> bool:
        """Whether a gradient is a rank's own when it is checked; a sum that is made for a norm is bad on all ranks."""
        return "P" not in self.parameter_of(spot).way(spot.step)

    def clip_is_clean(self, step: int, clip: Clip) -> bool:
        """Whether nothing that the clip measures is planted."""
        members = clip.members(self)
        return not any((spot.optimizer, spot.parameter) in members for spot in self.bad(step))

    def agrees(self, optimizer: int) -> bool:
        """Whether this optimizer's ranks reduce their flag."""
        return self.kind != "grad" or self.optimizers[optimizer].has_dtensors

    def overflows(self, step: int, optimizer: int) -> bool:
        """Whether any rank holds a non-finite value, of this optimizer or of one that it is clipped with."""
        clip = self.clip_of(step)
        together = clip.optimizers if clip is not None and optimizer in clip.optimizers else (optimizer,)
        return any(spot.optimizer in together for spot in self.bad(step))

    def expected_scales(self) -> list[tuple[str, int]]:
        """Scale and tracker after each update."""
        scale, tracker, strikes, trace = INIT_SCALE, 0, 0, []
        limits = {**NO_LIMITS, "hysteresis": self.hysteresis}
        for step in range(self.steps):
            tracker, limits = tracker + 1, limits | self.settings_of(step)
            if any(self.overflows(step, index) for index in range(len(self.optimizers))):
                strikes += 1
                scale, tracker = scale / 2 if strikes >= limits["hysteresis"] else scale, 0
            elif tracker >= GROWTH_INTERVAL:
                scale, tracker, strikes = scale * 2, 0, 0
            elif limits["consecutive_hysteresis"]:
                strikes = 0
            scale = min(max(scale, limits["min_scale"]), limits["max_scale"])
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
    reports: list[set[tuple[Spot, str]]] = field(default_factory=list)  # what ranks tell each other of the last skip


def execute(rank: int, program: Program) -> Trace:
    """Run the program on this rank."""
    scaler = cases.new_scaler(program.kind, hysteresis=program.hysteresis, check_unscaled=program.check_unscaled)
    optimizers = [_built(optimizer) for optimizer in program.optimizers]
    trace, kept = Trace(), {}
    for step in range(program.steps):
        for name, value in program.settings_of(step).items():
            getattr(scaler, f"set_{name}")(value)
        scale = scaler.scale(torch.ones(())).item()
        trace.norms.append(None)
        trace.clip_collectives.append(None)
        for index, optimizer in enumerate(optimizers):
            _backward(program, Spot(step, rank, index, 0), optimizer, scale, kept)
        clip = program.clip_of(step)
        if clip is not None:
            _clip(program, clip, Spot(step, rank, 0, 0), scaler, optimizers, trace)
        _step(program, rank, scaler, optimizers, trace)
        trace.scales.append((float(scaler.get_scale()).hex(), int(scaler._growth_tracker)))
        trace.reports.append(_reported(program, step, scaler, optimizers))
        trace.digests.append([[cases.digest(p) for p in cases.params_of(optimizer)] for optimizer in optimizers])
    return trace


def _clip(program: Program, clip: Clip, here: Spot, scaler: Any, optimizers: Sequence[Any], trace: Trace) -> None:
    chosen = [optimizers[index] for index in clip.optimizers]
    members = clip.members(program)
    parameters = [cases.params_of(optimizers[o])[p] for o, p in members]
    max_norm, norms = clip.fraction * program.norm(here.step, clip), []
    options = {"parameters": None if clip.subset is None else parameters, "defer": clip.defer}

    def call() -> None:
        refused = clip.refuses and not program.clip_is_clean(here.step, clip)
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped") if refused else nullcontext():
            norms.append(scaler.clip_grad_norm_(chosen, max_norm, clip.order, clip.refuses, **options))

    trace.clip_collectives[-1] = cases.collectives_of(call)
    trace.norms[-1] = norms[0].item() if norms else math.inf
    bad = any(program.overflows(here.step, index) for index in clip.optimizers)
    if not bad and not clip.defer:
        _check_clipped(program, clip, here, parameters, (max_norm / (norms[0] + 1e-6)).clamp(max=1.0))


def _check_clipped(program: Program, clip: Clip, here: Spot, parameters: Sequence[Tensor], coefficient: Tensor) -> None:
    """Assert that gradients are what torch's two steps make of them, to the bit: a power of two unscales exactly."""
    for member, parameter in zip(clip.members(program), parameters, strict=True):
        if parameter.grad is not None:
            spot = Spot(here.step, here.rank, *member)
            want = [_piece(program.parameter_of(spot), spot)]
            torch._foreach_mul_(want, coefficient)
            got = cases.local_of(parameter.grad)
            assert torch.equal(got, want[0]), (member, got, want[0])


def _step(program: Program, rank: int, scaler: Any, optimizers: Sequence[Any], trace: Trace) -> None:
    counts, stepped, clip = [], [], program.clip_of(len(trace.stepped))
    for index, optimizer in enumerate(optimizers):
        watched = [p for p in cases.params_of(optimizer) if p.grad is not None and cases.local_of(p).numel()]
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


def _reported(program: Program, step: int, scaler: Any, optimizers: Sequence[Any]) -> set[tuple[Spot, str]]:
    if not program.bad(step):
        return set()
    named = [
        (f"{o} {p}", each)
        for o, optimizer in enumerate(optimizers)
        for p, each in enumerate(cases.params_of(optimizer))
    ]
    report = scaler.overflow_report(named, gather=True)
    assert report.update == step + 1
    return {(Spot(step, each.rank, *map(int, each.name.split())), each.kinds) for each in report.bad}


class Local(torch.optim.Optimizer):
    """An optimizer of one's own that takes gradients however they are placed: torch's refuse some."""

    def __init__(self, params: Any, fused: bool) -> None:
        super().__init__(params, {})
        self._step_supports_amp_scaling = fused

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if not getattr(self, "found_inf", False):
            for parameter in cases.params_of(self):
                if parameter.grad is not None:
                    cases.local_of(parameter).sub_(LEARNING_RATE)


def _built(optimizer: Optimizer) -> torch.optim.Optimizer:
    # Groups of one: torch's foreach and fused kernels refuse a DTensor beside a plain tensor, or two meshes.
    groups = [{"params": [_parameter(each)]} for each in optimizer.parameters]
    if optimizer.name.startswith("local"):
        return Local(groups, optimizer.name == "local-fused")
    return cases.new_optimizer(optimizer.name, groups)


def _parameter(described: Parameter) -> Tensor:
    ones = torch.ones(described.rows, 3, dtype=DTYPES[described.dtype])
    place = PLACES[described.place]
    if place.mesh is None:
        return torch.nn.Parameter(ones)
    local = _cut(ones, place.letters, place.axes, place.mesh().get_rank())
    return torch.nn.Parameter(_distributed(described, local, place.letters))


def _distributed(described: Parameter, local: Tensor, way: str) -> Tensor:
    mesh, placements = PLACES[described.place].mesh, [LETTERS[letter] for letter in way]
    assert mesh is not None
    size = {"shape": torch.Size((described.rows, 3)), "stride": (3, 1)}
    return DTensor.from_local(local, mesh(), placements, run_check=False, **size)


def _backward(
    program: Program, spot: Spot, optimizer: torch.optim.Optimizer, scale: float, kept: dict[Any, Tensor]
) -> None:
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


def whole(described: Parameter, spot: Spot) -> Tensor:
    """Return all of a gradient: exact in every dtype, a term of a sum too, and so large that a step shows in bf16."""
    own = sum(PLACES[described.place].own.where(spot.rank))
    value = (1 + spot.parameter + 4 * own) * 2.0**spot.step
    return value * torch.arange(1, described.rows * 3 + 1).view(-1, 3).to(DTYPES[described.dtype])


def _piece(described: Parameter, spot: Spot) -> Tensor:
    """Return what a rank holds of a gradient."""
    return _cut(whole(described, spot), described.way(spot.step), PLACES[described.place].axes, spot.rank)


def _gradient(described: Parameter, spot: Spot, scale: float, planted: float | None) -> Tensor:
    local, way = _piece(described, spot) * scale, described.way(spot.step)
    if planted is not None and local.numel():
        local.view(-1)[spot.rank % local.numel()] = planted
    if way in ("", "plain"):
        return local
    for letter, (size, _) in zip(way, PLACES[described.place].axes.dims, strict=True):
        local /= size if letter == "P" else 1  # a term of the sum
    return _distributed(described, local, way)

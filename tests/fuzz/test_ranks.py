"""Random programs on four ranks: all step or none, all hold the same scale, nobody waits, one collective a step."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import cases
import rank_programs
from cases import INIT_SCALE
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import given, seed
from hypothesis import strategies as st
from rank_programs import PLACES, PLAIN, SLICES, SQUARE, Clip, Optimizer, Parameter, Program, Setting, Spot, Trace

from scaler_triton.demo.ranks import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE_LIMIT = 30.0  # Seconds: the watchdog. A program takes a tenth of one.
RANKS = range(4)
NONFINITE = [float("inf"), float("-inf"), float("nan")]
EVERYWHERE = ["sgd", "sgd-foreach", "adam", "adamw", "adamw-foreach", "adamw-fused", "adam-fused", "adagrad"]
# torch has no DTensor rule for these.
ON_PLAIN = ["sgd-fused", "adagrad-fused"]
# They take gradients that are placed otherwise than a parameter that is cut, and plain ones beside a DTensor.
ON_MOVED = ["local", "local-fused"]


@st.composite
def parameters(draw: Any, kind: str, moving: bool) -> Parameter:
    place = draw(st.sampled_from([name for name in PLACES if name != "own" or kind != "grad"]))
    # GradScaler refuses fp16 gradients.
    dtype = draw(st.sampled_from(["fp32", "fp32", "fp64", "bf16"] + (["fp16"] if kind == "sharded" else [])))
    rows = draw(st.sampled_from([4, 5, 1]))
    moves = moving and place not in PLAIN
    grads = draw(st.lists(st.sampled_from(ways(place)), min_size=1, max_size=3)) if moves else ()
    return Parameter(place, dtype, rows, tuple(grads))


def ways(place: str) -> list[str]:
    """Return how gradients of a parameter can be placed."""
    words = ["".join(letters) for letters in itertools.product("RP01", repeat=len(PLACES[place].letters))]
    return words + ["plain"] * is_whole(place) + ["s0"] * (PLACES[place].axes is SQUARE)


def is_whole(place: str) -> bool:
    """Whether each rank holds all of a parameter."""
    return set(PLACES[place].letters) <= {"R"}


@st.composite
def optimizers(draw: Any, kind: str, moving: bool) -> Optimizer:
    members = draw(st.lists(parameters(kind, moving or draw(st.booleans())), min_size=1, max_size=4))
    on_meshes = [each.place for each in members if each.place not in PLAIN]
    if kind == "grad" and on_meshes and len(set(on_meshes)) == 1 and on_meshes[0] in SLICES:
        # Alone, a slice asks its own group only: by design the others may then hold another scale.
        members.append(Parameter("line-replicated"))
    names = EVERYWHERE if on_meshes else EVERYWHERE + ON_PLAIN
    if any((each.moves and not is_whole(each.place)) or "plain" in each.grads for each in members):
        names = ON_MOVED
    return Optimizer(draw(st.sampled_from(names)), tuple(members))


def is_shared(parameter: Parameter) -> bool:
    """Whether all ranks must have this gradient, or none: copies would part, or a sum wait for a term."""
    return parameter.moves or PLACES[parameter.place].has_copies


@st.composite
def programs(draw: Any, moving: bool) -> Program:
    """Draw a program; if `moving`, one of several steps with a clip in each, whose gradients all move."""
    kind = draw(st.sampled_from(["sharded", "grad", "world"]))
    chosen = tuple(draw(st.lists(optimizers(kind, moving), min_size=1, max_size=3)))
    bare = Program(kind, chosen, draw(st.integers(2 if moving else 1, 3)))
    explicit = draw(st.frozensets(st.tuples(st.sampled_from(RANKS), st.integers(0, len(chosen) - 1))))
    missing = draw(st.lists(spots(bare), max_size=8))
    planted = draw(st.lists(st.tuples(spots(bare), st.sampled_from(NONFINITE)), max_size=3))
    check_unscaled = draw(st.integers(0, 3)) == 0
    clipping = clips(chosen, deferring=not check_unscaled)
    return Program(
        kind,
        chosen,
        bare.steps,
        frozenset(pair for rank, index in explicit for pair in unscaling(chosen[index], rank, index)),
        frozenset(each for spot in missing for each in spread(bare, spot, missing=True)),
        tuple((each, value) for spot, value in planted for each in spread(bare, spot, missing=False)),
        tuple(draw(clipping if moving else st.none() | clipping) for _ in range(bare.steps)),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2, 3])),
        check_unscaled,
        tuple(draw(st.lists(settings_on_the_way(bare.steps), max_size=3))),
    )


def settings_on_the_way(steps: int) -> st.SearchStrategy[Setting]:
    """Draw what is set on all ranks; the first scale lies at a bound or within."""
    values = {
        "min_scale": st.sampled_from([1.0, INIT_SCALE]),
        "max_scale": st.sampled_from([INIT_SCALE, 64.0]),
        "hysteresis": st.integers(1, 3),
        "consecutive_hysteresis": st.booleans(),
    }
    each = [st.builds(Setting, st.integers(0, steps - 1), st.just(name), drawn) for name, drawn in values.items()]
    return st.one_of(each)


@st.composite
def clips(draw: Any, chosen: tuple[Optimizer, ...], deferring: bool) -> Clip:
    taken = tuple(draw(st.permutations(range(len(chosen)))))[: draw(st.integers(1, len(chosen)))]
    defer = deferring and draw(st.booleans()) and all(chosen[index].name.endswith("-fused") for index in taken)
    subset = draw(st.none() | st.none() | st.frozensets(st.integers(0, 8)))
    order = draw(st.sampled_from([2.0, 2.0, math.inf, 1.0, 3.0]))
    # Half the norm: what is clipped to less would not show in bf16.
    fraction = draw(st.sampled_from([0.5, 2.0]))
    how = (2.0, None, True) if defer else (order, subset, False)
    return Clip(taken, fraction, *how, draw(st.booleans()))


def unscaling(optimizer: Optimizer, rank: int, index: int) -> list[tuple[int, int]]:
    """Return who calls `unscale_`: all or none where terms of a sum are still to be added, scaled ones to scaled."""
    return [(each, index) for each in (RANKS if optimizer.moves else [rank])]


@st.composite
def spots(draw: Any, program: Program) -> Spot:
    optimizer = draw(st.integers(0, len(program.optimizers) - 1))
    parameter = draw(st.integers(0, len(program.optimizers[optimizer].parameters) - 1))
    return Spot(draw(st.integers(0, program.steps - 1)), draw(st.sampled_from(RANKS)), optimizer, parameter)


def spread(program: Program, spot: Spot, *, missing: bool) -> list[Spot]:
    """Return the spots that go with one: on all ranks where these hold equal gradients."""
    everywhere = [Spot(spot.step, rank, spot.optimizer, spot.parameter) for rank in RANKS]
    if not program.agrees(spot.optimizer):  # as under DDP; without any gradient `step` would raise as torch's
        return [] if missing else everywhere
    if missing and is_shared(program.parameter_of(spot)):
        return everywhere
    return [spot]


def check(program: Program, traces: list[Trace]) -> None:
    """Assert what must hold of all ranks."""
    for rank, trace in enumerate(traces):
        assert trace.scales == program.expected_scales(), f"scale on rank {rank}"
        for step in range(program.steps):
            check_step(program, rank, step, trace)
    for step in range(program.steps):
        reports = [trace.reports[step] for trace in traces]
        assert all(report == reports[0] for report in reports), f"reports of step {step} differ"
        told = {(spot, kinds) for spot, kinds in reports[0] if program.is_told_exactly(spot)}
        assert told == program.expected_report(step), f"report of step {step}"
        assert len({repr(trace.norms[step]) for trace in traces}) == 1, f"norms of step {step} differ"
        for index, optimizer in enumerate(program.optimizers):
            check_copies(optimizer, [trace.digests[step][index] for trace in traces], f"step {step}, optimizer {index}")


def check_step(program: Program, rank: int, step: int, trace: Trace) -> None:
    *counts, of_update = trace.collectives[step]
    assert of_update == 0
    clip = program.clip_of(step)
    if clip is not None:
        check_clip(program, rank, step, trace, clip)
    for index, optimizer in enumerate(program.optimizers):
        where = f"rank {rank}, step {step}, optimizer {index}"
        assert trace.skipped[step][index] == program.overflows(step, index), where
        assert trace.stepped[step][index] in (None, not program.overflows(step, index)), where
        if not optimizer.moves or optimizer.name in ON_MOVED:  # else it makes them as its parameters are
            clipped = clip is not None and index in clip.optimizers
            assert counts[index] == int(program.agrees(index) and not clipped), where


def check_clip(program: Program, rank: int, step: int, trace: Trace, clip: Clip) -> None:
    where = f"rank {rank}, step {step}"
    norm = trace.norms[step]
    assert norm is not None
    if program.clip_is_clean(step, clip):
        assert norm == pytest.approx(program.norm(step, clip), rel=1e-6), where
    else:
        assert not math.isfinite(norm), where
    assert trace.clip_collectives[step] == program.clip_collectives(step, clip), where


def check_copies(optimizer: Optimizer, digests: list[list[str]], where: str) -> None:
    for position, parameter in enumerate(optimizer.parameters):
        own, parts = PLACES[parameter.place].own, {}
        pieces = replace(parameter, grads=()).held(0)
        for rank in RANKS:
            part = (own.where(rank), *pieces[rank].view(-1).tolist())
            parts.setdefault(part, set()).add(digests[rank][position])
        assert all(len(same) == 1 for same in parts.values()), f"{where}, parameter {position}: copies differ"


def run(pool: RankPool, program: Program) -> list[Trace]:
    """Run a program on all ranks; one that raises or hangs anywhere fails, with the stacks of all."""
    results = pool.run(cases.strictly, rank_programs.execute, (program,), {}, timeout=CASE_LIMIT)
    errors = [f"rank {result.rank}: {result.traceback}" for result in results if not result.ok]
    assert not errors, "\n".join(errors)
    return [result.value for result in results]


@pytest.mark.parametrize("chunk", chunks(in_ci=75, share=0.05), ids=str)
@pytest.mark.parametrize("moving", [False, True], ids=["any", "moving"])
def test_programs_on_four_ranks(pool: RankPool, chunk: Chunk, moving: bool) -> None:
    @seed(chunk.seed)
    @settings_for(chunk.programs)
    @given(programs(moving))
    def all_agree(program: Program) -> None:
        check(program, run(pool, program))

    all_agree()

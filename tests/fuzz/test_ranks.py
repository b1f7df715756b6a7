"""Random programs on four ranks: all step or none, all hold the same scale, nobody waits, one collective a step."""

import math
from dataclasses import replace
from typing import Any

import pytest
from fuzz_profile import Chunk, cases
from hypothesis import strategies as st
from rank_execution import execute
from rank_model import Trace, check, found_apart
from rank_programs import ON_MOVED, PLACES, PLAIN, RANKS, Clip, Optimizer, Parameter, Program, Setting, Split, Spot
from ranks.cases import FUSED_ADAGRAD, INIT_SCALE, strictly

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE_LIMIT = 30.0  # Seconds: the watchdog. A program takes a tenth of one.
SHAPES = [("any", 85, 0.05), ("moving", 85, 0.05), ("long", 80, 0.05)]
NONFINITE = [float("inf"), float("-inf"), float("nan")]
EVERYWHERE = ["sgd", "sgd-foreach", "adam", "adamw", "adamw-foreach", "adamw-fused", "adam-fused", "adagrad"]
# torch has no DTensor rule for these.
ON_PLAIN = ["sgd-fused", *FUSED_ADAGRAD]
KINDS = st.sampled_from(["guard", "guard", "sharded", "grad", "world"])
STEPS = {"any": (1, 3), "moving": (2, 3), "long": (4, 8)}


@st.composite
def programs(draw: Any, shape: str) -> Program:
    """Draw a program of some shape.

    "any" is short, of whatever there is. "moving" has several steps with a clip in each, and its gradients all move.
    "long" has many steps and overflows but few parameters, so that limits and counters matter.
    """
    kind, long = draw(KINDS), shape == "long"
    optimizer = optimizers(kind, shape == "moving", members=2 if long else 4)
    chosen = tuple(draw(st.lists(optimizer, min_size=1, max_size=2 if long else 3)))
    program = draw(habits(Program(kind, chosen, draw(st.integers(*STEPS[shape])))))
    if kind == "guard":  # norms grow and shrink from step to step, and no few of them spike
        numbers = {"spike_sigma": [0.5, 1.0, 3.0, None], "window": [2, 3, 8]}
        program = replace(program, **{name: draw(st.sampled_from(values)) for name, values in numbers.items()})
        if program.spike_sigma is not None:  # each would be judged, too
            program = replace(program, given_up=frozenset())
    if long:
        limits = {"hysteresis": [2, 3, 1], "max_consecutive_skips": [0, 1, 2, None]}
        drawn = {name: draw(st.sampled_from(values)) for name, values in limits.items()}
        program = replace(program, planted=draw(overflows_in_most_steps(program)), **drawn)
    clip = clips(program)
    if long:
        clip = st.none() | st.none() | st.none() | clip  # each `st.none()` is an alternative of its own
    elif shape == "any":
        clip = st.none() | clip
    program = replace(program, clips=tuple(draw(clip) for _ in range(program.steps)))
    return program if kind == "guard" else draw(splits(program))


@st.composite
def optimizers(draw: Any, kind: str, moving: bool, members: int = 4) -> Optimizer:
    held = draw(st.lists(parameters(kind, moving or draw(st.booleans())), min_size=1, max_size=members))
    on_meshes = [each.place for each in held if each.place not in PLAIN]
    if kind == "grad" and len(set(on_meshes)) == 1 and PLACES[on_meshes[0]].own:
        # Alone, a slice asks its own group only: by design the others may then hold another scale.
        held.append(Parameter("line-replicated"))
    names = EVERYWHERE if on_meshes else EVERYWHERE + ON_PLAIN
    if any((each.grads and not PLACES[each.place].is_whole) or "plain" in each.grads for each in held):
        names = ON_MOVED
    return Optimizer(draw(st.sampled_from(names)), tuple(held))


@st.composite
def parameters(draw: Any, kind: str, moving: bool) -> Parameter:
    place = draw(st.sampled_from([name for name in PLACES if name != "own" or kind != "grad"]))
    # GradScaler refuses fp16 gradients.
    dtype = draw(st.sampled_from(["fp32", "fp32", "fp64", "bf16"] + (["fp16"] if kind in ("sharded", "guard") else [])))
    rows = draw(st.sampled_from([4, 5, 1]))
    moves = moving and place not in PLAIN
    grads = draw(st.lists(st.sampled_from(PLACES[place].ways), min_size=1, max_size=3)) if moves else ()
    return Parameter(place, dtype, rows, tuple(grads))


@st.composite
def habits(draw: Any, bare: Program) -> Program:
    """Draw all but clips and a split, with few overflows."""
    chosen = bare.optimizers
    explicit = draw(st.frozensets(st.tuples(st.sampled_from(RANKS), st.integers(0, len(chosen) - 1))))
    missing = draw(st.lists(spots(bare), max_size=8))
    bad = draw(st.lists(st.tuples(spots(bare), st.sampled_from(NONFINITE)), max_size=3))
    return replace(
        bare,
        # All ranks unscale, or none, where terms of a sum are still to be added: scaled ones to scaled ones.
        explicit=frozenset((each, i) for rank, i in explicit for each in (RANKS if chosen[i].moves else [rank])),
        missing=frozenset(each for spot in missing for each in spread(bare, spot, missing=True)),
        planted=tuple((each, value) for spot, value in bad for each in spread(bare, spot, missing=False)),
        keeps=draw(st.booleans()),
        hysteresis=draw(st.sampled_from([1, 1, 2, 3])),
        settings=tuple(draw(st.lists(settings_on_the_way(bare), max_size=3))),
        given_up=draw(st.frozensets(st.tuples(st.integers(0, bare.steps - 1), st.integers(0, len(chosen) - 1)))),
    )


@st.composite
def overflows_in_most_steps(draw: Any, bare: Program) -> tuple[tuple[Spot, float], ...]:
    bad = [step for step in range(bare.steps) if draw(st.sampled_from([True, True, False]))]
    drawn = [(draw(spots(bare))._replace(step=step), draw(st.sampled_from(NONFINITE))) for step in bad]
    return tuple((each, value) for spot, value in drawn for each in spread(bare, spot, missing=False))


def settings_on_the_way(program: Program) -> st.SearchStrategy[Setting]:
    """Draw what is set on all ranks; the first scale lies at a bound or within."""
    steps = st.integers(0, program.steps - 1)
    values = {
        "min_scale": st.sampled_from([1.0, INIT_SCALE]),
        "max_scale": st.sampled_from([INIT_SCALE, 64.0]),
        "hysteresis": st.integers(1, 3),
        "max_consecutive_skips": st.none() | st.integers(0, 2),
    }
    names = ["max_consecutive_skips"] if program.kind == "guard" else list(values)
    return st.one_of(st.builds(Setting, steps, st.just(name), values[name]) for name in names)


@st.composite
def spots(draw: Any, program: Program) -> Spot:
    optimizer = draw(st.integers(0, len(program.optimizers) - 1))
    parameter = draw(st.integers(0, len(program.optimizers[optimizer].parameters) - 1))
    return Spot(draw(st.integers(0, program.steps - 1)), draw(st.sampled_from(RANKS)), optimizer, parameter)


def spread(program: Program, spot: Spot, *, missing: bool) -> list[Spot]:
    """Return the spots that go with one: on all ranks where these hold equal gradients."""
    everywhere = [spot._replace(rank=rank) for rank in RANKS]
    if not program.agrees(spot.optimizer):  # as under DDP; without any gradient `step` would raise as torch's
        return [] if missing else everywhere
    # Where some ranks lacked a gradient copies would part, or a sum wait for a term.
    parameter = program.parameter_of(spot)
    return everywhere if missing and (parameter.grads or PLACES[parameter.place].has_copies) else [spot]


@st.composite
def clips(draw: Any, program: Program) -> Clip:
    chosen = program.optimizers
    taken = tuple(draw(st.permutations(range(len(chosen)))))[: draw(st.integers(1, len(chosen)))]
    subset = draw(st.none() | st.none() | st.frozensets(st.integers(0, 8)))
    order = draw(st.sampled_from([2.0, 2.0, math.inf, 1.0, 3.0]))
    # Half the norm: what is clipped to less would not show in bf16.
    fraction = draw(st.sampled_from([0.5, 2.0]))
    return Clip(taken, fraction, order, subset, draw(st.booleans()))


@st.composite
def splits(draw: Any, program: Program) -> Program:
    """Draw whether a split ends the program, in a step that reports it."""
    if program.steps == 1 or draw(st.sampled_from([False] * 3 + [True])) is False:
        return program
    factor = draw(st.sampled_from([0.5, 2.0]))  # what is larger would overflow fp16
    split = Split(draw(st.integers(1, program.steps - 1)), draw(st.sampled_from(RANKS)), factor)
    return program if found_apart(program, split) is None else replace(program, split=split)


def run(pool: Any, program: Program) -> list[Trace]:
    """Run a program on all ranks; one that raises or hangs anywhere fails, with the stacks of all."""
    results = pool.run(strictly, execute, (program,), {}, timeout=CASE_LIMIT)
    errors = [f"rank {result.rank}: {result.traceback}" for result in results if not result.ok]
    assert not errors, "\n".join(errors)
    return [result.value for result in results]


@pytest.mark.parametrize(("shape", "chunk"), cases(SHAPES))
def test_programs_on_four_ranks(pools: Any, shape: str, chunk: Chunk) -> None:
    def all_agree(program: Program) -> None:
        check(program, run(pools(4), program))

    chunk.run(all_agree, programs(shape))

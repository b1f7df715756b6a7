"""What must come of a program for four ranks, by rules of its own; and that a program's traces say so."""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import spike_rule
import torch
from rank_programs import ON_MOVED, PLACES, PLAIN, RANKS, Clip, Optimizer, Program, Split, Spot, stand, whole
from ranks.cases import GROWTH_INTERVAL, INIT_SCALE
from specification import Refused, Specification
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import ScalerStats


class After(NamedTuple):
    """What is known after a step's updates, on every rank; `errors`: how those that they raise begin, "Type: text"."""

    scale: float
    tracker: int
    stats: ScalerStats
    errors: list[str]


def expected_updates(program: Program) -> list[After]:
    """Return what the specification's updates leave, by flags on which the ranks agree."""
    numbers = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
    if program.kind == "guard":
        numbers = {"init_scale": 1.0, "growth_interval": 2000}
    scaler = Specification(device="cpu", limits=program.limits, **numbers)
    return [_update(scaler, program, step) for step in range(program.finished)]


def _update(scaler: Specification, program: Program, step: int) -> After:
    bad, errors = [skips(program, step, index) for index in range(len(program.optimizers))], []
    if program.kind == "guard":  # each step ends with its own update, one that failed, too
        for index in range(len(program.optimizers)):
            errors += _update_by(scaler, bad=False) if (step, index) in program.given_up else []
    scaler.set_limits(**program.settings_of(step))
    for each in bad if program.kind == "guard" else [any(bad)]:
        errors += _update_by(scaler, each)
    spikes = sum(len(spikes) for spikes in judged(program).spikes[: step + 1])
    stats = ScalerStats(**{**vars(scaler.stats()), "spikes": spikes})
    return After(scaler.get_scale(), scaler._get_growth_tracker(), stats, errors)


def _update_by(scaler: Specification, bad: bool) -> list[str]:
    """Update by one flag; return how the error begins that this raises, if any."""
    flag = torch.tensor(float(bad))
    scaler.scale(torch.ones(()))
    scaler._per_optimizer_states[0].update(stage=OptState.STEPPED, found_inf_per_device={flag.device: flag})
    try:
        scaler.update()
    except Refused as refused:
        return [f"{refused.error.__name__}: {refused.begin}"]
    return []


class Judged(NamedTuple):
    """What a guard makes of the norms of a program's steps; nothing if it looks for no spikes."""

    spiking: set[tuple[int, int]]  # (step, optimizer) pairs that are skipped for a spike
    spikes: list[list[tuple[int, float, float]]]  # of each step: the first optimizer, the norm, its limit
    windows: list[list[list[float]]]  # of each step and optimizer, after it


@functools.cache
def judged(program: Program) -> Judged:
    """Return how a guard judges; the norm of a joint clip stands in the window of the first of its optimizers."""
    spiking, spikes, windows = set(), [], []
    seen: list[list[float]] = [[] for _ in program.optimizers]

    def judge(step: int, together: tuple[int, ...]) -> tuple[float, float] | None:
        window, total = seen[together[0]], norm(program, step, Clip(together, 1.0))
        limit = spike_rule.limit_after(window, program.spike_sigma, program.window)
        window.append(spike_rule.entering(total, limit))
        return (total, limit) if total > limit else None

    for step in range(program.finished if program.spike_sigma is not None else 0):
        spikes.append([])
        for together in _measured(program, step):
            spike = None if program.overflows(step, together) else judge(step, together)
            if spike is not None:
                spikes[step].append((together[0], *spike))
                spiking |= {(step, each) for index in together for each in _skipped_with(program, step, index)}
        windows.append([list(each[-program.window :]) for each in seen])
    return Judged(spiking, spikes, windows)


def _measured(program: Program, step: int) -> list[tuple[int, ...]]:
    """Return the optimizers of which a step takes the norm, those together that one norm is of."""
    clip = program.clip_of(step)
    joint = clip.optimizers if clip is not None and clip.is_at_once else ()
    return [each for each in (joint, *((i,) for i in range(len(program.optimizers)) if i not in joint)) if each]


def _skipped_with(program: Program, step: int, optimizer: int) -> tuple[int, ...]:
    clip = program.clip_of(step, optimizer)
    return (optimizer,) if clip is None else clip.optimizers


def skips(program: Program, step: int, optimizer: int) -> bool:
    """Return whether a step is skipped, for this optimizer's gradients or for those that it is clipped with."""
    bad = program.overflows(step, _skipped_with(program, step, optimizer))
    return bad or (step, optimizer) in judged(program).spiking


def steps_taken(program: Program, rank: int, optimizer: int) -> int:
    """Return the most steps that a parameter has taken: one without a gradient takes none."""
    stepped = [step for step in range(program.finished) if not skips(program, step, optimizer)]
    parameters = range(len(program.optimizers[optimizer].parameters))
    return max(sum(Spot(step, rank, optimizer, each) not in program.missing for step in stepped) for each in parameters)


def found_apart(program: Program, split: Split) -> tuple[str, str] | None:
    """Return the call that raises on every rank after a split, and how its text begins; None: none does in this step.

    A step that reads the flag on the host does; after one that leaves that to its optimizer, `was_skipped` does.
    """
    expected = {i: text for i in range(len(program.optimizers)) if (text := _compared(program, split, i)) is not None}
    if not expected:
        return None
    first = min(expected, key=lambda index: program.optimizers[index].takes_flag)
    call = "was_skipped" if program.optimizers[first].takes_flag else "step"
    return f"{call} {first}", f"The ranks hold different scales, {expected[first]}: "


def _compared(program: Program, split: Split, optimizer: int) -> str | None:
    """Return what the reduction of an optimizer's flag says of the scales, None where nothing is reduced."""
    one = expected_updates(program)[split.step - 1].scale
    other = one * split.factor
    clip = program.clip_of(split.step, optimizer)
    if clip is None or not clip.is_at_once:
        return f"from {min(one, other)} to {max(one, other)}" if program.agrees(optimizer) else None
    if not program.clip_agrees(clip):
        return None
    mean, harmonic = (3 * one + other) / 4, 4 / (3 / one + 1 / other)
    return f"some below {harmonic:g}, some above {mean:g}"


def expected_report(program: Program, step: int) -> set[tuple[Spot, str]]:
    """Return what held NaN or Inf, where what a rank held is no term of a sum."""
    values, shown = dict(program.planted), {True: "NaN", False: "Inf"}
    causes = _causes(program, step)
    bad = [spot for spot in program.bad(step) if spot.optimizer in causes]
    expected = [spot for spot in bad if is_reported_exactly(program, spot)]
    return {(spot, shown[math.isnan(values[spot])]) for spot in expected}


def _causes(program: Program, step: int) -> tuple[int, ...]:
    """Return the optimizers that may be the cause of the last skip in a step: a guard's steps skip one by one."""
    every = range(len(program.optimizers))
    last = max((index for index in every if skips(program, step, index)), default=None)
    return tuple(every) if program.kind != "guard" or last is None else _skipped_with(program, step, last)


def is_reported_exactly(program: Program, spot: Spot) -> bool:
    """Whether a gradient is a rank's own when it is checked; a sum that is made for a norm is bad on all ranks."""
    return "P" not in program.parameter_of(spot).way(spot.step)


def clip_collectives(program: Program, step: int, clip: Clip) -> int:
    """How many reductions a clip takes: those of Partial gradients, those of flags, that of the norm."""
    alone = 0 if clip.is_at_once else sum(program.agrees(index) for index in clip.optimizers)
    whole = replace(clip, subset=None) if program.spike_sigma is not None else clip  # its check is by the norm, too
    sums = sum(_sums(program, Spot(step, 0, *member)) for member in whole.members(program))
    return sums + alone + program.clip_agrees(clip)


def check_collectives(program: Program, step: int, optimizer: int) -> int:
    """How many reductions a check takes: that of the flag or of a guard's norm, and for it those of Partial ones."""
    members = range(len(program.optimizers[optimizer].parameters)) if program.spike_sigma is not None else ()
    return program.agrees(optimizer) + sum(_sums(program, Spot(step, 0, optimizer, each)) for each in members)


def _sums(program: Program, spot: Spot) -> int:
    parameter = program.parameter_of(spot)
    if spot in program.missing or "P" not in (way := parameter.way(spot.step)):
        return 0
    dims = PLACES[parameter.place].axes
    return sum(letter == "P" and size > 1 for letter, (size, _) in zip(way, dims, strict=True))


def norm(program: Program, step: int, clip: Clip) -> float:
    """Return the norm of all that the clip is of in fp64, were nothing planted, as one process would take it.

    Where ranks hold different tensors of one name, or shards of such, it is of their mean power.
    """
    powers = [0.0]
    for member in clip.members(program):
        for spot in (Spot(step, rank, *member) for rank in RANKS):
            values = whole(program.parameter_of(spot), spot).double().view(-1)[_is_there(program, spot)]
            if values.numel():
                length = torch.linalg.vector_norm(values, clip.order).item()
                powers.append(length if clip.order == math.inf else length**clip.order / 4)
    return max(powers) if clip.order == math.inf else sum(powers) ** (1 / clip.order)


def _is_there(program: Program, spot: Spot) -> Tensor:
    """Return which elements of the whole gradient, that a rank holds a piece of, some rank has."""
    parameter = program.parameter_of(spot)
    own, there = PLACES[parameter.place].own, torch.zeros(parameter.rows * 3, dtype=torch.bool)
    for rank, held in enumerate(parameter.held(spot.step)):
        if stand(own, rank) == stand(own, spot.rank) and spot._replace(rank=rank) not in program.missing:
            there[held.view(-1)] = True
    return there


@dataclass
class StepTrace:
    """What a step left on one rank; lists run over the optimizers."""

    clipped: tuple[float, int] | None = None  # to which norm, by how many collectives
    collectives: list[int] = field(default_factory=list)
    stepped: list[bool | None] = field(default_factory=list)  # None: nothing shows it
    skipped: list[bool] = field(default_factory=list)  # as `was_skipped` says
    update_collectives: int = 0
    errors: list[str] = field(default_factory=list)  # of updates, as "Type: first line"
    scale: tuple[float, int] = (0.0, 0)  # and the tracker
    stats: ScalerStats | None = None
    report: set[tuple[Spot, str]] = field(default_factory=set)  # what the ranks report of a skip
    spikes: list[tuple[float, float]] = field(default_factory=list)  # what they report of its spikes
    windows: list[list[float]] = field(default_factory=list)  # the norms that a guard remembers
    digests: list[list[str]] = field(default_factory=list)  # of the parameters


@dataclass
class Trace:
    """What a program left on one rank."""

    steps: list[StepTrace] = field(default_factory=list)
    apart: tuple[str, str] | None = None  # which call raised in the step of a split, and what
    step_counts: list[float | None] = field(default_factory=list)  # of each optimizer at the end; None: keeps none
    audited: tuple[str, list[str], list[str]] | None = None  # at the end: the verdict, what differs, what was compared


def check(program: Program, traces: list[Trace]) -> None:
    expected = expected_updates(program)
    for step, after in enumerate(expected):
        seen = [trace.steps[step] for trace in traces]
        for rank, left in enumerate(seen):
            check_step(program, step, left, after, f"rank {rank}, step {step}")
        check_together(program, step, seen, f"step {step}")
    check_apart(program, traces)
    check_audit(program, traces)


def check_step(program: Program, step: int, left: StepTrace, after: After, where: str) -> None:
    assert (left.scale, left.stats) == ((after.scale, after.tracker), after.stats), where
    assert len(left.errors) == len(after.errors), (where, left.errors, after)
    assert all(map(str.startswith, left.errors, after.errors)), (where, left.errors, after)
    assert left.update_collectives == 0, where
    clip = program.clip_of(step)
    if clip is not None:
        measured, collectives = left.clipped
        assert collectives == clip_collectives(program, step, clip), where
        if program.clip_is_clean(step, clip):
            assert measured == pytest.approx(norm(program, step, clip), rel=1e-6), where
        else:
            assert not math.isfinite(measured), where
    for index, optimizer in enumerate(program.optimizers):
        assert left.skipped[index] == skips(program, step, index), (where, index)
        assert left.stepped[index] in (None, not skips(program, step, index)), (where, index)
        if not optimizer.moves or optimizer.name in ON_MOVED:  # else it makes them as its parameters are
            is_clipped = program.clip_of(step, index) is not None
            wanted = 0 if is_clipped else check_collectives(program, step, index)
            assert left.collectives[index] == wanted, (where, index)


def _nearly(spike: tuple[float, float]) -> tuple[float, float]:
    """Return norm and limit so that rounding does not order spikes of equal norms."""
    return float(f"{spike[0]:.4g}"), spike[1]


def check_together(program: Program, step: int, seen: list[StepTrace], where: str) -> None:
    """All ranks tell the same, to the bit; of a guard's norms what the rule says."""
    first = seen[0]
    for left in seen:
        assert (left.report, left.errors, left.spikes) == (first.report, first.errors, first.spikes), where
        assert (left.windows, repr(left.clipped)) == (first.windows, repr(first.clipped)), where
    exact = {(spot, kinds) for spot, kinds in first.report if is_reported_exactly(program, spot)}
    assert exact == expected_report(program, step), where
    for index, optimizer in enumerate(program.optimizers):
        check_copies(optimizer, [left.digests[index] for left in seen], f"{where}, optimizer {index}")
    if program.spike_sigma is not None:
        expected, causes = judged(program), _causes(program, step)
        caused = [spike for index, *spike in expected.spikes[step] if index in causes]
        found, want = (sorted(map(tuple, each), key=_nearly) for each in (first.spikes, caused))
        assert found == [pytest.approx(each, rel=1e-6) for each in want], where
        assert first.windows == [pytest.approx(each, rel=1e-6) for each in expected.windows[step]], where


def check_apart(program: Program, traces: list[Trace]) -> None:
    expected = None if program.split is None else found_apart(program, program.split)
    for rank, trace in enumerate(traces):
        assert (expected is None) == (trace.apart is None), f"rank {rank} raised {trace.apart}, not {expected}"
        if expected is not None and trace.apart is not None:
            assert trace.apart[0] == expected[0], f"rank {rank}: {trace.apart}, not {expected}"
            assert trace.apart[1].startswith(expected[1]), f"rank {rank}: {trace.apart}, not {expected}"


def check_audit(program: Program, traces: list[Trace]) -> None:
    said = traces[0].audited
    assert said is not None
    assert all(trace.audited == said for trace in traces), "the ranks' reports differ"
    verdict, differences, compared = said
    if program.split is not None:
        assert verdict == "split"
        assert differences[0].startswith("scale: "), said
        return
    name = "steps of {} (" if len(program.optimizers) > 1 else "steps: "
    apart = [name.format(index) for index in range(len(program.optimizers)) if steps_differ(program, index, traces)]
    assert len(differences) == len(apart), said
    assert all(map(str.startswith, differences, apart)), said
    assert verdict == ("split" if apart else "agree")
    assert compared[:2] == ["scale", "tracker"], said
    copied = copies_compared(program)
    assert not copied or compared[-1] == f"{copied} replicated parameter{'s' * (copied != 1)}", said


def steps_differ(program: Program, index: int, traces: list[Trace]) -> bool:
    """Whether ranks that count an optimizer's steps have taken different ones, as some had no gradients."""
    taken = {rank: steps_taken(program, rank, index) for rank in RANKS if traces[rank].step_counts[index] is not None}
    for rank, steps in taken.items():
        assert traces[rank].step_counts[index] == steps, f"rank {rank}, optimizer {index}"
    return len(set(taken.values())) > 1


def copies_compared(program: Program) -> int:
    """Return how many parameters an audit compares: plain ones if all of them are copies."""
    members = [each for optimizer in program.optimizers for each in optimizer.parameters]
    plain_too = all(each.place != "own" for each in members)
    return sum(PLACES[each.place].has_copies and (plain_too or each.place not in PLAIN) for each in members)


def check_copies(optimizer: Optimizer, digests: list[list[str]], where: str) -> None:
    for position, parameter in enumerate(optimizer.parameters):
        own, parts = PLACES[parameter.place].own, {}
        pieces = replace(parameter, grads=()).held(0)
        for rank in RANKS:
            part = (stand(own, rank), *pieces[rank].view(-1).tolist())
            parts.setdefault(part, set()).add(digests[rank][position])
        assert all(len(same) == 1 for same in parts.values()), f"{where}, parameter {position}: copies differ"

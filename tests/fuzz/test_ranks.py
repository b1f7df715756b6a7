"""Random programs on four ranks: all step or none, all hold the same scale, nobody waits, one collective a step."""

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import rank_execution
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import given, seed
from rank_execution import Trace
from rank_model import (
    check_collectives,
    clip_collectives,
    expected_report,
    expected_updates,
    found_apart,
    is_reported_exactly,
    judged,
    norm,
    skips,
    steps_taken,
)
from rank_programs import PLACES, PLAIN, Clip, Optimizer, Program
from rank_strategies import ON_MOVED, RANKS, programs
from ranks import cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE_LIMIT = 30.0  # Seconds: the watchdog. A program takes a tenth of one.
SHARE = 0.05  # of the programs that `make fuzz` asks for
IN_CI = {"any": 85, "moving": 85, "long": 80}
CHUNKS = [(shape, chunk) for shape, programs in IN_CI.items() for chunk in chunks(in_ci=programs, share=SHARE)]


def check(program: Program, traces: list[Trace]) -> None:
    for rank, trace in enumerate(traces):
        check_updates(program, trace, f"rank {rank}")
        for step in range(program.finished):
            check_step(program, rank, step, trace)
    for step in range(program.finished):
        check_together(program, step, traces)
    check_guard(program, traces)
    check_apart(program, traces)
    check_audit(program, traces)


def check_updates(program: Program, trace: Trace, where: str) -> None:
    expected = expected_updates(program)
    assert trace.scales == [(after.scale, after.tracker) for after in expected], where
    assert trace.stats == [after.stats for after in expected], where
    for error, after in zip(trace.errors, expected, strict=True):
        assert (error is None) == (after.error is None), (where, trace.errors, after)
        assert error is None or error.startswith(after.error), (where, error, after)


def check_guard(program: Program, traces: list[Trace]) -> None:
    """Windows and spikes are equal to the bit on all ranks, and those of the rule."""
    assert all(trace.windows == traces[0].windows and trace.spikes == traces[0].spikes for trace in traces)
    expected, seen = judged(program), traces[0]
    for step in range(program.finished if program.spike_sigma is not None else 0):
        spikes = zip(seen.spikes[step], sorted(expected.spikes[step]), strict=True)
        assert all(got == pytest.approx(want, rel=1e-6) for got, want in spikes), (step, seen.spikes[step])
        windows = zip(seen.windows[step], expected.windows[step], strict=True)
        assert all(got == pytest.approx(want, rel=1e-6) for got, want in windows), (step, seen.windows[step])


def check_apart(program: Program, traces: list[Trace]) -> None:
    expected = None if program.split is None else found_apart(program, program.split)
    for rank, trace in enumerate(traces):
        assert (expected is None) == (trace.apart is None), f"rank {rank} raised {trace.apart}, not {expected}"
        if expected is not None and trace.apart is not None:
            assert trace.apart[0] == expected[0], f"rank {rank}: {trace.apart}, not {expected}"
            assert trace.apart[1].startswith(expected[1]), f"rank {rank}: {trace.apart}, not {expected}"


def check_together(program: Program, step: int, traces: list[Trace]) -> None:
    reports = [trace.reports[step] for trace in traces]
    assert all(report == reports[0] for report in reports), f"reports of step {step} differ"
    exact = {(spot, kinds) for spot, kinds in reports[0] if is_reported_exactly(program, spot)}
    assert exact == expected_report(program, step), f"report of step {step}"
    assert len({repr(trace.clipped[step]) for trace in traces}) == 1, f"norms of step {step} differ"
    assert len({trace.errors[step] for trace in traces}) == 1, f"errors of step {step} differ"
    for index, optimizer in enumerate(program.optimizers):
        check_copies(optimizer, [trace.digests[step][index] for trace in traces], f"step {step}, optimizer {index}")


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


def check_step(program: Program, rank: int, step: int, trace: Trace) -> None:
    clip = program.clip_of(step)
    if clip is not None:
        check_clip(program, rank, step, trace, clip)
    assert trace.update_collectives[step] == 0
    for index, optimizer in enumerate(program.optimizers):
        where = f"rank {rank}, step {step}, optimizer {index}"
        assert trace.skipped[step][index] == skips(program, step, index), where
        assert trace.stepped[step][index] in (None, not skips(program, step, index)), where
        if not optimizer.moves or optimizer.name in ON_MOVED:  # else it makes them as its parameters are
            clipped = program.clip_of(step, index) is not None
            assert trace.collectives[step][index] == (0 if clipped else check_collectives(program, step, index)), where


def check_clip(program: Program, rank: int, step: int, trace: Trace, clip: Clip) -> None:
    where = f"rank {rank}, step {step}"
    assert trace.clipped[step] is not None, where
    measured, collectives = trace.clipped[step]
    if program.clip_is_clean(step, clip):
        assert measured == pytest.approx(norm(program, step, clip), rel=1e-6), where
    else:
        assert not math.isfinite(measured), where
    assert collectives == clip_collectives(program, step, clip), where


def check_copies(optimizer: Optimizer, digests: list[list[str]], where: str) -> None:
    for position, parameter in enumerate(optimizer.parameters):
        own, parts = PLACES[parameter.place].own, {}
        pieces = replace(parameter, grads=()).held(0)
        for rank in RANKS:
            part = (own.where(rank), *pieces[rank].view(-1).tolist())
            parts.setdefault(part, set()).add(digests[rank][position])
        assert all(len(same) == 1 for same in parts.values()), f"{where}, parameter {position}: copies differ"


def run(pool: Any, program: Program) -> list[Trace]:
    """Run a program on all ranks; one that raises or hangs anywhere fails, with the stacks of all."""
    results = pool.run(cases.strictly, rank_execution.execute, (program,), {}, timeout=CASE_LIMIT)
    errors = [f"rank {result.rank}: {result.traceback}" for result in results if not result.ok]
    assert not errors, "\n".join(errors)
    return [result.value for result in results]


@pytest.mark.parametrize(("shape", "chunk"), CHUNKS, ids=str)
def test_programs_on_four_ranks(pools: Any, shape: str, chunk: Chunk) -> None:
    @seed(chunk.seed)
    @settings_for(chunk.programs)
    @given(programs(shape))
    def all_agree(program: Program) -> None:
        check(program, run(pools(4), program))

    all_agree()

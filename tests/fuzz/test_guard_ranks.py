"""Loops with a StepGuard on two ranks, of which one fails now and then: both go on, call by call, and stay equal.

Ranks are threads that meet in every reduction: one that the other does not make, or makes otherwise, is found at once.
"""

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from fuzz_profile import Chunk, chunks
from hypothesis import strategies as st
from ranks.cases import FirstOpFails
from torch import Tensor

from scaler_triton import SkipStreakError, StepGuard
from scaler_triton.core.ranks import Ranks
from scaler_triton.integrations.unscaled import clip_again

pytestmark = pytest.mark.slow

CHECKS = ["none", "unscale_", "clip", "clip by inf", "clip parameters", "again", "look"]
Place = tuple[int, int] | None  # a rank and an optimizer


class Group:
    """A process group's interface for one of two threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self._rank, self._barrier, self._table, self.call = rank, barrier, table, ""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank

    def allreduce(self, *_: Any) -> None:
        raise NotImplementedError

    def exchange(self, what: Any) -> list[Any]:
        self._table[self._rank] = what
        self._barrier.wait()
        both = list(self._table)
        self._barrier.wait()
        return both

    def reduce_(self, values: Tensor, op: str) -> None:
        here, there = self.exchange(f"{self.call}: {op} of {values.dtype} {tuple(values.shape)}")
        if here != there:
            raise SystemExit(f"one rank is at {here}, the other at {there}")  # which no loop catches
        both = torch.stack(self.exchange(values.clone()))
        values.copy_(both.sum(0) if op == "SUM" else both.amax(0))


class Batch(NamedTuple):
    """What both ranks do in one batch, and what happens there to one of them."""

    joint: bool
    checks: list[str]  # for each optimizer; of a joint one the first counts
    order: list[int]  # in which they are checked and stepped
    in_turn: bool  # whether each is stepped before the next is checked
    gradients: list[float]
    refused: Place  # whose check raises
    no_memory: bool  # whether it is good, and the check's first op runs out of memory
    dies: Place  # whose own step raises
    gradless: Place
    repeats: bool  # whether steps that were skipped are repeated


class Program(NamedTuple):
    fused: list[bool]
    sigma: float | None
    max_skips: int | None
    updates: str
    leaves: bool  # whether the loop leaves the batch at an error; it then checks all optimizers at once
    batches: list[Batch]


@st.composite
def programs(draw: Any) -> Program:
    fused = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    count, updates = len(fused), draw(st.sampled_from(["never", "in each batch", "after each step"]))
    leaves = updates == "in each batch" and draw(st.booleans())
    place = st.none() | st.tuples(st.integers(0, 1), st.integers(0, count - 1))
    gradients = st.lists(st.sampled_from([1.0, 1.0, 1.1, 50.0, math.nan]), min_size=count, max_size=count)
    order = st.permutations(range(count)).flatmap(lambda every: st.integers(1, count).map(lambda few: every[:few]))
    checks = st.lists(st.sampled_from(CHECKS), min_size=count, max_size=count)
    ways = [st.just(True), st.just(["clip"] * count), order, st.just(False)]
    ways = ways if leaves else [st.booleans(), checks, order, st.booleans()]
    batch = st.builds(Batch, *ways, gradients, place, st.booleans(), place, place, st.booleans())
    sigma, max_skips = draw(st.sampled_from([3.0, None])), draw(st.sampled_from([None, 0, 1]))
    run = draw(st.lists(batch, min_size=2, max_size=8))
    if leaves and draw(st.booleans()):  # where no step dies, batches without a fault need no check
        run = [each._replace(dies=None) for each in run]
        run = [b if b.refused or draw(st.booleans()) else b._replace(checks=["none"] * count) for b in run]
    max_skips = None if leaves and any(each.dies for each in run) else max_skips
    return Program(fused, sigma, max_skips, updates, leaves, run)


class Loop:
    """A program on one rank; `seen` is what must be equal on both."""

    def __init__(self, program: Program, group: Any) -> None:
        self.program, self.group, self.seen = program, group, []
        options = {"spike_sigma": program.sigma, "max_consecutive_skips": program.max_skips, "process_group": group}
        self.guard = StepGuard("cpu", window=4, **options)  # type: ignore[arg-type]
        self.params = [torch.nn.Parameter(torch.ones(4)) for _ in program.fused]
        pairs = zip(self.params, program.fused, strict=True)
        self.optimizers = [torch.optim.AdamW([param], lr=0.1, fused=fused) for param, fused in pairs]

    def run(self) -> None:
        for number, batch in enumerate(self.program.batches):
            for index in range(len(self.params)):
                self._give(batch, index)
            before = [param.tolist() for param in self.params]
            with suppress(RuntimeError, MemoryError, AssertionError):
                self._steps(number, batch)
            for index, (old, param) in enumerate(zip(before, self.params, strict=True)):
                is_bad = math.isnan(batch.gradients[index]) and batch.gradless is None
                is_bad |= batch.refused in [(0, index), (1, index)] and not batch.no_memory and batch.gradless is None
                assert old == param.tolist() or not is_bad
            if self.program.updates == "in each batch" or number == len(self.program.batches) - 1:
                self._call(number, self.guard.update)
            self.seen.append(self.guard.state_dict()["scaler_triton"]["windows"])
            if not (self.program.leaves and any(each.dies for each in self.program.batches)):
                self.seen.append(self.guard.stats())  # else one rank leaves out steps that the other takes
            if not any(each.dies or each.gradless for each in self.program.batches):
                self.seen.append([param.tolist() for param in self.params])
        self.group.call = "the end"

    def _give(self, batch: Batch, index: int) -> None:
        place, grad = (self.group.rank(), index), torch.full((4,), batch.gradients[index])
        if place == batch.refused and not batch.no_memory:
            grad = torch.ones(1).expand(4)  # which a check does not take
        self.params[index].grad = None if place == batch.gradless else grad

    def _call(self, number: int, method: Callable[..., Any], *args: Any, **options: Any) -> None:
        self.group.call = f"{method.__name__} in batch {number}"
        try:
            method(*args, **options)
        except SkipStreakError:  # one rank may count a step in its update that the other counts in its step
            if self.seen[-1:] != [f"a streak in batch {number}"]:
                self.seen.append(f"a streak in batch {number}")
        except (RuntimeError, MemoryError, AssertionError):
            if self.program.leaves:
                raise

    def _steps(self, number: int, batch: Batch) -> None:
        if not batch.in_turn:
            for indices in [batch.order] if batch.joint else [[index] for index in batch.order]:
                self._check(number, batch, indices)
        for index in batch.order:
            if batch.in_turn or batch.checks[index] in ("again", "look"):
                self._check(number, batch, [index])
            optimizer, dies = self.optimizers[index], batch.dies == (self.group.rank(), index)
            with patch.object(optimizer, "step", side_effect=MemoryError) if dies else nullcontext():
                repeats = batch.repeats and not (batch.dies or self.program.leaves)
                self._call(number, self._attempts if repeats else self.guard.step, optimizer)
            if self.program.updates == "after each step":
                self._call(number, self.guard.update)

    def _attempts(self, optimizer: Any) -> None:
        for _ in self.guard.attempts(optimizer, max_attempts=2):
            self.guard.step(optimizer)

    def _check(self, number: int, batch: Batch, indices: list[int]) -> None:
        how, optimizers = batch.checks[indices[0]], [self.optimizers[index] for index in indices]
        options: dict[str, Any] = {"norm_type": math.inf} if how == "clip by inf" else {}
        options |= {"parameters": self.params[indices[0]]} if how == "clip parameters" else {}
        fails = batch.no_memory and batch.refused in [(self.group.rank(), index) for index in indices]
        fails &= number == 0 or self.program.updates != "never"  # else it is in the update that was left out
        with FirstOpFails() if fails else nullcontext():
            if how.startswith("clip"):
                self._call(number, self.guard.clip_grad_norm_, optimizers, 1.0, **options)
            if how == "again":  # as Accelerate and Lightning clip
                params = [self.params[index] for index in indices]
                self._call(number, clip_again, self.guard, optimizers, 1.0, model=None, parameters=params)
            single = {"unscale_": self.guard.unscale_, "look": self.guard._check_inf_per_device}.get(how)
            for optimizer in optimizers if single else ():
                self._call(number, single, optimizer)


def are_equal(program: Program) -> None:
    barrier, table = threading.Barrier(2, timeout=60), [None, None]
    loops, errors = [Loop(program, Group(rank, barrier, table)) for rank in (0, 1)], []

    def run(loop: Loop) -> None:
        try:
            loop.run()
            loop.group.reduce_(torch.zeros(()), "MAX")  # both are through
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(loop,)) for loop in loops]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert repr(loops[0].seen) == repr(loops[1].seen)  # NaN equals NaN


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "reduce_", lambda ranks, values, op: ranks.groups[0].reduce_(values, op))


@pytest.mark.parametrize("chunk", chunks(500), ids=str)
def test_ranks_of_a_guard_stay_equal_after_an_error_on_one(chunk: Chunk) -> None:
    chunk.run(are_equal, programs())


def batch(check: str, then: str = "", refused: Place = (0, 1), *, only: int = 2, **options: Any) -> Batch:
    """Return a batch in which all are checked in one way, and perhaps the second again before its step, in another."""
    fixed = Batch(True, [check, then or check], [0, 1][:only], False, [1.0, 1.0], refused, False, None, None, False)
    return fixed._replace(**options)


@pytest.mark.parametrize(
    ("updates", "leaves", "batches"),
    [
        ("after each step", False, [batch("again", joint=False)] * 2),  # its look at a carried step
        ("after each step", False, [batch("unscale_", "look")] * 2),
        ("in each batch", False, [batch("unscale_", "again", no_memory=True, repeats=True)] * 2),
        # The other rank judges afresh what this one resumes.
        (
            "in each batch",
            True,
            [batch("clip", "", (0, 0)), batch("none", "", None), batch("clip", "", (0, 0), only=1)],
        ),
    ],
)
def test_a_rank_that_fails_goes_on_as_the_other_does(updates: str, leaves: bool, batches: list[Batch]) -> None:
    are_equal(Program([False, False], 3.0, None, updates, leaves, batches))

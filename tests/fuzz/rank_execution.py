"""How a rank executes a program, and the trace that this leaves."""

import io
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from rank_model import StepTrace, Trace, norm, skips
from rank_programs import DTYPES, PLACES, Clip, Optimizer, Parameter, Program, Spot, backward, cut, distributed, piece
from ranks import cases
from ranks.cases import LEARNING_RATE
from torch import Tensor

from scaler_triton import SkipStreakError, audit


def execute(rank: int, program: Program) -> Trace:
    run, trace = Run(rank, program), Trace()
    for step in range(program.finished):
        run.give_up(step)
        trace.steps.append(run.take(step))
    if program.split is not None:
        trace.apart = run.come_apart(program.split.step, program.split.factor if rank == program.split.rank else 1.0)
    replicated = not any(each.place == "own" for o in program.optimizers for each in o.parameters)
    report = audit(run.optimizers, run.scaler, replicated=replicated, file=io.StringIO())
    trace.audited = report.verdict, list(report.differences), list(report.compared)
    trace.step_counts = [max(cases.step_counts(optimizer), default=None) for optimizer in run.optimizers]
    return trace


class Run:
    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program = rank, program
        self.scaler = cases.new_scaler(program.kind, **program.options)
        self.optimizers = [_built(optimizer) for optimizer in program.optimizers]
        self.kept: dict[Any, Tensor] = {}
        self.call = ""  # the last one
        self.errors: list[str] = []  # of streaks, since the last step began

    def give_up(self, step: int) -> None:
        """Take a batch in which steps fail, and go on without an update; a guard's steps are counted all the same."""
        self.errors = []
        clean = replace(self.program, planted=())
        for index, optimizer in enumerate(self.optimizers):
            if (step, index) in self.program.given_up:
                scale = self.scaler.scale(torch.ones(())).item()
                backward(clean, Spot(step, self.rank, index, 0), optimizer, scale, self.kept)
                failing = mock.patch.object(optimizer, "step", side_effect=MemoryError)
                with failing, pytest.raises((MemoryError, SkipStreakError)) as raised:
                    self.scaler.step(optimizer)
                self._note(raised.value)

    def take(self, step: int) -> StepTrace:
        """Take a step: clip and step all optimizers, ask whether they were skipped, and update."""
        left = self._up_to_update(step)
        left.update_collectives, error = cases.counted(self.scaler.update)
        self._note(error)
        left.errors = self.errors
        left.scale, left.stats = (float(self.scaler.get_scale()), int(self.scaler._growth_tracker)), self.scaler.stats()
        if any(left.skipped):
            parameters = [cases.params_of(optimizer) for optimizer in self.optimizers]
            named = [(f"{o} {p}", each) for o, members in enumerate(parameters) for p, each in enumerate(members)]
            report = self.scaler.overflow_report(named, gather=True)
            assert report.update == left.stats.last_skip
            number = step if self.program.kind == "guard" else report.update - 1  # a guard's updates are steps
            found = [(Spot(number, b.rank, *map(int, b.name.split())), b.kinds) for b in report.bad]
            left.report, left.spikes = set(found), sorted((each.norm, each.limit) for each in report.spikes)
        windows = [self.scaler._ours.steps.open(optimizer).notes.get("window") for optimizer in self.optimizers]
        left.windows = [[] if window is None else window.norms() for window in windows]
        left.digests = [cases.digests(cases.params_of(optimizer)) for optimizer in self.optimizers]
        return left

    def come_apart(self, step: int, factor: float) -> tuple[str, str] | None:
        """Change the scale, and take a step that all ranks refuse; return which call did, and its words."""
        self.scaler._scale.mul_(factor)
        try:
            self._up_to_update(step)
        except RuntimeError as error:
            return self.call, str(error)
        return None

    def _up_to_update(self, step: int) -> StepTrace:
        self.scaler.set_limits(**self.program.settings_of(step))
        scale = self.scaler.scale(torch.ones(())).item()
        for index, optimizer in enumerate(self.optimizers):
            backward(self.program, Spot(step, self.rank, index, 0), optimizer, scale, self.kept)
        left, clip = StepTrace(), self.program.clip_of(step)
        left.clipped = None if clip is None else self._clip(clip, step)
        for index in range(len(self.optimizers)):
            self._step(index, step, left)
        for index, optimizer in enumerate(self.optimizers):
            self.call = f"was_skipped {index}"
            left.skipped.append(self.scaler.was_skipped(optimizer))
        return left

    def _clip(self, clip: Clip, step: int) -> tuple[float, int]:
        """Return the norm, and how many collectives it took."""
        program, norms = self.program, []
        parameters = [cases.params_of(self.optimizers[o])[p] for o, p in clip.members(program)]
        chosen = [self.optimizers[index] for index in clip.optimizers]
        options = {"parameters": None if clip.subset is None else parameters}
        max_norm = clip.fraction * norm(program, step, clip)
        refused = clip.refuses and not program.clip_is_clean(step, clip)

        def call() -> None:
            with pytest.raises(RuntimeError, match="is non-finite, so it cannot be") if refused else nullcontext():
                norms.append(self.scaler.clip_grad_norm_(chosen, max_norm, clip.order, clip.refuses, **options))

        self.call = "clip"
        count = cases.collectives_of(call)
        bad = any(skips(program, step, index) for index in clip.optimizers)
        if not bad and step < program.finished:
            self._check_clipped(clip, step, parameters, (max_norm / (norms[0] + 1e-6)).clamp(max=1.0))
        return norms[0].item() if norms else math.inf, count

    def _check_clipped(self, clip: Clip, step: int, parameters: Sequence[Tensor], coefficient: Tensor) -> None:
        """Assert that gradients are torch's, to the bit: a power of two unscales exactly."""
        for member, parameter in zip(clip.members(self.program), parameters, strict=True):
            if parameter.grad is not None:
                spot = Spot(step, self.rank, *member)
                want = [piece(self.program.parameter_of(spot), spot)]
                torch._foreach_mul_(want, coefficient)
                got = cases.local_of(parameter.grad)
                assert torch.equal(got, want[0]), (member, got, want[0])

    def _note(self, error: BaseException | None) -> None:
        """Note an error, but that of a step that fails."""
        if error is not None and not isinstance(error, MemoryError):
            self.errors.append(cases.described(error).splitlines()[0])

    def _step(self, index: int, step: int, left: StepTrace) -> None:
        """Step an optimizer; note how many collectives that took, and whether it changed anything."""
        optimizer, count = self.optimizers[index], 0
        watched = [p for p in cases.params_of(optimizer) if p.grad is not None and cases.local_of(p).numel()]
        before = cases.digests(watched)
        self.call = f"step {index}"
        if (self.rank, index) in self.program.explicit and self.program.clip_of(step, index) is None:
            count = cases.collectives_of(self.scaler.unscale_, optimizer)
        more, error = cases.counted(self.scaler.step, optimizer)
        if not (error is None or isinstance(error, SkipStreakError)):
            raise error
        self._note(error)
        left.collectives.append(count + more)
        left.stepped.append(cases.digests(watched) != before if watched else None)


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
        return Local(groups, optimizer.takes_flag)
    return cases.new_optimizer(optimizer.name, groups)


def _parameter(described: Parameter) -> Tensor:
    ones = torch.ones(described.rows, 3, dtype=DTYPES[described.dtype])
    place = PLACES[described.place]
    if place.mesh is None:
        return torch.nn.Parameter(ones)
    local = cut(ones, place.letters, place.axes, place.mesh().get_rank())
    return torch.nn.Parameter(distributed(described, local, place.letters))

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
from rank_model import Trace, norm, skips
from rank_programs import DTYPES, PLACES, Clip, Optimizer, Parameter, Program, Spot, backward, cut, distributed, piece
from ranks import cases
from ranks.cases import LEARNING_RATE
from torch import Tensor

from scaler_triton import audit


def execute(rank: int, program: Program) -> Trace:
    run = Run(rank, program)
    for step in range(program.finished):
        run.give_up(step)
        run.give_gradients(step)
        run.step(step)
        run.update(step)
    if program.split is not None:
        run.come_apart(program.split.step, program.split.factor if rank == program.split.rank else 1.0)
    run.audit()
    return run.trace


class Run:
    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program, self.trace = rank, program, Trace()
        self.scaler = cases.new_scaler(program.kind, **program.options)
        self.optimizers = [_built(optimizer) for optimizer in program.optimizers]
        self.kept: dict[Any, Tensor] = {}
        self.call = ""  # the last one

    def give_gradients(self, step: int) -> None:
        self.scaler.set_limits(**self.program.settings_of(step))
        scale = self.scaler.scale(torch.ones(())).item()
        for index, optimizer in enumerate(self.optimizers):
            backward(self.program, Spot(step, self.rank, index, 0), optimizer, scale, self.kept)

    def give_up(self, step: int) -> None:
        """Take a batch in which steps fail, and go on without an update."""
        clean = replace(self.program, planted=())
        for index, optimizer in enumerate(self.optimizers):
            if (step, index) in self.program.given_up:
                scale = self.scaler.scale(torch.ones(())).item()
                backward(clean, Spot(step, self.rank, index, 0), optimizer, scale, self.kept)
                with mock.patch.object(optimizer, "step", side_effect=MemoryError), pytest.raises(MemoryError):
                    self.scaler.step(optimizer)

    def step(self, step: int) -> None:
        """Clip and step all optimizers, and ask whether they were skipped."""
        trace, clip = self.trace, self.program.clip_of(step)
        trace.clipped.append(None if clip is None else self._clip(clip, step))
        steps = [self._step(index, step) for index in range(len(self.optimizers))]
        trace.collectives.append([count for count, _ in steps])
        trace.stepped.append([stepped for _, stepped in steps])
        trace.skipped.append([self._was_skipped(index) for index in range(len(self.optimizers))])

    def update(self, step: int) -> None:
        trace, scaler = self.trace, self.scaler
        count, error = cases.counted(scaler.update)
        trace.update_collectives.append(count)
        trace.errors.append(None if error is None else cases.described(error).splitlines()[0])
        trace.scales.append((float(scaler.get_scale()), int(scaler._growth_tracker)))
        trace.stats.append(scaler.stats())
        bad, spikes = self._reported(step)
        trace.reports.append(bad)
        trace.spikes.append(spikes)
        trace.windows.append([self._window(index) for index in range(len(self.optimizers))])
        trace.digests.append([[cases.digest(p) for p in cases.params_of(each)] for each in self.optimizers])

    def come_apart(self, step: int, factor: float) -> None:
        """Change the scale, and take a step that all ranks refuse."""
        self.scaler._scale.mul_(factor)
        self.give_gradients(step)
        try:
            self.step(step)
        except RuntimeError as error:
            self.trace.apart = self.call, str(error)

    def audit(self) -> None:
        replicated = not any(each.place == "own" for o in self.program.optimizers for each in o.parameters)
        report = audit(self.optimizers, self.scaler, replicated=replicated, file=io.StringIO())
        self.trace.audited = report.verdict, list(report.differences), list(report.compared)
        self.trace.step_counts = [max(cases.step_counts(optimizer), default=None) for optimizer in self.optimizers]

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

    def _step(self, index: int, step: int) -> tuple[int, bool | None]:
        """Return how many collectives an optimizer's step took, and whether it changed anything."""
        optimizer, count = self.optimizers[index], 0
        watched = [p for p in cases.params_of(optimizer) if p.grad is not None and cases.local_of(p).numel()]
        before = [cases.digest(p) for p in watched]
        self.call = f"step {index}"
        if (self.rank, index) in self.program.explicit and self.program.clip_of(step, index) is None:
            count = cases.collectives_of(self.scaler.unscale_, optimizer)
        count += cases.collectives_of(self.scaler.step, optimizer)
        return count, [cases.digest(p) for p in watched] != before if watched else None

    def _was_skipped(self, index: int) -> bool:
        self.call = f"was_skipped {index}"
        return self.scaler.was_skipped(self.optimizers[index])

    def _window(self, index: int) -> list[float]:
        window = self.scaler._ours.steps.open(self.optimizers[index]).window
        return [] if window is None else window.norms()

    def _reported(self, step: int) -> tuple[set[tuple[Spot, str]], list[tuple[float, float]]]:
        if not any(self.trace.skipped[step]):
            return set(), []
        parameters = [cases.params_of(optimizer) for optimizer in self.optimizers]
        named = [(f"{o} {p}", each) for o, members in enumerate(parameters) for p, each in enumerate(members)]
        report = self.scaler.overflow_report(named, gather=True)
        bad = {(Spot(report.update - 1, each.rank, *map(int, each.name.split())), each.kinds) for each in report.bad}
        return bad, sorted((each.norm, each.limit) for each in report.spikes)


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

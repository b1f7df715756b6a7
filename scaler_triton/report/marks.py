"""Marks: what the passes leave of each gradient that is not finite, for a report that comes later.

A mark says what one gradient held, and in which generation, the number of skips before. Kernels write marks on the
device, where they read the generation from the counters; of what torch's ops check on the CPU, Python leaves them on
the host. A step without an overflow writes none.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.observer import Observer
from scaler_triton.core.plan import Batch, GradPlan
from scaler_triton.core.step import OptimizerStep
from scaler_triton.core.update import Counters
from scaler_triton.kernels.abi import GENERATIONS, INF, KIND_BITS, NAN, SKIPPED

KINDS = NAN | INF
WORDS = {INF: "Inf", NAN | INF: "NaN and Inf", NAN: "NaN"}  # as tables list them: NaN often follows from Inf


class Marks:
    """The marks of one optimizer's gradients, kept as long as its parameters and their layouts."""

    def __init__(self, plan: GradPlan) -> None:
        self.plan: GradPlan = weakref.proxy(plan)  # it holds this: a cycle would keep it until a collection
        # Of the last step that was CARRIED: the generation of its check, and all that it was clipped with.
        self._checked_at: Tensor | None = None
        self.shared_by: Collection[Marks] = ()
        # Of the last one that was skipped: the generation in which it went on, and that of its check.
        self._cause: Tensor | None = None
        self._on_host: dict[int, dict[int, int]] = {}  # by generation: the kinds found on the CPU, by parameter

    def mark_on_host(self, generation: int, batch: Batch) -> None:
        """Mark the gradients of a batch on the CPU that are not finite."""
        seen = self._on_host.setdefault(generation, {})
        if len(self._on_host) > GENERATIONS:  # as many as kernels keep: that of the last skip, and later ones
            del self._on_host[min(self._on_host)]
        for position, tensor in zip(batch.layout.positions, batch.tensors, strict=True):
            if tensor is not None:
                kinds = (NAN if tensor.isnan().any() else 0) | (INF if tensor.isinf().any() else 0)
                if kinds:
                    seen[position] = seen.get(position, 0) | kinds

    def carry(self, generation: Tensor, clipped: Sequence[OptimizerStep]) -> None:
        """Record that a step, `clipped` with others, is going to be carried over an update that comes now."""
        self._checked_at = generation
        self.shared_by = weakref.WeakSet(marks_of(step.plan) for step in clipped if step.plan is not None)

    def resume(self, generation: Tensor, flags: dict[torch.device, Tensor]) -> None:
        """Record that a carried step goes on with these flags, which the updates since its check have counted, too."""
        if self._checked_at is None:
            return
        new = torch.stack([generation, self._checked_at.to(generation.device)])
        self._cause = torch.full_like(new, -1) if self._cause is None else self._cause.to(generation.device)
        for flag in flags.values():
            self._cause = torch.where((flag != 0).reshape(()).to(generation.device), new, self._cause)

    def cause(self, generation: int) -> int | None:
        """Wait for the device, and return the generation of the check for which a carried step of this one skips."""
        if self._cause is None:
            return None
        went_on_at, checked_at = self._cause.tolist()
        return int(checked_at) if went_on_at == generation else None

    def of(self, generations: Collection[int]) -> dict[int, int]:
        """Wait for the device, and return the kinds of what was not finite in these generations, by parameter."""
        kinds: dict[int, int] = {}
        for generation in generations:
            for position, found in self._on_host.get(generation, {}).items():
                kinds[position] = kinds.get(position, 0) | found
        for layout in self.plan.layouts:
            for each in layout.tables.values():
                for position, row in zip(layout.positions, each.bits.tolist(), strict=True):
                    for mark in row:
                        if mark & KINDS and mark >> KIND_BITS in generations:
                            kinds[position] = kinds.get(position, 0) | mark & KINDS
        return kinds

    def not_covered(self, home: torch.device) -> Iterator[str]:
        """Describe the gradients that were checked without marks; `home` is the scale's device."""
        for layout in self.plan.layouts:
            device, backends = layout.device, (layout.backend, layout.notes.get("clipping"))
            if "torch" in backends and (device.type != "cpu" or not layout.key.plain):
                yield f"gradients on {device} that torch's own op serves"
            if "triton" in backends and device != home:
                yield f"gradients on {device}, where the scale is not"
        for device in self.plan.irregular:
            yield f"sparse and Partial gradients on {device}"

    def forget(self) -> None:
        """Clear all marks."""
        self._on_host, self._cause = {}, None
        for layout in self.plan.layouts:
            for each in layout.tables.values():
                each.bits.zero_()


def marks_of(plan: GradPlan) -> Marks:
    """Return the marks of a plan's gradients."""
    marks: Marks | None = plan.notes.get("marks")
    if marks is None:
        marks = plan.notes["marks"] = Marks(plan)
    return marks


def generations_of(marked: Sequence[Marks], generation: int) -> list[set[int]]:
    """Return the generations in which to look for the causes of the skip in this one, for each of the marks."""
    generations = {marks: {generation} for marks in marked}
    for marks in marked:
        cause = marks.cause(generation)
        if cause is not None:
            generations[marks].add(cause)
            for other in marks.shared_by:
                generations.get(other, set()).add(cause)
    return [generations[marks] for marks in marked]


class Marking(Observer):
    """Leaves marks where the kernels leave none, and notes which check a carried step goes by."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def found(self, step: OptimizerStep, batches: Sequence[Batch]) -> None:
        """Mark what torch's ops have checked on the CPU; subclasses of tensors may lack the ops for that."""
        plan: Any = step.plan
        for batch in batches:
            layout = batch.layout
            by_torch = "torch" in (layout.backend, layout.notes.get("clipping"))
            if layout.device.type == "cpu" and layout.key.plain and by_torch:
                marks_of(plan).mark_on_host(self._counters.read_skips(), batch)

    def carried(self, step: OptimizerStep) -> None:
        """Note the generation of the check."""
        if step.plan is not None and step.phase.name == "UNSCALED":
            marks_of(step.plan).carry(self._generation(), step.notes.get("clipped", ()))

    def resumed(self, step: OptimizerStep) -> None:
        """Note the generation in which the step goes on."""
        if step.plan is not None:
            marks_of(step.plan).resume(self._generation(), step["found_inf_per_device"])

    def _generation(self) -> Tensor:
        values = self._counters.values
        is_list = isinstance(values, list)
        return torch.tensor(values[SKIPPED], device="cpu") if is_list else values[SKIPPED].clone()

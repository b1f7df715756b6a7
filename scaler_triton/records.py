"""Records: what a scaler keeps of each optimizer from step to step, for as long as the optimizer lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scaler_triton.cuda_graphs import is_captured
from scaler_triton.left_unscaled import LeftUnscaled, unchanged_since
from scaler_triton.optimizers import checked_parameters, parameters_of, unwrap, weak
from scaler_triton.plan import GradPlan
from scaler_triton.step_state import StepState


@dataclass(eq=False)
class Record:
    """One optimizer's."""

    owner: Callable[[], Any]  # returns the optimizer, None once it is gone
    plan: GradPlan | None = None
    last_step: StepState | None = None  # until its next step begins, for `was_skipped`
    left_unscaled: LeftUnscaled | None = None


class Records:
    """The records of a scaler's optimizers; of those behind wrappers, not of the wrappers.

    Attributes:
        replayed: whether graphs may write gradients: outside them no version counter tells then that these are new.
    """

    def __init__(self) -> None:
        self.replayed = False
        self._records: dict[int, Record] = {}

    def all(self) -> list[Record]:
        """Return the records of all optimizers that are alive."""
        return [*self._records.values()]  # at one go: an optimizer that is freed meanwhile removes its own

    def plans(self) -> list[GradPlan]:
        """Return their plans."""
        return [record.plan for record in self.all() if record.plan is not None]

    def find(self, optimizer: Any) -> Record | None:
        """Return an optimizer's record, None if it has none."""
        record = self._records.get(id(optimizer))
        return record if record is not None and record.owner() is optimizer else None  # the id may have been another's

    def of(self, optimizer: Any) -> Record:
        """Return an optimizer's record, a new one if it has none."""
        record = self.find(optimizer)
        if record is None:
            self._release_held()
            record = Record(weak(optimizer, self._forgetter(id(optimizer))))
            self._records[id(optimizer)] = record
        return record

    def plan(self, optimizer: Any) -> GradPlan:
        """Return the plan of the optimizer, or of the one in a wrapper; a new one if its parameters changed.

        Raises: AssertionError with torch's text if a parameter is not a tensor.
        """
        inner = unwrap(optimizer)
        parameters, record = parameters_of(inner), self.of(inner)
        plan = record.plan
        if plan is None or not plan.matches(parameters):
            before, plan = plan, GradPlan(checked_parameters(parameters))
            if before is not None:
                plan.take_marks(before)
            record.plan = plan
        return plan

    def begin_step(self, state: StepState) -> None:
        """Forget the last step of the optimizer whose next one begins with `state`."""
        record = self.find(state["owner"]())
        if record is not None:
            record.last_step = None

    def end_step(self, state: StepState) -> None:
        """Keep the state of an optimizer that was stepped just now, for `was_skipped`."""
        if "wrappers" in state or "earlier" in state:
            state = state.copy()
            state.pop("wrappers", None)  # one without weak references is held strongly, and with it the optimizer
            state.pop("earlier", None)
        self.of(state["owner"]()).last_step = state

    def last_step(self, optimizer: Any) -> StepState | None:
        """Return what the last step of an optimizer, or of the one in a wrapper, left; None once it is forgotten."""
        record = self.find(unwrap(optimizer))
        return None if record is None else record.last_step

    def recall(self, optimizer: Any) -> Tensor | None:
        """Return the flag of gradients that an update left unscaled, if they still are; kept until the next update."""
        inner = unwrap(optimizer)
        record = self.find(inner)
        left = None if record is None else record.left_unscaled
        if left is None or not self.vouch(left.found_inf) or left.captured != is_captured(left.found_inf):
            return None
        return left.found_inf if unchanged_since(left.snapshots, inner) else None

    def vouch(self, flag: Tensor) -> bool:
        """Tell whether version counters show all writes to gradients: in a capture they do, as it records them all.

        Args:
            flag: any tensor on the scale's device.
        """
        return not self.replayed or is_captured(flag)

    def _release_held(self) -> None:
        """Drop the records that keep their optimizers, which have no weak references, alive."""
        for key, record in [*self._records.items()]:
            if not isinstance(record.owner, weakref.ref) and record.left_unscaled is None:
                self._records.pop(key, None)

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        records = self._records  # not self: a dead optimizer must not keep a dead scaler

        def forget(owner: Any) -> None:
            record = records.get(key)
            if record is not None and record.owner is owner:
                del records[key]

        return forget

"""PlanCache: the plan of each optimizer, kept for as long as the optimizer lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from scaler_triton.optimizers import checked_parameters, parameters_of, unwrap, weak
from scaler_triton.plan import GradPlan


class PlanCache:
    """The plans of a scaler's optimizers, by weak references to these."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[Callable[[], Any], GradPlan]] = {}

    def plans(self) -> list[GradPlan]:
        """Return the plans of all optimizers that are alive."""
        entries = [*self._plans.values()]  # at one go: an optimizer that is freed meanwhile removes its own
        return [plan for _, plan in entries]

    def get(self, optimizer: Any) -> GradPlan:
        """Return the optimizer's plan, a new one if its parameters changed.

        Raises: AssertionError with torch's text if a parameter is not a tensor.
        """
        inner = unwrap(optimizer)
        parameters = parameters_of(inner)
        _, plan = self._plans.get(id(inner), (None, None))
        if plan is None or not plan.matches(parameters):  # the id may be another optimizer's by now
            before, plan = plan, GradPlan(checked_parameters(parameters))
            if before is not None:
                plan.take_marks(before)
            reference = weak(inner, self._forgetter(id(inner)))
            if isinstance(reference, weakref.ref):  # an entry with a strong one would never be removed
                self._plans[id(inner)] = (reference, plan)
        return plan

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        plans = self._plans  # not self: a dead optimizer must not keep a dead scaler

        def forget(reference: Any) -> None:
            if plans.get(key, (None,))[0] is reference:
                del plans[key]

        return forget

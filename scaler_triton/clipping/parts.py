"""What both ways of clipping share: the optimizers, the flag that is left to their steps, counts of copies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from scaler_triton.clipping.copies import copies_of, copies_of_gradient
from scaler_triton.clipping.rank_norms import held_gradients
from scaler_triton.optimizers import parameters_of, supports_amp_scaling, unwrap
from scaler_triton.plan import GradPlan
from scaler_triton.step_state import StepState
from scaler_triton.unscaling import UnscalingMixin
from scaler_triton.verdict import Verdict

if TYPE_CHECKING:
    from scaler_triton.collectives import Agreement


class Part(NamedTuple):
    """One of the optimizers that are clipped together."""

    optimizer: Any
    state: StepState
    plan: GradPlan


class PartsMixin(UnscalingMixin):
    """Leaves an optimizer's flag to its step, and makes all optimizers skip."""

    def _leave_flag(self, part: Part, verdict: Verdict, devices: Sequence[torch.device]) -> None:
        """Keep the flag for the step, and start its copy if the step will ask for it on the host."""
        self._keep(part.state, verdict, devices)
        if not supports_amp_scaling(part.optimizer):
            verdict.start_mirror()

    def _skip_together(self, optimizers: Sequence[Any], chosen: set[int] | None) -> None:
        """Have all of them skip, on a rank that cannot use their gradients but owes the others the sums of some."""
        sum_partial(optimizers, chosen)  # first: what is told of a step holds for the gradients that are there then
        for optimizer in optimizers:
            self._skip(self._state(optimizer))


def sum_partial(optimizers: Sequence[Any], chosen: set[int] | None) -> None:
    """Take part in the sums of Partial gradients that are still to come, on a rank that cannot use them."""
    parameters = all_parameters(optimizers)
    with suppress(Exception):  # a bad gradient, whose error is known
        held_gradients(parameters, [1] * len(parameters), chosen)


def all_parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return the parameters of all optimizers, in order; one that two of them hold comes twice."""
    return [parameter for optimizer in optimizers for parameter in parameters_of(unwrap(optimizer))]


def plan_copies(plan: GradPlan, agreement: Agreement | None, model: nn.Module | None) -> list[int]:
    """`copies_of` for a plan, which keeps the answer."""
    if plan.copies is None or plan.copies[0] is not agreement or plan.copies[1]() is not model:
        seen = (lambda: None) if model is None else weakref.ref(model)
        plan.copies = (agreement, seen, copies_of(plan.parameters, agreement, model))
    return plan.copies[2]


def gradient_copies(plan: GradPlan, copies: Sequence[int]) -> Sequence[int]:
    """Return how many ranks hold each gradient that the plan collected last: backward may cut it differently.

    Args:
        copies: how many ranks hold each parameter.

    Returns: `copies` itself where all are cut alike; else the same list as long as nothing changes.
    """
    if not plan.cut:
        return copies
    if plan.recounted is None or plan.recounted[0] is not copies or plan.recounted[1] is not plan.cut:
        counts = list(copies)
        for index, pieces in plan.cut.items():
            counts[index] = copies_of_gradient(copies[index], plan.parameters[index], pieces)
        plan.recounted = (copies, plan.cut, counts)
    return plan.recounted[2]

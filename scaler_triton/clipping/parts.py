"""What both ways of clipping share: the optimizers, and the flag that is left to their steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton.clipping.rank_norms import local_gradients
from scaler_triton.optimizers import parameters_of, supports_amp_scaling, unwrap
from scaler_triton.step_state import StepState
from scaler_triton.unscaling import UnscalingMixin
from scaler_triton.verdict import Verdict

if TYPE_CHECKING:
    from scaler_triton.plan import GradPlan


class Part(NamedTuple):
    """One of the optimizers that are clipped together; `copies` counts the ranks that hold each parameter's piece."""

    optimizer: Any
    state: StepState
    plan: GradPlan
    copies: Sequence[int]


class PartsMixin(UnscalingMixin):
    """Leaves an optimizer's flag to its step, and makes all optimizers skip."""

    def _store_flag(self, part: Part, verdict: Verdict, devices: Sequence[torch.device]) -> None:
        """Keep the flag for the step, and start its copy if the step will ask for it on the host."""
        self._store_verdict(part.state, verdict, devices)
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
        local_gradients(parameters, [1] * len(parameters), chosen)


def all_parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return the parameters of all optimizers, in order; one that two of them hold comes twice."""
    return [parameter for optimizer in optimizers for parameter in parameters_of(unwrap(optimizer))]

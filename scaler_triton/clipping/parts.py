"""What both ways of clipping share: the optimizers, their flags, and how all of them are skipped."""

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
    """One of the optimizers that are clipped together; `copies`: how many ranks hold each parameter's shard."""

    optimizer: Any
    state: StepState
    plan: GradPlan
    copies: Sequence[int]


class PartsMixin(UnscalingMixin):
    """Stores an optimizer's flag for its step, and skips all optimizers."""

    def _store_flag(self, part: Part, verdict: Verdict, devices: Sequence[torch.device]) -> None:
        """Store the flag for the step, and start its host copy if the step will read it there."""
        self._store_verdict(part.state, verdict, devices)
        if not supports_amp_scaling(part.optimizer):
            verdict.start_mirror()

    def _skip_together(self, optimizers: Sequence[Any], chosen: set[int] | None) -> None:
        """Skip all of them, after the reductions of Partial gradients that the other ranks wait in."""
        sum_partial(optimizers, chosen)  # first: it replaces gradients, and `_skip` refers to the first one
        for optimizer in optimizers:
            self._skip(self._state(optimizer))


def sum_partial(optimizers: Sequence[Any], chosen: set[int] | None) -> None:
    """Join the reductions of Partial gradients that are still to come, on a rank that will not use the sums."""
    parameters = all_parameters(optimizers)
    with suppress(Exception):  # the caller is raising already
        local_gradients(parameters, [1] * len(parameters), chosen)


def all_parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return the parameters of all optimizers, in order; shared ones come twice."""
    return [parameter for optimizer in optimizers for parameter in parameters_of(unwrap(optimizer))]

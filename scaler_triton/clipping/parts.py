"""What both ways of clipping share: the optimizers, and how all of them are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from scaler_triton.clipping.rank_norms import local_gradients
from scaler_triton.optimizers import parameters_of, unwrap
from scaler_triton.step_state import StepState
from scaler_triton.unscaling import UnscalingMixin

if TYPE_CHECKING:
    from scaler_triton.plan import GradPlan


class Part(NamedTuple):
    """One of the optimizers that are clipped together; `copies`: how many ranks hold each parameter's shard."""

    optimizer: Any
    state: StepState
    plan: GradPlan
    copies: Sequence[int]


class PartsMixin(UnscalingMixin):
    """Skips all optimizers."""

    def _skip_together(self, optimizers: Sequence[Any], chosen: set[int] | None) -> None:
        """Skip all of them, after the reductions of Partial gradients that the other ranks wait in."""
        parameters = all_parameters(optimizers)
        with suppress(Exception):  # the caller is raising already
            # First: it replaces gradients, and `_skip` refers to the first one.
            local_gradients(parameters, [1] * len(parameters), chosen)
        for optimizer in optimizers:
            self._skip(self._state(optimizer))


def all_parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return the parameters of all optimizers, in order; shared ones come twice."""
    return [parameter for optimizer in optimizers for parameter in parameters_of(unwrap(optimizer))]

"""A prepared check: what an ordinary one bound, and what tells whether all is as it was.

Ordinary: no other rank must agree, one look is taken, and every parameter has a dense gradient on the scale's device.
The first such check prepares, and runs what it has prepared; a steady one compares and runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, call
from typing import TYPE_CHECKING, Any

from torch import Tensor

from scaler_triton.core.dispatch import is_capturing
from scaler_triton.core.plan import Batch, GradPlan
from scaler_triton.core.step import FLAGS

if TYPE_CHECKING:
    from scaler_triton.core.flag import Flag
    from scaler_triton.core.look import Look
    from scaler_triton.core.passes import Pass
    from scaler_triton.core.step import OptimizerStep

_grad_of = attrgetter("grad")


class PreparedCheck:
    """One optimizer's check as it was last time.

    Args:
        plan: of its gradients, all of which are there; it keeps this, so this does not keep it.
        looks: the list of looks that the check was asked for, of one.
        scale: one element, fp32; read in each run.
        flag: written in each run.
        divides: whether the look divides.
        passes: the look at the gradients of each layout.
        selectors: for each layout a function that selects its gradients.
    """

    def __init__(
        self,
        plan: GradPlan,
        looks: Sequence[Look],
        scale: Tensor,
        flag: Flag,
        divides: bool,
        passes: Sequence[Pass],
        selectors: Sequence[Callable[[Sequence[Any]], Sequence[Tensor]]],
    ) -> None:
        self.looks, self.scale, self.flag, self.divides = looks, scale, flag, divides
        self.passes, self._selectors, self._layouts = passes, selectors, plan.layouts
        self._ids, self._match_all, self._may_capture = plan.ids, plan.match_all, scale.is_cuda

    def rows(self, step: OptimizerStep, optimizer: Any, scale: Tensor) -> Sequence[Sequence[Tensor]] | None:
        """Return the gradients by layout if all is as it was, else None."""
        if scale is not self.scale or step.flag is not self.flag or step[FLAGS]:
            return None
        if self._may_capture and is_capturing():
            return None
        groups = optimizer.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else [each for group in groups for each in group["params"]]
        if list(map(id, parameters)) != self._ids:
            return None
        grads = tuple(map(_grad_of, parameters))
        if not self._match_all(*grads):  # type: ignore[misc]
            return None
        return list(map(call, self._selectors, repeat(grads)))

    def batches(self, rows: Sequence[Sequence[Tensor]]) -> list[Batch]:
        """Return these gradients as a check's batches."""
        return [Batch(layout, row, row) for layout, row in zip(self._layouts, rows, strict=True)]

    def run(self, rows: Iterable[Sequence[Any]]) -> bool:
        """Take the look at all gradients; return whether one is known, without a wait, to be not finite."""
        self.flag.has_gradients, self.flag.written = True, self.divides
        for look, tensors in zip(self.passes, rows, strict=True):
            look(tensors)
        return self.flag.gather()

"""Gradients between unscaling and the step: unscaled once, and no backward may add scaled ones to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scaler_triton.core.step import CARRIED, FAILED, UNSCALED, parameters_of


def unscale_once(scaler: Any, *optimizers: Any) -> None:
    """Call `unscale_` for each unless its gradients were unscaled in this step, or before the last update.

    An error is raised after the last one: other ranks go on to it, too.
    """
    error: Exception | None = None
    for optimizer in optimizers if scaler._enabled else ():
        try:
            if not is_unscaled(scaler, optimizer):
                scaler.unscale_(optimizer)
        except Exception as failure:
            error = error or failure
    if error is not None:
        raise error


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Return whether the gradients were unscaled, by a guard checked, in this step or before the last update."""
    step = scaler._ours.steps.open(optimizer)
    if step.phase is CARRIED:
        scaler._ours.checks.resume(step, scaler._scale)
    return step.phase in (UNSCALED, FAILED)


def clip_again(
    scaler: Any, optimizers: Sequence[Any], *args: Any, model: Any, parameters: Sequence[Tensor], at_once: bool = True
) -> Tensor:
    """Call `clip_grad_norm_` (`args` are its numbers), also for gradients that were unscaled, by a guard checked.

    Those are only clipped. `at_once`: the optimizers hold no others than `parameters`. If the look at a step that was
    carried fails on this rank, this raises after clipping: the other ranks clip, too.
    """
    error: Exception | None = None
    for optimizer in optimizers:
        try:
            at_once &= not is_unscaled(scaler, optimizer)
        except Exception as failure:
            at_once, error = False, error or failure
    try:
        norm: Tensor = scaler.clip_grad_norm_(
            optimizers, *args, model=model, parameters=None if at_once else parameters
        )
        return norm
    finally:
        if error is not None:
            raise error


class Unscaled:
    """The gradients that are unscaled for a step still to come. To be made before the loss of a backward is scaled."""

    def __init__(self, scaler: Any) -> None:
        is_guard = not scaler._ours.scales
        self._steps, self._did = scaler._ours.steps, "checked" if is_guard else "unscaled"
        self._gradients = []
        for optimizer in self._steps.awaiting():
            gradients = _gradients_of(optimizer)
            if is_guard and all(gradient is None for gradient, _ in gradients):
                self._steps.reset(parameters_of(optimizer))  # its step is left out, for which an update waits
            else:
                self._gradients.append((optimizer, gradients))

    def refuse_changes(self) -> None:
        """Raise RuntimeError, naming the optimizer, if the backward wrote one or the step can no longer be taken."""
        if not self._gradients:
            return
        waiting = {id(optimizer) for optimizer in self._steps.awaiting()}
        for optimizer, before in self._gradients:
            if id(optimizer) in waiting:
                wrong = not _are_same(before, _gradients_of(optimizer))
            else:  # update() has run since, and scaling this loss ended the step: its gradients count as scaled now
                wrong = any(gradient is not None for gradient, _ in before)
            if wrong:
                raise RuntimeError(
                    f"backward() ran between clipping, which {self._did} the gradients of {type(optimizer).__name__}, "
                    "and the step. Clip right before the step; to leave a step out, call the scaler's update() and "
                    "drop the gradients."
                )


def _gradients_of(optimizer: Any) -> list[tuple[Tensor | None, int]]:
    """Return the gradients with their version counters, by which writes show; FSDP2 writes into a DTensor's shard."""
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return [(grad, 0 if grad is None else getattr(grad, "_local_tensor", grad)._version) for grad in gradients]


def _are_same(one: list[tuple[Tensor | None, int]], other: list[tuple[Tensor | None, int]]) -> bool:
    return len(one) == len(other) and all(a is b and m == n for (a, m), (b, n) in zip(one, other, strict=True))

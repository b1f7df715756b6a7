"""What a skipped step may leave behind: gradients that nobody clears, and averages in an optimizer that stay NaN.

Nothing waits for the device: what was computed after one step is read some steps later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from scaler_triton.core.dispatch import skip_tracing
from scaler_triton.core.gradients import largest_by_kind, local_tensor
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.observer import Meeting
from scaler_triton.core.step import OptimizerStep, parameters_of
from scaler_triton.core.warning import warn_once
from scaler_triton.text import count_of

_UNCLEARED = (
    "Two steps of {} in a row were skipped, and between them nobody cleared its gradients: they keep the first one's "
    "NaN and Inf, so no step will ever be taken. Call optimizer.zero_grad() in each iteration, also for an optimizer "
    "that clears gradients in its step: a skipped one does not."
)
_POISONED = (
    "A step of {name} by finite gradients has left {count} with NaN or Inf, which had none before: the first is number "
    "{first}, of shape {shape}. So they come from the optimizer's own state. {cause}"
)
_AFTER_SKIP = (
    "The step before was skipped, for gradients that its averages may have taken in backward, as AdaScale's do: reset "
    "them after each skip (scaler.was_skipped(optimizer)). Go back to a checkpoint."
)
_AT_FIRST = "It was its first one: look at lr, at eps, and at state in fp16."


class Following:
    """Whether backward has only ever added to a gradient since a skip, as where nobody clears it."""

    def __init__(self, parameter: Tensor, at: int) -> None:
        self.at = at  # the number of steps when the skip is over
        self.is_uncleared = False
        grad: Any = parameter.grad
        self._grad: Callable[[], Tensor | None] = weakref.ref(grad)
        self._version = local_tensor(grad)._version
        self._handle = parameter.register_post_accumulate_grad_hook(self.accumulated)  # type: ignore[no-untyped-call]

    def accumulated(self, parameter: Tensor) -> None:
        """Compare versions: backward adds in one write; `zero_()` before it, which may come later, is another."""
        grad = self._grad()
        self._version += 1
        self.is_uncleared = grad is not None and grad is parameter.grad and local_tensor(grad)._version == self._version
        if not self.is_uncleared:
            self.end()

    def end(self) -> None:
        """Follow it no longer."""
        self._handle.remove()


skip_tracing(Following)


def follow_gradients(step: OptimizerStep, warned: set[str]) -> None:
    """After a skip follow a gradient to the next one, and warn if nobody has cleared it in between."""
    owner = step.owner()
    parameters = () if owner is None else parameters_of(owner)
    before: Following | None = step.notes.pop("following", None)
    if before is not None:
        before.end()
        if before.is_uncleared and before.at == step.steps_taken:
            warn_once(warned, "ST05", _UNCLEARED.format(type(owner).__name__))
    followed = next((each for each in parameters if each.grad is not None and each.is_leaf), None)
    if followed is not None:
        with suppress(RuntimeError, TypeError):  # a frozen one or a subclass may have no hooks or weak references
            step.notes["following"] = Following(followed, step.steps_taken + 1)


class _Trial:
    """Which parameters stop being finite in a step that is taken after a skip, or in the first one."""

    def __init__(self, parameters: Sequence[Tensor], steps_taken: int, cause: str) -> None:
        self.ids, self.cause = list(map(id, parameters)), cause
        self.steps_taken = steps_taken  # of the optimizer before the step
        self.copies: list[tuple[list[int], HostCopy]] = []  # of what has become NaN or Inf, by device
        self._before = largest_by_kind(dict(enumerate(parameters)))

    def end(self, parameters: Sequence[Tensor]) -> None:
        """Look at the parameters after the step."""
        for kind, (indices, largest) in largest_by_kind(dict(enumerate(parameters))).items():
            known, before = self._before.get(kind, ([], largest))
            if known == indices:
                copy = HostCopy()
                copy.start(before.isfinite() & ~largest.isfinite())
                self.copies.append((indices, copy))


def look_at_parameters(meeting: Meeting, warned: set[str]) -> None:
    """Go on with the trial of an optimizer's step: begin one for the first step, look after it, and read what was seen.

    Each part comes with another check.
    """
    step, plan = meeting.step, meeting.plan
    trial: _Trial | None = step.notes.get("trial")
    if trial is None and step.steps_taken == 0:
        trial = step.notes["trial"] = _Trial(meeting.parameters, 0, _AT_FIRST)
    if trial is None or trial.ids != plan.ids:
        step.notes.pop("trial", None)
        return
    if not trial.copies and step.steps_taken > trial.steps_taken:
        trial.end(meeting.parameters)
    if not trial.copies or not all(copy.has_arrived() for _, copy in trial.copies):
        plan.is_new = True  # to be told of the next check
        return
    del step.notes["trial"]
    bad = sorted(
        index for indices, copy in trial.copies for index, is_bad in zip(indices, copy.read(), strict=True) if is_bad
    )
    if bad:
        shape = " x ".join(map(str, meeting.parameters[bad[0]].shape)) or "()"
        known = {"name": type(step.owner()).__name__, "count": count_of(len(bad), "parameter")}
        warn_once(warned, "ST06", _POISONED.format(**known, first=bad[0], shape=shape, cause=trial.cause))


def remember_parameters(step: OptimizerStep) -> None:
    """After a skip begin the trial of the next step that is taken."""
    if step.plan is None or step.owner() is None:
        return
    trial: _Trial | None = step.notes.get("trial")
    if trial is None or trial.copies:
        trial = step.notes["trial"] = _Trial(parameters_of(step.owner()), 0, _AFTER_SKIP)
    trial.steps_taken, trial.cause = step.steps_taken + 1, _AFTER_SKIP
    step.plan.is_new = True

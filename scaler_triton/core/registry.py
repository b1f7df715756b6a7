"""Which step belongs to which optimizer: by ids, through wrappers, until it is freed; what other code writes there."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from scaler_triton.core.flag import Flag
from scaler_triton.core.step import (
    CARRIED,
    FAILED,
    FLAGS,
    READY,
    READY_STAGE,
    UNSCALED,
    OptimizerStep,
    Phase,
    nobody,
    parameters_of,
)

_KEPT = 8  # optimizers that have no weak references, so that nothing tells when they are freed


class Steps(dict[Any, Any]):
    """The steps of a scaler's optimizers, by the ids of these and of their wrappers: `_per_optimizer_states`."""

    __slots__ = (
        "__weakref__", "exposed", "new_state", "of_scaler", "on_scale", "replayed", "scaled", "unfinished", "updates",
    )  # fmt: skip

    def __init__(self, of_scaler: object = None) -> None:
        self.of_scaler = of_scaler or object()  # the same for all registries of one scaler
        self.unfinished = False  # whether a step may be CARRIED, UNSCALED or FAILED: `scale` and `update` must look
        self.exposed = False  # whether other code has seen the steps: it may write flags at any time
        self.replayed = False  # whether graphs may write gradients without a call of `scale`
        self.on_scale: Callable[[], None] | None = None  # called, if `unfinished`, for a loss that begins no new step
        self.updates = 0  # calls of `close`
        self.scaled = False  # set by a compiled `scale`, which cannot call `loss_scaled`: the next `open` does
        self.new_state: Callable[[], Mapping[str, Any]] = dict  # of an assigned mapping: what a new step also holds

    def __missing__(self, key: Any) -> OptimizerStep:
        step = self[key] = self._new_step()
        return step

    def _new_step(self) -> OptimizerStep:
        step = OptimizerStep()
        step.update(self.new_state())
        return step

    def open(self, optimizer: Any) -> OptimizerStep:
        """Return the step of an optimizer, or of the one in a wrapper; it is made if there is none."""
        if self.scaled:
            self.loss_scaled()
        step = self.get(id(optimizer))
        if type(step) is OptimizerStep and step.owner() is optimizer and step["stage"] is step.phase.stage:
            return step
        return self._find_or_make(optimizer)

    def last(self, optimizer: Any) -> OptimizerStep | None:
        """Return the step of an optimizer, or of the one in a wrapper; None if there is none."""
        for candidate in (optimizer, unwrap(optimizer)):  # a wrapper may have got another optimizer since its last step
            step = self.get(id(candidate))
            if type(step) is OptimizerStep and step.handles.get(id(candidate), nobody)() is candidate:
                return step
        return None

    def all(self) -> list[OptimizerStep]:
        """Return the steps, each once."""
        return list({id(step): step for step in [*self.values()] if type(step) is OptimizerStep}.values())

    def loss_scaled(self) -> None:
        """Begin each step anew that is CARRIED or FAILED; the gradients of an UNSCALED one may be of another loss."""
        if self.on_scale is not None:
            self.on_scale()
            return
        for step in self.all():
            if step["stage"] is not step.phase.stage:
                step.adopt()
            if step.phase in (CARRIED, FAILED):
                step.reset()
            elif step.phase is UNSCALED:
                step.loss_is_newer = True
        self.unfinished = self.scaled = False

    def carried_over(self, captured: bool) -> list[OptimizerStep]:
        """Return the steps that the update which comes now carries over; it must not clear their flags.

        A replay may write new gradients without a call of `scale`: then only what is captured with it is carried.
        """
        return [] if self.replayed and not captured else [step for step in self.all() if step.outlives_update()]

    def close(self, carried: Sequence[OptimizerStep] = ()) -> None:
        """End an update: each step becomes READY, but those that are carried over it."""
        self.updates += 1
        self.unfinished, self.new_state = bool(carried), dict  # as torch's update leaves a mapping of its own
        for step in carried:
            step.carry()
        for key, step in [*self.items()]:
            if type(step) is not OptimizerStep or step.owner() is None:
                del self[key]  # other code has put it here, or its optimizer is freed
            elif step.phase is not CARRIED:
                step.reset()

    def replaced_by(self, states: Mapping[Any, Any]) -> Steps:
        """Return the registry for assigned `states`: `states` itself if it is one; this one stays as it is.

        In a new one every step is READY, except where `states` holds torch's dict for an optimizer; those that it makes
        later are as its `default_factory` makes them.
        """
        if isinstance(states, Steps) and states.of_scaler is self.of_scaler:
            return states
        steps = Steps(self.of_scaler)
        steps.exposed, steps.replayed = self.exposed, self.replayed
        steps.new_state = getattr(states, "default_factory", None) or dict
        for before in self.all():
            step, owner = steps._new_step(), before.owner()
            step.plan, step.outcome, step.notes = before.plan, before.outcome, before.notes
            step.steps_taken = before.steps_taken
            for handle in before.handles.values():
                if (optimizer := handle()) is not None:
                    steps._add_handle(step, optimizer, owns=optimizer is owner)
        for key, state in states.items():
            steps[key].update(state)
            steps.exposed = True  # whoever has made it may hold its flags
        return steps

    def awaiting(self) -> list[Any]:
        """Return the optimizers whose gradients were unscaled, perhaps before the last update, but not stepped."""
        owners = [step.owner() for step in self.all() if step.phase in (UNSCALED, CARRIED, FAILED)]
        return [owner for owner in owners if owner is not None]

    def reset(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Make every step READY, or only the steps of optimizers that hold one of `parameters`."""
        given = None if parameters is None else {id(parameter) for parameter in parameters}
        for step in self.all():
            owner = step.owner()
            if given is None or (owner is not None and any(id(each) in given for each in parameters_of(owner))):
                step.reset()
                step.update(self.new_state())

    def outcome(self, optimizer: Any) -> bool | Phase | Tensor | None:
        """Return whether the last step was skipped, or a copy of its flag on the device; None if unknown."""
        step = self.last(optimizer)
        outcome = None if step is None else step.outcome
        return outcome.last_found_inf().clone() if isinstance(outcome, Flag) else outcome

    def _find_or_make(self, optimizer: Any) -> OptimizerStep:
        """Do what `open` does for a wrapper, a new optimizer, or one whose step other code has moved or written."""
        inner = unwrap(optimizer)
        given: Any = self.get(id(optimizer))
        if type(given) is OptimizerStep and given["stage"] is given.phase.stage:
            handle = given.handles.get(id(optimizer), nobody)
            if handle() is optimizer and given.owner() is inner:  # it may wrap another now
                return given
        found: Any = self.get(id(inner))
        if found is None and _has_no_owner(given):
            found = given  # a framework looked it up by the wrapper, before the first call
        if type(found) is OptimizerStep and (found.owner is nobody or found.owner() is inner):
            step = found
        else:
            step = self._new_step()
            was_another = type(found) is OptimizerStep and (found.owner() is None or id(inner) in found.handles)
            if found is not None and not was_another:  # else the id is that of a freed one
                step.update(found)  # a plain dict, or another optimizer's state that a framework has moved here
        self._add_handle(step, inner, owns=True)
        if inner is not optimizer:
            if given is not step and _has_no_owner(given) and id(optimizer) in step.handles:
                step.update(given)  # a framework has put another state there to reset it
            self._add_handle(step, optimizer)
        if step["stage"] is not step.phase.stage:
            step.adopt()
            self.unfinished = True
        return step

    def _add_handle(self, step: OptimizerStep, optimizer: Any, *, owns: bool = False) -> None:
        key = id(optimizer)
        try:
            handle: Callable[[], Any] = weakref.ref(optimizer, functools.partial(_forget, weakref.ref(self), key))
        except TypeError:  # an object without weak references is kept: the last few, as callers may make one a step
            handle = lambda: optimizer  # noqa: E731
            without_weakref = [each for each in self.all() if each.handles and type(each.owner) is not weakref.ref]
            for idle in [each for each in without_weakref if each.phase is READY and each is not step][:-_KEPT]:
                for each in idle.handles:
                    self.pop(each, None)
        step.handles[key] = handle
        if owns:
            step.owner = handle
        self[key] = step


def _forget(registry: weakref.ref[Steps], key: int, handle: Any) -> None:
    """Drop a freed optimizer's step; if it is checked or over, the next update drops it."""
    steps = registry()
    step = None if steps is None else steps.get(key)
    if steps is None or type(step) is not OptimizerStep or step.handles.get(key) is not handle:
        return
    del steps[key], step.handles[key]
    if step.owner is handle and (step[FLAGS] or step["stage"] is not READY_STAGE):
        step.plan, step.notes = None, {}  # they hold its parameters
        steps["freed", id(step)] = step


def _has_no_owner(state: Any) -> bool:
    """Return whether a state was put into the registry by other code, or made for its lookup."""
    return state is not None and getattr(state, "owner", nobody) is nobody


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that share its `param_groups`, whatever attribute keeps it."""
    outermost = optimizer
    for _ in range(32):  # more are taken for a cycle
        inner = _kept_in(optimizer)
        if inner is None:
            return optimizer
        optimizer = inner
    return outermost


def _kept_in(wrapper: Any) -> Any:
    """Return the optimizer that a wrapper keeps, None if it is no wrapper."""
    with suppress(Exception):  # an unrelated property
        kept = [getattr(wrapper, "optimizer", None), *getattr(wrapper, "__dict__", {}).values()]
        for each in kept:
            is_other = hasattr(each, "param_groups") and each is not wrapper
            if is_other and _same_groups(each.param_groups, wrapper.param_groups):
                return each
    return None


def _same_groups(groups: Any, others: Any) -> bool:
    """Return whether the groups hold the same lists of parameters, which alone survive `load_state_dict`."""
    pairs = itertools.zip_longest(groups, others)  # a container of optimizers makes a new list of groups each time
    return all(mine is theirs or mine["params"] is theirs["params"] for mine, theirs in pairs)

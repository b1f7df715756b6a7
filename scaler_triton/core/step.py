"""The state machine of an optimizer's step, and the only registry of optimizers.

An optimizer has one OptimizerStep for as long as it lives; `update` makes it ready for the next step. Only this module
writes its phase.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton.core.flag import Flag, Flags, PeerFailedError
from scaler_triton.core.plan import GradPlan
from scaler_triton.report.overflow import Marks

if TYPE_CHECKING:
    from scaler_triton.core.update import Counters

_FLAGS = "found_inf_per_device"
_KEPT = 8  # optimizers that have no weak references, so that nothing tells when they are freed


class Phase(Enum):
    """What is known of an optimizer's gradients; the `stage` is torch's, which other code reads."""

    READY = OptState.READY, "gradients are scaled; if there is a flag, ranks agreed on it"
    UNSCALED = OptState.UNSCALED, "ranks agreed on the flag; gradients are divided, perhaps clipped"
    CARRIED = OptState.READY, "divided before the last update, but not stepped; ends when the next loss is scaled"
    FAILED = OptState.UNSCALED, "an error left gradients half written: this step will be skipped"
    STEPPED = OptState.STEPPED, "stepped or skipped"
    FOREIGN = None, "a stage of a subclass's own, which alone knows what it means: torch's methods go by it"

    def __init__(self, stage: OptState | None, meaning: str) -> None:
        self.stage = stage


# Looking up an enum's member takes 50 ns, a global 4.
READY, UNSCALED, CARRIED, FAILED, STEPPED, FOREIGN = Phase
READY_STAGE, UNSCALED_STAGE, STEPPED_STAGE = OptState
_PHASES = {READY_STAGE: READY, UNSCALED_STAGE: UNSCALED, STEPPED_STAGE: STEPPED}


def _nobody() -> None:
    """Stand for the owner of a step that other code has looked up, before its optimizer is known."""


class OptimizerStep(dict[str, Any]):
    """The step of one optimizer: a dict with torch's two keys, which frameworks read and write, and fields of ours.

    | phase    | unscale_, clip | step                 | scale | update  | error in a check | in optimizer.step |
    |----------|----------------|----------------------|-------|---------|------------------|-------------------|
    | READY    | UNSCALED       | checks, STEPPED      |       | READY   | READY (1)        | FAILED            |
    | UNSCALED | raises         | STEPPED by its flag  | (2)   | CARRIED |                  | FAILED            |
    | CARRIED  | UNSCALED       | STEPPED by its flag  | READY | CARRIED | CARRIED (1)      | FAILED            |
    | FAILED   | raises         | skips, STEPPED       | READY | CARRIED |                  |                   |
    | STEPPED  | raises         | raises               |       | READY   |                  |                   |

    (1) FAILED if gradients had been written, if the error was reported to other ranks, or if the reduction failed.
    (2) `loss_is_newer`: the gradients may be another loss's. `update` makes it READY, and so does the next call if the
        flag tells that another rank's check failed, as that rank is READY, too.

    `clip_grad_norm_(parameters=...)` may clip UNSCALED and FAILED gradients again. Other code may write "stage": the
    phase follows at the next `scale`, or when the step is next looked up. With one that torch does not have, the step
    is FOREIGN until `update`.
    """

    __slots__ = (
        "carried", "flag", "handles", "loss_is_newer", "notes", "outcome", "owner", "phase", "plan", "steps_taken",
    )  # fmt: skip

    def __init__(self) -> None:
        self.owner: Callable[[], Any] = _nobody  # returns the innermost optimizer, None once it is freed
        self.handles: dict[int, Callable[[], Any]] = {}  # the same for it and for each wrapper around it, by id
        self.plan: GradPlan | None = None  # made by the first check
        self.flag: Flag | None = None  # the last check's
        # What `was_skipped` returns after the last step, or the flag to read it from; FAILED: True. None: not stepped.
        self.outcome: bool | Flag | Tensor | Phase | None = None
        self.steps_taken = 0  # calls of `step` that have returned, by which `attempts` tells of one
        self.notes: dict[str, Any] = {}  # what others keep for as long as the optimizer lives
        self.reset()

    def reset(self) -> None:
        """Begin the next step: its gradients are scaled and have not been checked."""
        self._enter(READY)
        self[_FLAGS] = {}
        self.carried: Flags = {}  # the flags by which a CARRIED step will go; torch's class holds none after an update
        self.loss_is_newer = False

    def __reduce__(self) -> Any:
        return dict, ({"stage": self["stage"], _FLAGS: dict(self[_FLAGS])},)  # a copy is a plain state of torch's

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self["stage"] = phase.stage

    def require_unscalable(self, hint: str = "", late: str = "", *, again: bool = False) -> None:
        """Raise torch's errors for a wrong order of calls; with `again`, UNSCALED and FAILED gradients are accepted.

        Behind torch's text stands a caller's `hint`, or, after `step`, what is `late`.
        """
        self.drop_if_peer_failed()
        if self.phase is STEPPED:
            raise RuntimeError(f"unscale_() is being called after step().{late}")
        if self.phase is FOREIGN:
            raise RuntimeError(
                f"an optimizer whose stage is {self['stage']!r}, which is not torch's, cannot be clipped here: call "
                "unscale_, then torch.nn.utils.clip_grad_norm_"
            )
        if self.phase in (UNSCALED, FAILED) and not again:
            raise RuntimeError(f"unscale_() has already been called on this optimizer since the last update().{hint}")

    def require_steppable(self) -> None:
        """Raise torch's error for a second step since the last update."""
        if self.phase is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self.drop_if_peer_failed()

    def checked(self, flag: Flag, flags: Flags, *, divided: bool, by_step: bool = False) -> None:
        """Store the flag that the ranks agreed on after a check, which `divided` or only read; `by_step`: in `step`."""
        self.flag, self[_FLAGS], self.carried = flag, flags, {}
        if divided:
            self._enter(UNSCALED)
            self.loss_is_newer = False
            is_read_later = not (by_step or flag.captured)
            if is_read_later and not getattr(self.owner(), "_step_supports_amp_scaling", False):  # on the host
                flag.start_copy()

    def carry(self) -> None:
        """Outlive an update: what other code sees is a fresh state, and the step will go by the flags it has."""
        flags = self.carried or self[_FLAGS]
        if self.phase is FAILED:
            self.flag, flags = None, {device: torch.ones_like(flag) for device, flag in flags.items()}
        self.reset()
        self._enter(CARRIED)
        self.carried = flags

    def resume(self, captured: bool) -> None:
        """Continue a CARRIED step, or start it over if only one of its check and this call is captured in a graph."""
        if self.flag is not None and captured != self.flag.captured:
            self.reset()
            return
        self[_FLAGS], self.carried = self.carried, {}
        if self.flag is not None:
            self.flag.is_final = True  # it may be that of another batch's look
        if self.plan is not None:
            self.plan.marks.resume(self[_FLAGS])
        self._enter(UNSCALED)

    def failed(self, home: torch.device | None) -> None:
        """Set the flag on each parameter's device, else on `home`; None keeps the agreed flag, for equal scales."""
        self._enter(FAILED)  # first, in case no flag can be made below
        self.loss_is_newer, self.outcome = False, None
        if home is None:
            return
        self.flag, self[_FLAGS], self.carried = None, {}, {}
        owner = self.owner()
        parameters = () if owner is None else parameters_of(owner)
        devices = [each.device for each in parameters if isinstance(each, Tensor) and not each.is_meta]
        ones = {each: torch.ones((), dtype=torch.float32, device=each) for each in dict.fromkeys(devices or [home])}
        self[_FLAGS] = ones

    def peer_has_failed(self) -> bool:
        """Return whether the check of an UNSCALED step failed on another rank, waiting for the flag."""
        if self.phase is not UNSCALED or self.flag is None or self.flag.captured:
            return False
        try:
            self.flag.on_host()
        except PeerFailedError:
            return True
        except RuntimeError:  # the ranks hold different scales
            pass
        return False

    def drop_if_peer_failed(self) -> None:
        """Begin anew if a loss was scaled since another rank's check failed, where only that rank would check."""
        if self.loss_is_newer and self.peer_has_failed():
            self.reset()

    def undo_failed_look(self, phase: Phase) -> None:
        """Return to the phase before a check-only call that FAILED: `step` checks again, as the other ranks do."""
        self._enter(phase)

    def stepped(self) -> None:
        """End the step, which was taken or skipped."""
        self._enter(STEPPED)

    def adopt(self) -> None:
        """Follow a stage that other code has written."""
        self.phase = _PHASES.get(self["stage"], FOREIGN)

    def is_bad(self, exposed: bool) -> bool:
        """Return whether the optimizer must not step, waiting for the device; raise if the ranks are apart.

        If the step is `exposed` to other code, that may have written flags, or put in others.
        """
        if self.flag is not None:
            is_bad = self.flag.on_host(copied=not exposed)
            if not exposed or self.own_flag() is not None:
                return is_bad
        return any(flag.item() != 0.0 for flag in self[_FLAGS].values())

    def own_flag(self) -> Flag | None:
        """Return the last check's flag if it is all that the step holds; None if other code has put in others."""
        flag, flags = self.flag, self[_FLAGS]
        is_held = flag is not None and len(flags) == 1 and flags.get(flag.device) is flag.found_inf
        return flag if is_held else None


class Steps(dict[Any, Any]):
    """The steps of a scaler's optimizers, by the ids of these and of their wrappers: `_per_optimizer_states`."""

    __slots__ = (
        "__weakref__", "counters", "exposed", "measures", "new_state", "replayed", "requested", "scaled", "unfinished",
        "updates",
    )  # fmt: skip

    def __init__(self, counters: Counters, requested: str) -> None:
        self.counters, self.requested = counters, requested  # the scaler's counters and the requested backend
        self.measures = False  # whether checks measure gradients
        self.unfinished = False  # whether a step may be CARRIED, UNSCALED or FAILED: `scale` and `update` must look
        self.exposed = False  # whether other code has seen the steps: it may write flags at any time
        self.replayed = False  # whether graphs may write gradients without a call of `scale`
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
        if type(step) is OptimizerStep and step["stage"] is step.phase.stage:
            owner = step.owner()
            if owner is optimizer:
                return step
            handle = step.handles.get(id(optimizer))
            if handle is not None and handle() is optimizer and owner is unwrap(optimizer):  # it may wrap another now
                return step
        return self._find_or_make(optimizer)

    def last(self, optimizer: Any) -> OptimizerStep | None:
        """Return the step of an optimizer, or of the one in a wrapper; None if there is none."""
        for each in (optimizer, unwrap(optimizer)):  # a wrapper may have got another optimizer since its last step
            step = self.get(id(each))
            if type(step) is OptimizerStep and step.handles.get(id(each), _nobody)() is each:
                return step
        return None

    def plan(self, step: OptimizerStep, optimizer: Any) -> tuple[GradPlan, list[Tensor]]:
        """Return the plan of the optimizer's gradients, a new one if its parameters changed, and these parameters.

        `model.to` moves or swaps all of them in place: then the first one, or the first DTensor, is elsewhere.
        """
        groups, plan = optimizer.param_groups, step.plan
        if type(groups) is list and len(groups) == 1:
            parameters = groups[0]["params"]
        else:
            parameters = [each for group in groups for each in group["params"]]
        if (
            plan is None
            or list(map(id, parameters)) != plan.ids
            or (parameters and parameters[0].device != plan.first_device)
            or (plan.dtensors and plan.spec_of_first(parameters) != plan.first_spec)
        ):
            plan = GradPlan(parameters, self.requested, measures=self.measures)
            plan.marks = Marks(plan, self.counters)
            step.plan = plan
        return plan, parameters

    def all(self) -> list[OptimizerStep]:
        """Return the steps, each once."""
        return list({id(step): step for step in [*self.values()] if type(step) is OptimizerStep}.values())

    def loss_scaled(self) -> None:
        """Begin each step anew that is CARRIED or FAILED; the gradients of an UNSCALED one may be of another loss."""
        for step in self.all():
            if step["stage"] is not step.phase.stage:
                step.adopt()
            if step.phase in (CARRIED, FAILED):
                step.reset()
            elif step.phase is UNSCALED:
                step.loss_is_newer = True
        self.unfinished = self.scaled = False

    def carried_over(self, captured: bool) -> list[OptimizerStep]:
        """Return the steps that will outlive the update which comes now; it must not clear their flags.

        A replay may write new gradients without a call of `scale`: then only what is captured with it is carried.
        """
        steps = [] if self.replayed and not captured else self.all()
        carried = [step for step in steps if step.phase is CARRIED]
        for step in steps:
            is_unscaled = step["stage"] is UNSCALED_STAGE and step.phase in (UNSCALED, FAILED) and step[_FLAGS]
            if is_unscaled and not step.loss_is_newer:
                carried.append(step)
                if step.plan is not None:
                    step.plan.marks.carry(step.notes.get("clipped", ()))
        return carried

    def close(self, carried: Sequence[OptimizerStep] = ()) -> None:
        """End an update: each step becomes READY, but those that are carried over it."""
        self.updates += 1
        self.unfinished, self.new_state = bool(carried), dict  # as torch's update leaves a mapping of its own
        for key, step in [*self.items()]:
            if type(step) is not OptimizerStep or step.owner() is None:
                del self[key]  # other code has put it here, or its optimizer is freed
            elif not any(step is each for each in carried):
                step.reset()
            else:
                step.carry()

    def replaced_by(self, states: Mapping[Any, Any]) -> Steps:
        """Return the registry for assigned `states`: `states` itself if it is one; this one stays as it is.

        In a new one every step is READY, except where `states` holds torch's dict for an optimizer; those that it makes
        later are as its `default_factory` makes them.
        """
        if isinstance(states, Steps) and states.counters is self.counters:
            return states
        steps = Steps(self.counters, self.requested)
        steps.exposed, steps.replayed, steps.measures = self.exposed, self.replayed, self.measures
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
        """Do what `open` does for an optimizer that is new, or whose step other code has moved, replaced or written."""
        inner = unwrap(optimizer)
        given: Any = self.get(id(optimizer))
        found: Any = self.get(id(inner))
        if found is None and _has_no_owner(given):
            found = given  # a framework looked it up by the wrapper, before the first call
        if type(found) is OptimizerStep and (found.owner is _nobody or found.owner() is inner):
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
            held = [each for each in self.all() if each.handles and type(each.owner) is not weakref.ref]
            for idle in [each for each in held if each.phase is READY and each is not step][:-_KEPT]:
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
    if step.owner is handle and (step[_FLAGS] or step["stage"] is not READY_STAGE):
        step.plan, step.notes = None, {}  # they hold its parameters
        steps["freed", id(step)] = step


def _has_no_owner(state: Any) -> bool:
    """Return whether a state was put into the registry by other code, or made for its lookup."""
    return state is not None and getattr(state, "owner", _nobody) is _nobody


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that keep it as `.optimizer` and share its `param_groups`."""
    outermost = optimizer
    for _ in range(32):  # more are taken for a cycle
        try:
            inner = getattr(optimizer, "optimizer", None)
            if inner is None or inner is optimizer or not _same_groups(inner.param_groups, optimizer.param_groups):
                return optimizer
        except Exception:  # an unrelated property
            return optimizer
        optimizer = inner
    return outermost


def _same_groups(groups: Any, others: Any) -> bool:
    """Return whether the groups hold the same lists of parameters, which alone survive `load_state_dict`."""
    pairs = itertools.zip_longest(groups, others)  # a container of optimizers makes a new list of groups each time
    return all(mine is theirs or mine["params"] is theirs["params"] for mine, theirs in pairs)


def parameters_of(*optimizers: Any) -> list[Tensor]:
    """Return all parameters, in order, a shared one twice."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]

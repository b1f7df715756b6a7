"""The state machine of an optimizer's step, and the only registry of optimizers.

Each optimizer has one OptimizerStep, for as long as it lives; `update` makes it ready for the next step. Nothing else
writes its phase.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton.flag import Flag, Flags, any_flag, as_flag
from scaler_triton.plan import GradPlan
from scaler_triton.report import Marks

if TYPE_CHECKING:
    from scaler_triton.update import Counters

_WRAPPERS = 32  # around one optimizer at most; more are taken for a cycle
_FLAGS = "found_inf_per_device"


class Phase(Enum):
    """What is known of an optimizer's gradients."""

    READY = "gradients are scaled, nothing is known of them"
    CHECKED = "ranks agreed on the flag; gradients are still scaled"
    UNSCALED = "ranks agreed on the flag; gradients are divided, perhaps clipped"
    CARRIED = "divided before the last update, but not stepped: so until the next loss is scaled"
    FAILED = "an error left gradients half written: this step will be skipped"
    STEPPED = "stepped or skipped"


# An enum's member is looked up in 100 ns, a global in 10.
READY, CHECKED, UNSCALED, CARRIED, FAILED, STEPPED = Phase
_STAGES = {
    READY: OptState.READY,
    CHECKED: OptState.READY,
    UNSCALED: OptState.UNSCALED,
    CARRIED: OptState.READY,
    FAILED: OptState.UNSCALED,
    STEPPED: OptState.STEPPED,
}
_PHASES = {OptState.READY: READY, OptState.UNSCALED: UNSCALED, OptState.STEPPED: STEPPED}


class OptimizerStep(dict[str, Any]):
    """One optimizer's step: a dict with torch's two keys, which frameworks read and write, and our fields beside it.

    | phase    | unscale_, clip | step                 | scale | update  | error in a check | in optimizer.step |
    |----------|----------------|----------------------|-------|---------|------------------|-------------------|
    | READY    | UNSCALED       | checks, STEPPED      |       | READY   | READY (1)        | UNSCALED (2)      |
    | CHECKED  | UNSCALED       | checks, STEPPED      |       | READY   | CHECKED (1)      | UNSCALED (2)      |
    | UNSCALED | raises (3)     | by its flag, STEPPED | (4)   | CARRIED |                  | UNSCALED          |
    | CARRIED  | UNSCALED       | by its flag, STEPPED | READY | CARRIED | CARRIED (1)      | UNSCALED          |
    | FAILED   | raises (3)     | skips, STEPPED       | (4)   | CARRIED |                  |                   |
    | STEPPED  | raises         | raises               |       | READY   |                  |                   |

    (1) FAILED if gradients had been written, if other ranks were told, or if the reduction failed.
    (2) FAILED for an optimizer that was to divide by itself (fused): nobody knows which gradients it has divided.
    (3) But `clip_grad_norm_(parameters=...)` clips once more; the phase stays.
    (4) READY if `step` began and did not return: the loss belongs to another batch.

    Others write "stage": the phase follows it, once, in `Steps.open`.

    Attributes:
        stage: torch's stage that the phase implies.
        owner: returns the innermost optimizer, None once it is freed; None: it is not known yet.
        handles: by id, what returns the optimizer and each wrapper around it that was passed, None once it is freed.
        plan: of its gradients; None before the first check.
        flag: of the last check; None before it.
        earlier: of earlier checks in this step: whoever asked for one may still read it.
        fresh: whether that check was made by the `step` that is running, so that nobody can have written its flag.
        captured: whether it was recorded into a graph.
        began: whether `step` was entered and has not returned.
        asks: whether the optimizer's own `step` is running, which asks the scaler for the flag.
        kept: the flags of a step that is CARRIED.
        outcome: of the last step, for `was_skipped`: whether it was skipped, or the flags that tell; None: not stepped.
        reader: handle of the stream on which a fused step reads its flag.
        function, takes_scaler: the optimizer's `step`, and whether it takes the scaler as an argument, the older way.
    """

    __slots__ = (
        "asks", "began", "captured", "earlier", "flag", "fresh", "function", "handles", "kept", "outcome", "owner",
        "phase", "plan", "reader", "stage", "takes_scaler",
    )  # fmt: skip

    def __init__(self) -> None:
        self["stage"] = self.stage = OptState.READY
        self[_FLAGS] = {}
        self.phase = READY
        self.owner: Callable[[], Any] | None = None
        self.handles: dict[int, Callable[[], Any]] = {}
        self.plan: GradPlan | None = None
        self.flag: Flag | None = None
        self.earlier: list[Flag | None] = []
        self.kept: Flags = {}
        self.outcome: bool | Flag | list[Tensor] | None = None
        self.reader: int | None = None
        self.function: Any = None
        self.fresh = self.captured = self.began = self.asks = self.takes_scaler = False

    def __reduce__(self) -> Any:
        return dict, ({"stage": self["stage"], _FLAGS: dict(self[_FLAGS])},)  # a copy is a plain state of torch's

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self["stage"] = self.stage = _STAGES[phase]

    def require_unscalable(self, hint: str = "", *, again: bool = False) -> None:
        """Raise torch's errors for a wrong order of calls, before any reduction.

        Args:
            hint: follows the text that says that gradients are unscaled already.
            again: gradients that are unscaled already may be clipped again.
        """
        if self.phase is STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        if self.phase in (UNSCALED, FAILED) and not again:
            raise RuntimeError(f"unscale_() has already been called on this optimizer since the last update().{hint}")

    def begin(self) -> None:
        """`step` is entered."""
        if self.phase is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self.began, self.fresh = True, False

    def checked(self, flag: Flag | None, flags: Flags) -> None:
        """The ranks agreed on the flag; the gradients are as they were."""
        if flag is not self.flag:
            self.earlier.append(self.flag)
        self.flag, self[_FLAGS] = flag, flags
        if self.phase is CARRIED:  # divided already: what was found before still counts
            for device, found in flags.items():
                self.kept[device] = torch.maximum(found, self.kept.get(device, found))
        elif self.phase is READY:
            self.phase = CHECKED

    def unscaled(self, flag: Flag, flags: Flags) -> None:
        """The ranks agreed on the flag; the gradients are divided."""
        if flag is not self.flag:
            self.earlier.append(self.flag)
        self.flag, self[_FLAGS] = flag, flags
        self.phase = UNSCALED
        self["stage"] = self.stage = OptState.UNSCALED

    def resume(self) -> None:
        """A step that was CARRIED goes on: its gradients are divided, and its flag is known."""
        for device, flag in self[_FLAGS].items():  # somebody has looked meanwhile
            kept = self.kept.get(device)
            self.kept[device] = flag if kept is None else torch.maximum(kept, as_flag(flag, device))
        self[_FLAGS], self.kept = self.kept, {}
        if self.plan is not None:
            self.plan.marks.resumed = self[_FLAGS]
        self.flag = None  # the update may have cleared it
        self._enter(UNSCALED)

    def failed(self, home: torch.device | None) -> None:
        """Gradients may be half written, or other ranks skip this step: so must this one, on every device.

        Args:
            home: where the flag goes if there are no parameters; None: the ranks have agreed on one, which stays.
        """
        self._enter(FAILED)  # first: gradients may have been written, even if no flag can be made below
        self.outcome = None
        if home is None:
            return
        self.flag = None
        self[_FLAGS] = {}
        owner = None if self.owner is None else self.owner()
        held = () if owner is None else parameters_of(owner)
        devices = [each.device for each in held if isinstance(each, Tensor) and not each.is_meta]
        ones = {each: torch.ones((), dtype=torch.float32, device=each) for each in dict.fromkeys(devices or [home])}
        self[_FLAGS] = ones

    def stepped(self, outcome: bool | Flag | list[Tensor]) -> None:
        """`step` returns."""
        self.phase = STEPPED
        self["stage"] = self.stage = OptState.STEPPED
        self.outcome, self.began, self.fresh = outcome, False, False

    def reset(self) -> None:
        """The next step begins: its gradients are scaled, and nothing is known of them."""
        self.phase = READY
        self["stage"] = self.stage = OptState.READY
        self[_FLAGS] = {}
        if self.earlier:
            self.earlier = []
        self.kept, self.reader, self.began, self.fresh = {}, None, False, False

    def adopt(self) -> None:
        """Follow a stage that others have written."""
        self.phase, self.stage = _PHASES.get(self["stage"], READY), self["stage"]
        self.fresh = False

    def own_flag(self, exposed: bool) -> Flag | None:
        """Return the flag if it is what stands in the step, None if others may have put something else there.

        Args:
            exposed: whether others have looked at the steps.
        """
        flag, flags = self.flag, self[_FLAGS]
        if flag is not None and exposed and not (len(flags) == 1 and flags.get(flag.device) is flag.found_inf):
            return None
        return flag


class Steps(dict[Any, Any]):
    """The steps of a scaler's optimizers, by the ids of these and of wrappers around them; `_per_optimizer_states`.

    Args:
        counters: the scaler's, for the marks of overflows.
        requested: the backend asked for.

    Attributes:
        unfinished: how many steps are CARRIED, or began and did not return: `scale` looks at them.
        exposed: whether others have looked at the steps. They may write flags, also by a collective, unnoticed.
        replayed: whether graphs may write gradients, so that no call of `scale` tells of new ones.
    """

    __slots__ = ("__weakref__", "_held", "counters", "exposed", "replayed", "requested", "unfinished")

    def __init__(self, counters: Counters, requested: str) -> None:
        self.counters, self.requested = counters, requested
        self.unfinished = 0
        self.exposed = self.replayed = False
        self._held: set[int] = set()  # ids of objects without weak references, which their steps keep alive

    def __missing__(self, key: Any) -> OptimizerStep:
        step = self[key] = OptimizerStep()
        return step

    def open(self, optimizer: Any) -> OptimizerStep:
        """Return the optimizer's step: a wrapper's is that of the optimizer within."""
        step = self.get(id(optimizer))
        if type(step) is OptimizerStep:
            handle = step.handles.get(id(optimizer))
            if handle is not None and handle() is optimizer and step["stage"] is step.stage:
                return step
        return self._find_or_make(optimizer)

    def last(self, optimizer: Any) -> OptimizerStep | None:
        """Return the step of an optimizer, or of a wrapper's, if it has one."""
        for each in (optimizer, unwrap(optimizer)):
            step = self.get(id(each))
            if type(step) is OptimizerStep and id(each) in step.handles and step.handles[id(each)]() is each:
                return step
        return None

    def plan(self, step: OptimizerStep, optimizer: Any) -> GradPlan:
        """Return the plan of the optimizer's gradients; a new one if its parameters changed.

        Raises: AssertionError with torch's text if a parameter is not a tensor.
        """
        groups, plan = optimizer.param_groups, step.plan
        only = type(groups) is list and len(groups) == 1
        parameters = groups[0]["params"] if only else [each for group in groups for each in group["params"]]
        if plan is None or not plan.matches(parameters):
            plan = step.plan = GradPlan(parameters, self.requested)
            plan.marks = Marks(plan, self.counters)
        return plan

    def all(self) -> list[OptimizerStep]:
        """Return the steps, each once."""
        return list({id(step): step for step in [*self.values()] if type(step) is OptimizerStep}.values())

    def loss_scaled(self) -> None:
        """A loss is scaled: what was carried, and what began and did not return, is READY for its gradients."""
        for step in self.all():
            if step.phase is CARRIED:
                flags = step[_FLAGS]  # of somebody who has looked meanwhile
                step.reset()
                if flags:
                    step.checked(step.flag, flags)
            elif step.began and step.phase is not STEPPED:
                step.reset()
        self.unfinished = 0

    def keep_unstepped(self) -> None:
        """Copy the flags of steps that this update will carry, as it may clear them; those of a FAILED one are set."""
        for step in self.all():
            if step.phase is UNSCALED:
                step.kept = {device: flag.clone() for device, flag in step[_FLAGS].items()}
            elif step.phase is FAILED:
                step.kept = {device: torch.ones_like(flag) for device, flag in step[_FLAGS].items()}

    def close(self, captured: bool) -> None:
        """The update is done: each step is READY, or CARRIED if it was unscaled and not stepped.

        Args:
            captured: whether it was recorded into a graph.
        """
        self.unfinished = 0
        for key, step in [*self.items()]:
            if type(step) is not OptimizerStep or step.owner is None or step.owner() is None:
                del self[key]  # others have put it here, or its optimizer is freed
                continue
            if step.phase is READY:
                continue
            is_told = captured or not self.replayed  # else a graph's replay may write new gradients unnoticed
            carries = step.phase is CARRIED or (step.phase in (UNSCALED, FAILED) and is_told and step.kept)
            if not carries:
                step.reset()
                continue
            kept = step.kept
            step.reset()
            step.kept = kept
            step._enter(CARRIED)
            self.unfinished += 1

    def replaced_by(self, states: Mapping[Any, Any]) -> Steps:
        """Return the registry that others put in this one's place: `states` itself if it is one.

        Else every step is READY there, but for what `states` holds: dicts with torch's two keys, by the optimizer's id.
        This one stays as it is, and may be put back.
        """
        if isinstance(states, Steps):
            return states
        steps = Steps(self.counters, self.requested)
        steps.exposed, steps.replayed = self.exposed, self.replayed
        for before in self.all():
            step, owner = OptimizerStep(), before.owner() if before.owner else None
            if owner is not None:
                step.plan, step.outcome = before.plan, before.outcome
                for handle in before.handles.values():
                    if (optimizer := handle()) is not None:
                        steps._add_handle(step, optimizer, owns=optimizer is owner)
        for key, state in states.items():
            known = steps.get(key)
            if type(known) is OptimizerStep and type(state) is not OptimizerStep:
                known.update(state)
            else:
                steps[key] = state
        return steps

    def awaiting(self) -> list[Any]:
        """Return the optimizers whose gradients are unscaled, perhaps since before an update, and not stepped yet."""
        owners = [step.owner() for step in self.all() if step.owner and step.phase in (UNSCALED, CARRIED, FAILED)]
        return [owner for owner in owners if owner is not None]

    def reset(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Make every step READY, wherever it was interrupted.

        Args:
            parameters: only steps of optimizers that hold one of them; None: all.
        """
        given = None if parameters is None else {id(parameter) for parameter in parameters}
        for step in self.all():
            owner = step.owner() if step.owner else None
            if given is None or (owner is not None and any(id(each) in given for each in parameters_of(owner))):
                step.reset()
        if given is None:
            self.unfinished = 0

    def outcome(self, optimizer: Any) -> bool | Tensor | None:
        """Return whether the optimizer's last step was skipped, without a wait.

        Returns: a copy of the flag, fp32 `()`, where only the device knows it; None: it was not stepped, or is unscaled
            since.
        """
        step = self.last(optimizer)
        outcome = None if step is None else step.outcome
        if isinstance(outcome, Flag):
            return outcome.last_found_inf().clone()
        if isinstance(outcome, list):
            return any_flag(outcome, outcome[0].device) if outcome else False
        return outcome

    def _find_or_make(self, optimizer: Any) -> OptimizerStep:
        """`open` for an optimizer that is new, or whose step others have moved, replaced or written."""
        inner = unwrap(optimizer)
        given: Any = self.get(id(optimizer))
        if inner is not optimizer and id(inner) not in self and _has_no_owner(given):
            self[id(inner)] = given  # a framework looked it up by the wrapper, before the first call
        step = self._step_of(inner)
        if inner is not optimizer:
            if given is not step and _has_no_owner(given) and id(optimizer) in step.handles:
                step.update(given)  # a framework has put another state there to reset it
            self._add_handle(step, optimizer)
        if step["stage"] is not step.stage:
            step.adopt()
        return step

    def _step_of(self, optimizer: Any) -> OptimizerStep:
        found = self.get(id(optimizer))
        if type(found) is OptimizerStep:
            if found.owner is None:
                self._add_handle(found, optimizer, owns=True)
                return found
            if found.owner() is optimizer:
                return found
            if found.owner() is None or id(optimizer) in found.handles:
                found = None  # an id that was another's, which is freed
        step = OptimizerStep()
        if found is not None:
            step.update(found)  # a plain dict, or another optimizer's state that a framework has moved here
        self._add_handle(step, optimizer, owns=True)
        return step

    def _add_handle(self, step: OptimizerStep, optimizer: Any, *, owns: bool = False) -> None:
        key = id(optimizer)
        for other in [*self._held]:  # until the next one comes
            held = self[other]
            if held is not step and held.phase is READY:
                self._held.remove(other)
                del held.handles[other], self[other]
        try:
            handle: Callable[[], Any] = weakref.ref(optimizer, functools.partial(_forget, weakref.ref(self), key))
        except TypeError:  # an object without weak references
            handle = lambda: optimizer  # noqa: E731
            self._held.add(key)
        step.handles[key] = handle
        if owns:
            step.owner = handle
        self[key] = step


def _forget(registry: weakref.ref[Steps], key: int, handle: Any) -> None:
    """Drop a freed optimizer's step; if its flag is to count in the next update, that drops it."""
    steps = registry()
    step = None if steps is None else steps.get(key)
    if steps is None or type(step) is not OptimizerStep or step.handles.get(key) is not handle:
        return
    del steps[key]
    if step.owner is handle and step[_FLAGS]:
        steps["freed", id(step)] = step


def _has_no_owner(state: Any) -> bool:
    """Return whether a state was put into the registry by others, or made for them by a lookup."""
    return state is not None and getattr(state, "owner", None) is None


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers that keep it as `.optimizer` and share its `param_groups`."""
    outermost = optimizer
    for _ in range(_WRAPPERS):
        try:
            inner = getattr(optimizer, "optimizer", None)
            if inner is None or inner is optimizer or not _same_groups(inner.param_groups, optimizer.param_groups):
                return optimizer
        except Exception:  # an unrelated property
            return optimizer
        optimizer = inner
    return outermost


def _same_groups(groups: Any, others: Any) -> bool:
    """Return whether the groups hold the same lists of parameters.

    A container of optimizers puts its groups into a new list each time; `load_state_dict` keeps only the parameters'.
    """
    if groups is others:
        return True
    pairs = itertools.zip_longest(groups, others)
    return all(mine is theirs or mine["params"] is theirs["params"] for mine, theirs in pairs)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in order; the list may be the optimizer's own, do not write it."""
    groups = optimizer.param_groups
    if type(groups) is list and len(groups) == 1 and type(groups[0]["params"]) is list:
        return groups[0]["params"]
    return [parameter for group in groups for parameter in group["params"]]

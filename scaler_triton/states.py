"""The StepStates of a step's optimizers: how each is found, and how its flag is read and written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton.attributes import ScalerAttributes
from scaler_triton.cuda_graphs import is_captured
from scaler_triton.flags import Flags, any_flag, as_flag
from scaler_triton.left_unscaled import first_gradient, has_first_gradient, is_first, leave_unscaled
from scaler_triton.optimizers import parameters_of, supports_amp_scaling, unwrap, weak
from scaler_triton.step_state import StepState
from scaler_triton.verdict import Verdict


class StatesMixin(ScalerAttributes):
    """Finds an optimizer's state; reads its flag, on the device or on the host; writes it."""

    def _state(self, optimizer: Any) -> StepState:
        """Return the optimizer's state of this step; that of a freed optimizer with the same id is set aside.

        With a wrapper, the state is stored under both ids: a framework may look it up by either.
        """
        inner = unwrap(optimizer)
        states = self._per_optimizer_states
        if inner is not optimizer and _is_foreign(states.get(id(optimizer)), states.get(id(inner)), optimizer):
            states[id(inner)] = states[id(optimizer)]
        state: StepState = states[id(inner)]
        owner = state.get("owner")
        if owner is None:
            state["owner"] = weak(inner)
        elif (before := owner()) is None:
            states[("gone", id(state))] = state  # its flag still counts in update()
            del states[id(inner)]
            return self._state(optimizer)
        elif before is not inner and _is_stale_alias(state, inner):
            del states[id(inner)]  # a freed wrapper's entry for another optimizer, at an id that is reused
            return self._state(optimizer)
        elif before is not inner:
            state["owner"] = weak(inner)  # a framework has moved another optimizer's state here, as hivemind does
        if inner is not optimizer:
            states[id(optimizer)] = state
            state.setdefault("wrappers", {})[id(optimizer)] = weak(optimizer)
        return state

    def _is_known(self, optimizer: Any) -> bool:
        """Tell whether the optimizer has a state in this step."""
        return any(id(each) in self._per_optimizer_states for each in (optimizer, unwrap(optimizer)))

    def _awaiting_step(self) -> list[Any]:
        """Return the optimizers whose gradients are unscaled, perhaps since before an update, and not stepped yet."""
        states = self._per_optimizer_states.values()
        owners = [state["owner"]() for state in states if state["stage"] is OptState.UNSCALED and "owner" in state]
        left = [record.owner() for record in self._records.all() if record.left_unscaled is not None]
        owners += [owner for owner in left if owner is not None and self._records.recall(owner) is not None]
        return [*{id(owner): owner for owner in owners if owner is not None}.values()]

    def _abandon_steps_of(self, parameters: Iterable[Tensor]) -> None:
        """Make every optimizer that holds one of the parameters READY again, wherever its step was interrupted."""
        given = {id(parameter) for parameter in parameters}
        owners = [state["owner"]() for state in self._per_optimizer_states.values() if "owner" in state]
        for owner in owners:
            if owner is not None and any(id(parameter) in given for parameter in parameters_of(owner)):
                self._abandon_step(owner)

    def _unstepped_flag(self, owner: Any, state: StepState) -> Tensor | None:
        """Return a copy of the flag of an optimizer that was unscaled but not stepped, as the update may clear it.

        Returns: None if it was stepped, or may have other gradients by now, which are scaled and not checked.
        """
        if state["stage"] is not OptState.UNSCALED:
            return None
        if "first_gradient" in state and not has_first_gradient(owner, state["first_gradient"]):
            return None
        if "before_loss" in state and not is_first(owner, state["before_loss"]):
            return None
        flag = self._flag(state).clone()
        return flag.fill_(1.0) if state.get("must_skip") else flag

    def _begin_again(self, optimizer: Any) -> StepState:
        """Return a new state of an optimizer whose last step did not return: READY, for the gradients of a later loss.

        Those that are unscaled still are told from new ones as after an update.
        """
        state = self._state(optimizer)
        owner = state["owner"]()
        flag = self._unstepped_flag(owner, state)
        self._records.of(owner).left_unscaled = None if flag is None else leave_unscaled(owner, flag)
        self._abandon_step(optimizer)
        return self._state(optimizer)

    def _abandon_step(self, optimizer: Any) -> None:
        """Make an optimizer READY again, wherever its step was interrupted."""
        states = self._per_optimizer_states
        left = states.get(id(unwrap(optimizer)))
        for key in [key for key, state in states.items() if state is left]:  # a wrapper's, too
            del states[key]

    def _abandon_all_steps(self) -> None:
        """Make all optimizers READY again."""
        self._per_optimizer_states.clear()

    def _found_inf_per_device(self, optimizer: Any) -> Flags:  # type: ignore[override]
        """Return the optimizer's flags in this step, by device; empty before they are computed."""
        return self._state(optimizer)["found_inf_per_device"]

    def _verdict(self, state: StepState) -> Verdict | None:
        """Return the verdict that owns the state's flags, None if others were stored there."""
        verdict: Verdict | None = state.get("verdict")
        return verdict if verdict is not None and verdict.owns(state["found_inf_per_device"]) else None

    def _flag(self, state: StepState) -> Tensor:
        """Return this optimizer's flag, fp32 `()`, 0.0 or 1.0, on the scale's device."""
        verdict = self._verdict(state)
        if verdict is not None:
            return verdict.flag()
        device = self._scale.device
        return any_flag([as_flag(flag, device) for flag in state["found_inf_per_device"].values()], device)

    def _any_flag(self, states: Iterable[StepState]) -> Tensor:
        """Return 1.0, fp32 `()`, on the scale's device, if the flag of any of these optimizers is set, else 0.0."""
        return any_flag([self._flag(state) for state in states], self._scale.device)

    def _host_flag(self, state: StepState) -> bool:
        verdict = self._verdict(state)
        skips = verdict.on_host() if verdict is not None else bool(self._flag(state).item())
        state["skips"] = skips
        return skips

    def _store_verdict(
        self, optimizer: Any, state: StepState, verdict: Verdict, devices: Sequence[torch.device]
    ) -> None:
        """Store the flag for the optimizer's step, and start its host copy if the step will read it there."""
        if state.get("verdict", verdict) is not verdict:
            state.setdefault("earlier", []).append(state["verdict"])
        state["verdict"] = verdict
        verdict.in_step = True
        state["found_inf_per_device"] = verdict.copy_to(devices)
        if not supports_amp_scaling(optimizer):
            verdict.start_mirror()

    def _enter_unscaled(self, state: StepState) -> None:
        """Enter the stage UNSCALED: all gradients are unscaled, or some may be."""
        state["stage"] = OptState.UNSCALED  # first: if the next line raises, they must not be divided again
        state["first_gradient"] = first_gradient(state["owner"]())
        state.setdefault("captured", is_captured(self._scale))

    def _forget_recorded(self, state: StepState) -> None:
        """After a failure in a capture: what was recorded has not been done. What was done before it stays."""
        if state.get("captured", True):
            self._abandon_step(state["owner"]())

    def _skip(self, state: StepState) -> None:
        """Set the flag on all devices of the parameters, so that the step is skipped; needs no verdict and no plan."""
        if is_captured(self._scale):  # no gradient has been written, nor would a flag be
            self._forget_recorded(state)
            return
        self._enter_unscaled(state)  # first: gradients may have been written, even if no flag can be made below
        state["found_inf_per_device"] = {}
        state.pop("verdict", None)
        held = parameters_of(state["owner"]())
        devices = [each.device for each in held if isinstance(each, Tensor) and not each.is_meta]
        state["found_inf_per_device"] = {
            device: torch.ones((), dtype=torch.float32, device=device)
            for device in dict.fromkeys(devices or [self._scale.device])
        }


def _is_foreign(found: StepState | None, inside: StepState | None, wrapper: Any) -> bool:
    """Tell whether a framework stored the state under a wrapper's id, before the first call or to reset it.

    Args:
        inside: the state of the optimizer in the wrapper. If the wrapper was not passed in this step, the state under
            its id was only created by a lookup.
    """
    if found is None or "owner" in found:
        return False
    return inside is None or "owner" not in inside or id(wrapper) in inside.get("wrappers", {})


def _is_stale_alias(state: StepState, optimizer: Any) -> bool:
    """Tell whether a state is stored under an optimizer's id on behalf of a wrapper that had this id and is freed."""
    wrapper = state.get("wrappers", {}).get(id(optimizer))
    return wrapper is not None and wrapper() is not optimizer

"""The state machine of an optimizer's step: its phases, whose edges are methods. Only this module writes a phase."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton.core.flag import Flag, Flags
from scaler_triton.core.message import PeerFailedError
from scaler_triton.core.plan import GradPlan

FLAGS = "found_inf_per_device"


class Phase(Enum):
    """What is known of an optimizer's gradients; the `stage` is torch's, which other code reads."""

    READY = OptState.READY, "gradients are scaled; if there is a flag, ranks agreed on it"
    UNSCALED = OptState.UNSCALED, "ranks agreed on the flag; gradients are divided"
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


def nobody() -> None:
    """Stand for the owner of a step that other code has looked up, before its optimizer is known."""


class OptimizerStep(dict[str, Any]):
    """The step of one optimizer: a dict with torch's two keys, which frameworks read and write, and fields of ours.

    | phase    | unscale_       | step                 | scale | update  | error in a check | in optimizer.step |
    |----------|----------------|----------------------|-------|---------|------------------|-------------------|
    | READY    | UNSCALED       | checks, STEPPED      |       | READY   | READY (1)        | FAILED            |
    | UNSCALED | raises         | STEPPED by its flag  | (2)   | CARRIED |                  | FAILED            |
    | CARRIED  | UNSCALED (3)   | STEPPED by its flag  | READY | CARRIED | CARRIED (1)      | FAILED            |
    | FAILED   | raises         | skips, STEPPED       | READY | CARRIED |                  |                   |
    | STEPPED  | raises         | raises               |       | READY   |                  |                   |

    (1) FAILED if gradients had been written, if other ranks were told of the error, or if the reduction failed.
    (2) `loss_is_newer`: the gradients may be another loss's. `update` makes it READY, and so does the next call if the
        flag tells that another rank's check failed, as that rank is READY, too.
    (3) Divided again only if somebody has written a gradient since the update: see `Checks.are_divided`.

    Other code may write "stage": the phase follows at the next `scale`, or when the step is next looked up. With one
    that torch does not have, the step is FOREIGN until `update`.
    """

    __slots__ = (
        "carried", "flag", "handles", "loss_is_newer", "notes", "outcome", "owner", "phase", "plan", "steps_taken",
    )  # fmt: skip

    def __init__(self) -> None:
        self.owner: Callable[[], Any] = nobody  # returns the innermost optimizer, None once it is freed
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
        self.phase = READY
        self["stage"] = READY_STAGE
        self[FLAGS] = {}
        self.carried: Flags = {}  # the flags by which a CARRIED step will go; torch's class holds none after an update
        self.loss_is_newer = False

    def __reduce__(self) -> Any:
        return dict, ({"stage": self["stage"], FLAGS: dict(self[FLAGS])},)  # a copy is a plain state of torch's

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
        if self.phase in (UNSCALED, FAILED) and not again:
            raise RuntimeError(f"unscale_() has already been called on this optimizer since the last update().{hint}")

    def require_steppable(self) -> None:
        """Raise torch's error for a second step since the last update."""
        if self.phase is STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self.drop_if_peer_failed()

    def accept(self, flag: Flag, flags: Flags, *, divided: bool) -> None:
        """Store the flag that the ranks agreed on after a check, which `divided` or only read."""
        self.flag, self[FLAGS], self.carried = flag, flags, {}
        if divided:
            self.phase = UNSCALED
            self["stage"] = UNSCALED_STAGE
            self.loss_is_newer = False

    def carry(self) -> None:
        """Outlive an update: what other code sees is a fresh state, and the step will go by the flags it has."""
        flags = self.carried or self[FLAGS]
        if self.phase is FAILED:
            self.flag, flags = None, {device: torch.ones_like(flag) for device, flag in flags.items()}
        self.reset()
        self._enter(CARRIED)
        self.carried = flags

    def outlives_update(self) -> bool:
        """Return whether an update carries the step over: it was checked for a loss that is the last one."""
        is_unscaled = self["stage"] is UNSCALED_STAGE and self.phase in (UNSCALED, FAILED)
        return self.phase is CARRIED or (is_unscaled and bool(self[FLAGS]) and not self.loss_is_newer)

    def resume(self, captured: bool) -> None:
        """Continue a CARRIED step, or start it over if only one of its check and this call is captured in a graph."""
        if self.flag is not None and captured != self.flag.is_captured:
            self.reset()
            return
        self[FLAGS], self.carried = self.carried, {}
        if self.flag is not None:
            self.flag.is_final = True  # it may be that of another batch's look
        self._enter(UNSCALED)

    def fail(self, home: torch.device | None) -> None:
        """Set the flag on each parameter's device, else on `home`; None keeps the agreed flag, for equal scales."""
        self._enter(FAILED)  # first, in case no flag can be made below
        self.loss_is_newer, self.outcome = False, None
        if home is None:
            return
        self.flag, self[FLAGS], self.carried = None, {}, {}
        owner = self.owner()
        parameters = () if owner is None else parameters_of(owner)
        devices = [each.device for each in parameters if isinstance(each, Tensor) and not each.is_meta]
        ones = {each: torch.ones((), dtype=torch.float32, device=each) for each in dict.fromkeys(devices or [home])}
        self[FLAGS] = ones

    def peer_has_failed(self) -> bool:
        """Return whether the check of an UNSCALED step failed on another rank, waiting for the flag."""
        if self.phase is not UNSCALED or self.flag is None or self.flag.is_captured:
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

    def finish(self) -> None:
        """End the step, which was taken or skipped."""
        self.phase = STEPPED
        self["stage"] = STEPPED_STAGE

    def adopt(self) -> None:
        """Follow a stage that other code has written."""
        self.phase = _PHASES.get(self["stage"], FOREIGN)

    def is_bad(self, exposed: bool) -> bool:
        """Return whether the optimizer must not step, waiting for the device; raise if the ranks are apart.

        If the step is `exposed` to other code, that may have written flags, or put in others.
        """
        flag, flags = self.flag, self[FLAGS]
        if flag is not None and (flag.summed_over is not None or flag.device in flags):
            is_bad = flag.on_host(copied=not exposed)
            if not exposed or self.own_flag() is not None:
                return is_bad
        return any(each.item() != 0.0 for each in flags.values())  # those on the CPU are there

    def own_flag(self) -> Flag | None:
        """Return the last check's flag if it is all that the step holds; None if other code has put in others."""
        flag, flags = self.flag, self[FLAGS]
        is_held = flag is not None and len(flags) == 1 and flags.get(flag.device) is flag.found_inf
        return flag if is_held else None


def parameters_of(*optimizers: Any) -> list[Tensor]:
    """Return all parameters, in order, a shared one twice."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]

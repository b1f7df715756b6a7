"""Which ranks must agree on an optimizer's flag, and how this rank reports a failure to them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import callers, collectives
from scaler_triton.agreement import Agreement, inferred_agreement, sharded_agreement
from scaler_triton.patching import stand_in
from scaler_triton.placement import has_fsdp1
from scaler_triton.states import StatesMixin
from scaler_triton.step_state import StepState
from scaler_triton.verdict import report_failure

if TYPE_CHECKING:
    from scaler_triton.plan import GradPlan

_ON_FSDP1 = (
    "GradScaler cannot tell which ranks share FullyShardedDataParallel's parameters, so ranks may disagree on "
    "skipping a step. Use scaler_triton.ShardedGradScaler, or pass process_group=."
)
_APART = (
    "GradScaler's optimizers are on meshes over different ranks, here {} and {}: an overflow in one of them may leave "
    "ranks with different scales. Use scaler_triton.ShardedGradScaler, or pass process_group=."
)


class AgreeingMixin(StatesMixin):
    """Finds the ranks that must agree, by process group and parameters, never by gradients; tells them of failures."""

    def _agreement(self, plan: GradPlan) -> Agreement | None:
        """Return the agreement on an optimizer's flag, cached in its plan; None: no other rank must agree."""
        if not (plan.is_distributed or self._is_sharded) and self.process_group is None:
            return None
        key = (self.process_group, collectives.default_group())
        if plan.agreement is None or plan.agreement[0] != key:
            plan.agreement = (key, self._new_agreement(plan.parameters))
            self._warn_of_other_ranks(*plan.agreement)
        return plan.agreement[1]

    def _joint_agreement(self, plans: Sequence[GradPlan]) -> Agreement | None:
        """Return the agreement of optimizers that share one reduction."""
        first = plans[0]
        if len(plans) == 1:
            return self._agreement(first)
        key = (self.process_group, collectives.default_group(), *map(weakref.ref, plans))
        if first.joint is None or first.joint[0] != key:
            parameters = [parameter for plan in plans for parameter in plan.parameters]
            first.joint = (key, self._new_agreement(parameters))
        return first.joint[1]

    def _new_agreement(self, parameters: Sequence[Tensor]) -> Agreement | None:
        if self._is_sharded or self.process_group is not None:
            return sharded_agreement(parameters, self.process_group)
        self._warn_of_fsdp1(parameters)
        return inferred_agreement(parameters)

    def _warn_of_fsdp1(self, parameters: Sequence[Tensor]) -> None:
        if not collectives.several_ranks() or not has_fsdp1(parameters):
            return
        if stand_in.strict:
            raise RuntimeError(_ON_FSDP1)
        if not self._warned_fsdp1:
            self._warned_fsdp1 = True
            warnings.warn(_ON_FSDP1, UserWarning, stacklevel=callers.stacklevel())

    def _warn_of_other_ranks(self, key: Any, mine: Agreement | None) -> None:
        """Warn if another optimizer's flag is reduced over other ranks than this one's: they share one scale."""
        if mine is None or self._warned_apart:
            return
        for plan in self._records.plans():
            their_key, theirs = plan.agreement or (None, None)
            if their_key == key and theirs is not None and theirs.ranks != mine.ranks:
                self._warned_apart = True
                text = _APART.format(list(theirs.ranks), list(mine.ranks))
                warnings.warn(text, UserWarning, stacklevel=callers.stacklevel())
                return

    def _require_scale(self, funcname: str, report: Callable[..., None], *args: Any) -> None:
        """Raise without a scale, after `report(*args)`, which joins the reductions of other ranks."""
        try:
            self._check_scale_growth_tracker(funcname)
        except AssertionError:
            with suppress(Exception):  # torch's error matters more
                report(*args)
            raise

    def _fail_unchecked(self, optimizer: Any) -> None:
        """Report to the ranks that must agree that this one will not check an optimizer's gradients; skip its step."""
        plan = self._records.plan(optimizer)
        agreement = self._agreement(plan)
        if agreement is not None and self._state(optimizer)["stage"] is OptState.READY:
            self._make_scale(plan.devices)
            self._fail(self._state(optimizer), agreement)

    def _fail(self, state: StepState, agreement: Agreement | None, *, written: bool = False) -> None:
        """Report a failed check to the other ranks; skip the step if they will, or if gradients have been written."""
        try:
            if written or agreement is not None:
                self._skip(state)
        finally:  # even if that fails: they wait in the reduction
            if agreement is not None:
                report_failure(agreement, self._scale.device)

    def _make_scale(self, devices: Iterable[torch.device]) -> None:
        """Create the scale if there is none: the other ranks will back off in `update()`, and so must this one."""
        self._lazy_init_scale_growth_tracker(self._home(devices))

    def _home(self, devices: Iterable[torch.device]) -> torch.device:
        """Return the device on which the other ranks will reduce.

        Args:
            devices: the parameters', which may be offloaded.
        """
        return next((device for device in devices if device.type == self._device), torch.device(self._device))

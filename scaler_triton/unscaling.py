"""The first half of a step: gradients are checked and unscaled, and the ranks agree on what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import batch_ops, dispatch, optimizers
from scaler_triton.agreeing import AgreeingMixin
from scaler_triton.cuda_graphs import is_captured, refuse_capture
from scaler_triton.flag_buffer import FlagBuffer
from scaler_triton.flags import Flags, flag_on, fp32_on
from scaler_triton.inverse import inverse
from scaler_triton.plan import GradPlan
from scaler_triton.stats import SKIPPED
from scaler_triton.step_state import StepState
from scaler_triton.verdict import Verdict

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement
    from scaler_triton.batch import Batch

Op = Callable[["Batch", Tensor, dispatch.Backend], None]


class UnscalingMixin(AgreeingMixin):
    """`unscale_` and the check for optimizers that unscale themselves; what goes wrong here splits no ranks."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, and agree with the other ranks on whether one overflowed.

        Equivalent PyTorch: `for p in params: p.grad.mul_(1 / scale)`, after a check of every gradient for NaN and
        Inf; one reduction of the flag where ranks must agree; no host wait.

        Args:
            optimizer: whatever has `param_groups`; its gradients (fp16 only for ShardedGradScaler, bf16, fp32, fp64,
                strided or sparse COO, DTensors) are written.

        Raises: torch's errors for a wrong order of calls; those of `ops.unscale_` for a gradient that cannot be
            unscaled. The stage stays READY then, unless gradients were written or other ranks have already been
            told: then it is UNSCALED with the flag set, so that the step is skipped.
        """
        if not self._enabled:
            return
        scale = self._initialised_scale("unscale_", self._fail_unscaled, optimizer)
        state = self._state(optimizer)
        self._check_order(state)

        def unscale(found_inf: Tensor) -> Flags:
            if self._unscale_is_overridden():
                return self._unscale_grads_(optimizer, inverse(scale), found_inf, self._allow_fp16)
            return self._unscale_batches_(optimizer, state, None, found_inf, self._allow_fp16)

        verdict = self._examine(optimizer, state, unscale)
        self._enter_unscaled(state)
        if not optimizers.supports_amp_scaling(optimizer):
            verdict.start_mirror()  # step will ask for the flag on the host

    def _unscale_once(self, optimizer: Any) -> None:
        """`unscale_`, unless the gradients are unscaled; also by a step before an update that did not step them."""
        state = self._state(optimizer)
        if state["stage"] is not OptState.UNSCALED:
            state["unscaled_flag"] = self._left_unscaled.recall(optimizer)  # with it nothing is divided
            self.unscale_(optimizer)

    def _check_order(self, state: StepState, *, again: bool = False, hint: str = "") -> None:
        """Raise torch's errors of order, before any reduction.

        Args:
            again: gradients that are unscaled already may be clipped again, unless that is left to the step.
            hint: follows the text that says that they are unscaled already.
        """
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        if state["stage"] is OptState.UNSCALED and (not again or "deferred" in state):
            raise RuntimeError(f"unscale_() has already been called on this optimizer since the last update().{hint}")

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True) -> Flags:
        """Unscale on this rank only, and return a flag for each device that holds gradients.

        Args:
            inv_scale: fp32, one element.
            found_inf: fp32, shape (), zero; becomes the flag of its own device.
            allow_fp16: False refuses fp16 gradients as torch does.
        """
        # Who calls it by hand, perhaps for a few parameters only, begins no step by that.
        passing: StepState = {"stage": OptState.READY, "found_inf_per_device": {}}
        state = self._state(optimizer) if self._is_known(optimizer) else passing
        return self._unscale_batches_(optimizer, state, inv_scale, found_inf, allow_fp16)

    def _unscale_batches_(
        self, optimizer: Any, state: StepState, inv_scale: Tensor | None, found_inf: Tensor, allow_fp16: bool
    ) -> Flags:
        """As `_unscale_grads_`; without `inv_scale` 1 / scale is taken where the gradients are unscaled."""
        state["written"] = False
        factor = self._scale if inv_scale is None else inv_scale

        def unscale(batch: Batch, flag: Tensor, backend: dispatch.Backend) -> None:
            state["written"] = True
            batch_ops.unscale_batch_(batch, fp32_on(flag.device, factor), flag, backend, inverse=inv_scale is not None)
            if self._check_unscaled:
                batch_ops.check_batch(batch, flag, backend, unscaled=True)

        return self._for_each_batch(optimizer, state, found_inf, allow_fp16, unscale)

    def _check_inf_per_device(self, optimizer: Any) -> Flags:  # type: ignore[override]
        """Check the optimizer's gradients, read-only, and agree with the other ranks, once a step.

        Where no other rank must agree, they are looked at again each time, until they are stepped, or clipped together
        with those of other optimizers.

        Returns: the agreed flag, fp32 `()`, 0.0 or 1.0, on every device that holds parameters.
        """
        stage = self._state(optimizer)["stage"] if self._is_known(optimizer) else OptState.READY
        try:
            self._initialised_scale("_check_inf_per_device", self._fail_unscaled, optimizer)
            state = self._state(optimizer)
            again = self._may_look_again(optimizer, state)
            if again and stage is OptState.UNSCALED:
                state["unscaled_flag"] = None  # of a step before: these are looked at anew
            if again or not state["found_inf_per_device"]:
                self._examine(optimizer, state, lambda found_inf: self._check_grads(optimizer, state, found_inf))
        finally:
            if self._is_known(optimizer):
                self._state(optimizer)["stage"] = stage  # after a failure, too: the step checks afresh, as other ranks
        return state["found_inf_per_device"]

    def _may_look_again(self, optimizer: Any, state: StepState) -> bool:
        """Tell whether a check after one of ours keeps no other rank waiting.

        Nor may it overrule a step, a failure, or the flag of optimizers that were clipped together.
        """
        steps = state["stage"] is OptState.STEPPED or state.get("asked_by_step")
        if steps or "verdict" not in state or state["verdict"].shared or state.get("must_skip"):
            return False
        return self._agreement(self._plans.get(optimizer)) is None

    def _check_grads(self, optimizer: Any, state: StepState, found_inf: Tensor) -> Flags:
        if self._unscale_is_overridden():  # the override may know gradients that we do not
            return self._unscale_grads_(optimizer, torch.ones_like(found_inf), found_inf, True)
        return self._for_each_batch(optimizer, state, found_inf, True, batch_ops.check_batch)

    def _for_each_batch(self, optimizer: Any, state: StepState, found_inf: Tensor, allow_fp16: bool, op: Op) -> Flags:
        flags: Flags = {}
        plan = state.get("plan") or self._plans.get(optimizer)
        gradients = plan.collect(allow_fp16=allow_fp16)
        pairs = batch_ops.choose_backends(gradients.batches, self._backend)
        partials = batch_ops.choose_backends(gradients.partials, self._backend) if gradients.partials else ()
        for batch, backend in pairs:
            flag = flag_on(batch.layout.key.device, flags, found_inf)
            self._run(plan, op, batch, flag, backend, divides=op is not batch_ops.check_batch)
        for batch, backend in partials:
            self._run(plan, batch_ops.check_batch, batch, flag_on(batch.layout.key.device, flags, found_inf), backend)
        return flags

    def _run(
        self, plan: GradPlan, op: Op, batch: Batch, flag: Tensor, backend: dispatch.Backend, *, divides: bool = False
    ) -> None:
        """Run an op on a batch, and have it marked whose gradients overflow."""
        scale = self._scale
        if backend == "triton":
            counted = scale is not None and flag.device == scale.device
            plan.marks.expect(batch.layout, self._counters.on(flag.device) if counted else None)
        looks = backend == "torch" and flag.is_cpu and batch.layout.key.plain  # others know few ops
        if looks and divides and not self._check_unscaled and scale is not None and scale.item() < 1.0:
            # What is infinite after the op need not have been before, nor count as overflow.
            found = torch.zeros_like(flag)
            batch_ops.check_batch(batch, found, backend)
            looks = False
            if found.item():
                self._look(plan, batch)
        op(batch, flag, backend)
        if looks and flag.item():
            self._look(plan, batch)

    def _look(self, plan: GradPlan, batch: Batch) -> None:
        plan.marks.look(batch, self._counters.read()[SKIPPED])

    def _unscale_is_overridden(self) -> bool:
        return getattr(self._unscale_grads_, "__func__", None) is not UnscalingMixin._unscale_grads_

    def _examine(self, optimizer: Any, state: StepState, examine: Callable[[Tensor], Flags]) -> Verdict:
        """Run `examine` with a cleared flag, agree with the other ranks, keep the verdict in `state`.

        Whatever error `examine` raises, the other ranks are told, not left waiting.
        """
        self._last_steps.forget(state)
        plan, agreement, verdict = self._begin(optimizer, state)
        unscaled = state.get("unscaled_flag")  # by a step before this one: its flag is all there is to say
        state.pop("written", None)
        state["plan"] = plan
        try:
            if unscaled is not None:
                plan.marks.count_again(self._counters.skips(), unscaled)
            flags = examine(verdict.found_inf) if unscaled is None else {unscaled.device: unscaled}
            verdict.add(flags.values())
            if agreement is not None:
                verdict.show_scale(self._scale)
        except BaseException as error:
            state.setdefault("written", self._unscale_is_overridden())  # an override may have written anything
            self._fail(state, agreement if isinstance(error, Exception) else None)
            raise
        finally:
            del state["plan"]
        try:
            if agreement is not None:
                verdict.agree(agreement)
            self._keep(state, verdict, self._served_devices(flags, plan, agreement))
        except BaseException:
            self._skip(state)
            raise
        return verdict

    def _begin(self, optimizer: Any, state: StepState) -> tuple[GradPlan, Agreement | None, Verdict]:
        """Return what an examination takes; if it cannot be had, the ranks that wait for this one are told."""
        try:
            plan = self._plans.get(optimizer)
            agreement = self._agreement(plan)
            return plan, agreement, self._new_verdict(state, plan)
        except Exception:
            with suppress(Exception):  # such as an illegal process_group, which every rank meets by itself
                agreement = self._new_agreement(optimizers.parameters_of(optimizers.unwrap(optimizer)))
                if agreement is not None:
                    self._fail(state, agreement)
            if state["stage"] is OptState.READY:
                state["unscaled_flag"] = None  # by the next call the gradients may be others
            raise

    def _served_devices(self, flags: Flags, plan: GradPlan, agreement: Agreement | None) -> Sequence[torch.device]:
        """Return where the flag is needed; nowhere if nobody checked anything, which step and update refuse then."""
        if not flags and agreement is None and not self._is_sharded:
            return ()  # else others follow this flag, even without gradients here
        return (*flags, *plan.devices, self._scale.device)

    def _new_verdict(self, state: StepState, plan: GradPlan) -> Verdict:
        """Return the plan's verdict, cleared, on the scale's device."""
        if state["found_inf_per_device"] or "verdict" in state:
            plan.verdict = None  # what an earlier check found must outlive this one, and a failure of it
        home, verdict = self._scale.device, plan.verdict
        if verdict is None or verdict.device != home:
            if home not in self._flag_buffers:
                refuse_capture(home, "a scaler's first step")
                self._flag_buffers[home] = FlagBuffer(home)
            plan.verdict = verdict = self._flag_buffers[home].verdict()
        captured = is_captured(verdict.found_inf)
        if captured:
            self._flag_buffers[home].captured.add(verdict)
        verdict.begin(captured)
        return verdict

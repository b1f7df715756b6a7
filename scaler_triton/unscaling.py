"""The first half of a step: gradients are checked and unscaled, and the flag is reduced over the ranks."""

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
    """`unscale_`, and the check before fused optimizers; an error on one rank neither hangs nor splits the others."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, and agree with the other ranks on whether one overflowed.

        Equivalent PyTorch: `for p in params: p.grad.mul_(1 / scale)`, after a check of every gradient for NaN and
        Inf; one reduction of the flag where ranks must agree; no host wait.

        Args:
            optimizer: whatever has `param_groups`; its gradients (fp16 only for ShardedGradScaler, bf16, fp32, fp64,
                strided or sparse COO, DTensors) are written.

        Raises: torch's RuntimeError for a wrong order of calls, and AssertionError before the first `scale`; those of
            `ops.unscale_` for a gradient that cannot be unscaled. The stage stays READY then, unless gradients were
            written or the failure was reported to other ranks: then it is UNSCALED with the flag set, so that the step
            is skipped.
        """
        if not self._enabled:
            return
        self._require_scale("unscale_", self._fail_unchecked, optimizer)
        state = self._state(optimizer)
        self._check_order(state)
        self._check_and_agree(optimizer, state, unscale=True)
        self._enter_unscaled(state)

    def _unscale_once(self, optimizer: Any) -> None:
        """`unscale_`, unless the gradients are unscaled already, in this step or before the last update."""
        state = self._state(optimizer)
        if state["stage"] is not OptState.UNSCALED:
            state["recalled_flag"] = self._records.recall(optimizer)  # if not None, nothing is divided
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
            found_inf: fp32, shape (); what the flags begin with, read.
            allow_fp16: False refuses fp16 gradients as torch does.
        """
        # A call from outside a step, perhaps for a few parameters only, must not begin one.
        temporary: StepState = {"stage": OptState.READY, "found_inf_per_device": {}}
        state = self._state(optimizer) if self._is_known(optimizer) else temporary
        return self._unscale_batches_(self._records.plan(optimizer), state, inv_scale, found_inf.clone(), allow_fp16)

    def _unscale_batches_(
        self, plan: GradPlan, state: StepState, inv_scale: Tensor | None, found_inf: Tensor, allow_fp16: bool
    ) -> Flags:
        """As `_unscale_grads_`, but `found_inf` becomes its device's flag; without `inv_scale` ops take 1 / scale."""
        state["written"] = False
        factor = self._scale if inv_scale is None else inv_scale

        def unscale(batch: Batch, flag: Tensor, backend: dispatch.Backend) -> None:
            state["written"] = True
            batch_ops.unscale_batch_(batch, fp32_on(flag.device, factor), flag, backend, inverse=inv_scale is not None)
            if self._check_unscaled:
                batch_ops.check_batch(batch, flag, backend, unscaled=True)

        return self._for_each_batch(plan, found_inf, allow_fp16, unscale, divides=True)

    def _check_inf_per_device(self, optimizer: Any) -> Flags:  # type: ignore[override]
        """Check the optimizer's gradients, read-only, and agree with the other ranks, once per step.

        Where no other rank must agree, each call checks again, until the optimizer was stepped or clipped together with
        others.

        Returns: the agreed flag, fp32 `()`, 0.0 or 1.0, on every device that holds parameters.
        """
        stage = self._state(optimizer)["stage"] if self._is_known(optimizer) else OptState.READY
        try:
            self._require_scale("_check_inf_per_device", self._fail_unchecked, optimizer)
            state = self._state(optimizer)
            recheck = self._may_recheck(optimizer, state)
            if recheck and stage is OptState.UNSCALED:
                state["recalled_flag"] = None  # of the step before: check these gradients
            if recheck or not state["found_inf_per_device"]:
                self._check_and_agree(optimizer, state, unscale=False)
        finally:
            if self._is_known(optimizer):
                self._state(optimizer)["stage"] = stage  # after a failure, too: step checks again, as other ranks do
        return state["found_inf_per_device"]

    def _may_recheck(self, optimizer: Any, state: StepState) -> bool:
        """Tell whether the gradients may be checked once more: by no reduction, which other ranks would not join.

        And not after a step, a failure, or a clipping together with other optimizers.
        """
        stepped = state["stage"] is OptState.STEPPED or state.get("asked_by_step")
        if stepped or "verdict" not in state or state["verdict"].shared or state.get("must_skip"):
            return False
        return self._agreement(self._records.plan(optimizer)) is None

    def _check_grads(self, optimizer: Any, state: StepState, plan: GradPlan, found_inf: Tensor, unscale: bool) -> Flags:
        """Check the gradients on this rank only, and perhaps unscale them."""
        allow_fp16 = self._allow_fp16 or not unscale
        if self._unscale_is_overridden():  # it may check gradients that the plan does not have
            factor = inverse(self._scale) if unscale else torch.ones_like(found_inf)
            return self._unscale_grads_(optimizer, factor, found_inf, allow_fp16)
        if unscale:
            return self._unscale_batches_(plan, state, None, found_inf, allow_fp16)
        return self._for_each_batch(plan, found_inf, allow_fp16, batch_ops.check_batch)

    def _for_each_batch(
        self, plan: GradPlan, found_inf: Tensor, allow_fp16: bool, op: Op, *, divides: bool = False
    ) -> Flags:
        flags: Flags = {}
        for batch, backend in batch_ops.choose_backends(plan.collect(allow_fp16=allow_fp16), self._backend):
            flag = flag_on(batch.layout.key.device, flags, found_inf)
            if batch.is_partial:
                self._run(plan, batch_ops.check_batch, batch, flag, backend)
            else:
                self._run(plan, op, batch, flag, backend, divides=divides)
        return flags

    def _run(
        self, plan: GradPlan, op: Op, batch: Batch, flag: Tensor, backend: dispatch.Backend, *, divides: bool = False
    ) -> None:
        """Run an op on a batch, and record for `overflow_report` which gradients overflowed.

        Args:
            divides: whether the op writes the gradients.
        """
        scale = self._scale
        if backend == "triton":
            counted = scale is not None and flag.device == scale.device
            plan.marks.prepare(batch.layout, self._counters.on(flag.device) if counted else None)
        marks = backend == "torch" and flag.is_cpu and batch.layout.key.plain  # subclasses may lack the ops for it
        if marks and divides and not self._check_unscaled and scale is not None and scale.item() < 1.0:
            # Unscaling may make finite gradients infinite, which is no overflow: mark before it.
            found = torch.zeros_like(flag)
            batch_ops.check_batch(batch, found, backend)
            marks = False
            if found.item():
                self._mark_on_host(plan, batch)
        op(batch, flag, backend)
        if marks and flag.item():
            self._mark_on_host(plan, batch)

    def _mark_on_host(self, plan: GradPlan, batch: Batch) -> None:
        plan.marks.mark_on_host(batch, self._counters.read()[SKIPPED])

    def _unscale_is_overridden(self) -> bool:
        return getattr(self._unscale_grads_, "__func__", None) is not UnscalingMixin._unscale_grads_

    def _check_and_agree(self, optimizer: Any, state: StepState, *, unscale: bool) -> None:
        """Check the gradients, and perhaps unscale them; reduce the flag over the ranks, store the verdict in `state`.

        Any error of the check is reported to the other ranks.
        """
        self._records.begin_step(state)
        plan, agreement, verdict = self._prepare_check(optimizer, state)
        recalled = state.get("recalled_flag")  # of gradients unscaled before the last update
        state.pop("written", None)
        try:
            flags = self._check_grads(optimizer, state, plan, verdict.found_inf, unscale and recalled is None)
            verdict.add(flags.values() if recalled is None else [*flags.values(), recalled])
            if agreement is not None:
                verdict.write_scale(self._scale)
        except BaseException as error:
            written = state.pop("written", self._unscale_is_overridden())  # an override may have written anything
            self._fail(state, agreement if isinstance(error, Exception) else None, written=written)
            if state["stage"] is OptState.READY:
                state["recalled_flag"] = None  # by the next call the gradients may be others
            raise
        try:
            if agreement is not None:
                verdict.agree(agreement)
            self._store_verdict(optimizer, state, verdict, self._flag_devices(flags, plan, agreement))
        except BaseException:
            self._skip(state)
            raise

    def _prepare_check(self, optimizer: Any, state: StepState) -> tuple[GradPlan, Agreement | None, Verdict]:
        """Return what a check needs; if that fails, report it to the other ranks."""
        try:
            plan = self._records.plan(optimizer)
            agreement = self._agreement(plan)
            return plan, agreement, self._new_verdict(plan)
        except Exception:
            with suppress(Exception):  # such as an illegal process_group, which fails on every rank
                self._fail(state, self._new_agreement(optimizers.parameters_of(optimizers.unwrap(optimizer))))
            if state["stage"] is OptState.READY:
                state["recalled_flag"] = None  # by the next call the gradients may be others
            raise

    def _flag_devices(self, flags: Flags, plan: GradPlan, agreement: Agreement | None) -> Sequence[torch.device]:
        """Return the devices that need the flag; none if nothing was checked, and step and update will raise."""
        if not flags and agreement is None and not self._is_sharded:
            return ()  # other ranks need the flag even if there are no gradients here
        return (*flags, *plan.devices) or (self._scale.device,)

    def _new_verdict(self, plan: GradPlan) -> Verdict:
        """Return the plan's verdict, cleared, on the scale's device; a new one if an earlier check still needs it."""
        if plan.verdict is not None and plan.verdict.in_step:
            plan.verdict = None  # the flags of an earlier check stay valid, even if this one fails
        home, verdict = self._scale.device, plan.verdict
        if verdict is None or verdict.device != home:
            if home not in self._flag_buffers:
                refuse_capture(home, "a scaler's first step")
                self._flag_buffers[home] = FlagBuffer(home)
            plan.verdict = verdict = self._flag_buffers[home].verdict()
        captured = is_captured(verdict.found_inf)
        if captured:
            self._flag_buffers[home].captured.add(verdict)
        verdict.reset(captured)
        return verdict

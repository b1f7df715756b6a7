"""Unscale and clip in one: a pass that reads, one reduction, a pass that writes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from scaler_triton import collectives, dispatch
from scaler_triton.clipping import norms, reference_norm
from scaler_triton.clipping.arguments import checked_norm_type, checked_optimizers, chosen_ids
from scaler_triton.clipping.copies import copies_of
from scaler_triton.clipping.disabled import NONFINITE, clip_unscaled
from scaler_triton.clipping.rank_norms import held_gradients, multiply_, norm_over_ranks
from scaler_triton.optimizers import parameters_of
from scaler_triton.plan import GradPlan
from scaler_triton.unscaling import UnscalingMixin
from scaler_triton.verdict import Verdict, any_flag, flag_on, fp32_on, write_scales

if TYPE_CHECKING:
    from scaler_triton.batch import Batch
    from scaler_triton.collectives import Agreement


class _Part(NamedTuple):
    """One of the optimizers that are clipped together."""

    optimizer: Any
    state: dict[str, Any]
    plan: GradPlan


class _Measured(NamedTuple):
    """What the pass that reads left of one optimizer."""

    part: _Part
    verdict: Verdict
    pairs: list[tuple[Batch, dispatch.Backend]]
    flags: dict[torch.device, Tensor]
    totals: Tensor


class ClippingMixin(UnscalingMixin):
    """`clip_grad_norm_`: what `unscale_` and torch's clipping do, with fewer passes and reductions."""

    def clip_grad_norm_(
        self,
        optimizers: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        model: nn.Module | None = None,
        parameters: Iterable[Tensor] | Tensor | None = None,
        defer: bool = False,
    ) -> Tensor:
        """Unscale the optimizers' gradients and scale them down to a global norm of at most `max_norm`.

        Equivalent PyTorch, for one optimizer whose gradients are all on this rank:

            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

        The norm is that of the whole model: shards are summed over the ranks, copies counted once. It moves 12 bytes an
        fp32 element instead of 20, and makes one reduction whatever the layouts, after one for each Partial gradient,
        which must be there on all ranks of its mesh. An overflow skips the steps of all these optimizers; gradients
        are unscaled then, not clipped.

        Args:
            optimizers: one, or several under one norm; their gradients are written, as by `unscale_`.
            max_norm: >= 0, of the unscaled gradients.
            norm_type: 2.0, inf, or another p > 0, which take a reduction an optimizer and one more.
            error_if_nonfinite: raise torch's RuntimeError on every rank if the norm is NaN or infinite; waits for it.
            model: what holds the FSDP1 modules, where parameters are theirs.
            parameters: the ones that the norm is of and that are clipped, of those that the optimizers hold; all
                gradients are unscaled and checked. The call may be repeated with others.
            defer: leave the second pass to the optimizer's step, which then unscales and clips; the gradients stay
                scaled until then, and unscaling, clipping or updating before it raises. For optimizers that take
                `grad_scale` (`fused=True`).

        Returns: the norm, fp32, shape (), on the scale's device, equal on all ranks; NaN if another rank failed.

        Raises: as `unscale_`; ValueError naming `optimizers`, `max_norm`, `norm_type`, `model`, `defer` or
            `parameters`; TypeError naming `optimizers`, `norm_type` or `parameters` for what is none.
        """
        parts_of = checked_optimizers(optimizers)
        chosen = chosen_ids(parameters)
        norm_type = checked_norm_type(max_norm, norm_type)
        if not self._enabled:
            held = [parameter for optimizer in parts_of for parameter in parameters_of(optimizer)]
            return clip_unscaled(held, chosen, max_norm, norm_type, error_if_nonfinite, model, self.process_group)
        whole = chosen is None and norm_type == 2.0
        at_once = whole and not self._check_unscaled and not self._unscale_is_overridden()
        with torch.no_grad():
            self._require_scale(parts_of, chosen, None if at_once else norm_type)
            parts = self._parts(parts_of, again=chosen is not None)
            if defer:
                self._check_deferable(parts, whole)
            agreement = self._joint_agreement([part.plan for part in parts])
            if at_once:
                return self._clip_at_once(parts, agreement, max_norm, error_if_nonfinite, model, defer)
            return self._clip_after_unscaling(parts, agreement, chosen, max_norm, norm_type, error_if_nonfinite, model)

    def _parts(self, optimizers: Sequence[Any], *, again: bool) -> list[_Part]:
        """Return the optimizers with their states and plans; errors of order are raised before any reduction."""
        states = [self._state(optimizer) for optimizer in optimizers]
        for state in states:
            self._check_stage(state, again)
        if len({id(state) for state in states}) != len(optimizers) or not states:
            raise ValueError(f"optimizers must be at least one, and each another one, got {len(states)} of them")
        return [_Part(o, state, self._plans.get(o)) for o, state in zip(optimizers, states, strict=True)]

    def _check_stage(self, state: dict[str, Any], again: bool) -> None:
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        if state["stage"] is OptState.UNSCALED and (not again or "deferred" in state):
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")

    def _require_scale(self, optimizers: Sequence[Any], chosen: set[int] | None, norm_type: float | None) -> None:
        """Raise torch's error if there is no scale, once the ranks that wait for this one are told.

        Args:
            chosen: what is clipped.
            norm_type: of the norm that takes a reduction of its own, after each optimizer's; None: all are one.
        """
        if self._scale is not None and self._growth_tracker is not None:
            return
        try:
            self._check_scale_growth_tracker("clip_grad_norm_")
        except AssertionError:
            with suppress(Exception):  # torch's error is the one to see
                self._tell_of_no_scale(optimizers, chosen, norm_type)
            raise

    def _tell_of_no_scale(self, optimizers: Sequence[Any], chosen: set[int] | None, norm_type: float | None) -> None:
        agreement = self._joint_agreement([self._plans.get(optimizer) for optimizer in optimizers])
        if agreement is None:
            return
        parts = self._parts(optimizers, again=True)
        # The others back off in update(): so must this rank, which therefore needs a scale.
        home = self._home(parts[0].plan)
        self._lazy_init_scale_growth_tracker(home)
        if norm_type is None:
            self._fail_together(parts, agreement)
            return
        for part in parts:
            if part.state["stage"] is OptState.READY:
                self._fail(part.state, part.plan, self._agreement(part.plan))
            self._skip(part.state, part.plan)
        _sum_partial(parts, chosen)
        flag = torch.ones((), dtype=torch.float32, device=home)
        norm_over_ranks(*_unknown(flag), norm_type, agreement, flag)

    def _check_deferable(self, parts: Sequence[_Part], whole: bool) -> None:
        if not whole:
            raise ValueError("defer=True clips all gradients by norm_type 2.0, got another norm_type or parameters=")
        for part in parts:
            if not getattr(part.optimizer, "_step_supports_amp_scaling", False):
                name = type(part.optimizer).__name__
                raise ValueError(f"defer=True needs optimizers that take grad_scale (fused=True), got {name}")
        if self._check_unscaled:
            raise ValueError("defer=True leaves gradients scaled, so check_unscaled=True cannot be done, got both")

    def _clip_at_once(
        self,
        parts: Sequence[_Part],
        agreement: Agreement | None,
        max_norm: float,
        error_if_nonfinite: bool,
        model: nn.Module | None,
        defer: bool,
    ) -> Tensor:
        copies = [_copies(part.plan, agreement, model) for part in parts]
        assert self._scale is not None
        for part in parts:
            self._stepped.forget(part.state)
        try:
            backend = norms.choose_for_scale(self._scale, self._backend) if defer else None
            measured = [self._measure(part, counts) for part, counts in zip(parts, copies, strict=True)]
        except Exception:
            self._fail_together(parts, agreement)
            raise
        try:
            totals = self._agree_on_totals(measured, agreement)
            refused = error_if_nonfinite and not math.isfinite(reference_norm.norm_of(totals).item())
            if refused:
                totals[reference_norm.FLAG] = 1.0  # nothing is clipped then
            if backend is not None:
                told = [self._leave_to_step(parts, totals, max_norm, backend)]
            else:
                told = [norm for each in measured for norm in self._write(each, totals, max_norm)]
            for each in measured:
                self._finish(each, agreement)
        except BaseException:
            for part in parts:
                self._skip(part.state, part.plan)
            raise
        if refused:
            raise RuntimeError(NONFINITE.format(2.0))
        return told[0] if told else reference_norm.norm_of(totals)

    def _measure(self, part: _Part, copies: Sequence[int]) -> _Measured:
        """Check one optimizer's gradients and sum their squares, each piece's share of the global sum."""
        if part.state["found_inf_per_device"]:
            part.plan.verdict = None  # what an earlier check found must outlive a failure of this one
        verdict = self._new_verdict(part.plan)
        flags: dict[torch.device, Tensor] = {}
        totals: list[Tensor] = []

        def add(batch: Batch, flag: Tensor, backend: dispatch.Backend) -> None:
            factor, weights = self._factor_on(flag.device), _weights(batch, copies)
            total = norms.sum_of_squares_batch(batch, factor, flag, weights, backend, inverse=False)
            totals.append(total.to(verdict.device))

        gradients = part.plan.collect(allow_fp16=self._allow_fp16, summed=True)
        pairs = norms.choose_backends(gradients.batches, self._backend)
        for batch, backend in pairs:
            flag = flag_on(batch.layout.key.device, flags, verdict.found_inf)
            self._run(part.plan, add, batch, flag, backend)
        verdict.add(flags.values())
        return _Measured(part, verdict, pairs, flags, _sum_of(totals, verdict.device))

    def _factor_on(self, device: torch.device) -> Tensor:
        assert self._scale is not None
        return fp32_on(device, self._scale)

    def _agree_on_totals(self, measured: Sequence[_Measured], agreement: Agreement | None) -> Tensor:
        """Return the optimizers' totals, summed up over them and over the ranks; their flags become one."""
        totals = _sum_of([each.totals for each in measured], measured[0].verdict.device)
        if agreement is not None:
            assert self._scale is not None
            write_scales(totals[reference_norm.SCALES :], self._scale)
            agreement.sum_(totals)
        for each in measured:
            if agreement is not None:
                each.verdict.settle(totals[reference_norm.FLAG :], agreement.size)
            elif len(measured) > 1 and self._served_devices(each.flags, each.part.plan, agreement):
                each.verdict.join(totals[reference_norm.FLAG])
        return totals

    def _leave_to_step(
        self, parts: Sequence[_Part], totals: Tensor, max_norm: float, backend: dispatch.Backend
    ) -> Tensor:
        """Have the optimizers unscale and clip; return the norm."""
        assert self._scale is not None
        norm, factor = norms.deferred(totals, self._scale, max_norm, backend)
        for part in parts:
            part.state["deferred"] = factor
        return norm

    def _write(self, each: _Measured, totals: Tensor, max_norm: float) -> list[Tensor]:
        """Unscale and clip; return the norm as it came to be known on the scale's device."""
        told = []
        for batch, backend in each.pairs:
            device = batch.layout.key.device
            local = totals if device == totals.device else totals.to(device, non_blocking=device.type != "cpu")
            factor = self._factor_on(device)
            told.append(norms.clip_batch_(batch, factor, local, max_norm, backend, inverse=False, measured=True))
        return [norm for norm in told if norm.device == totals.device]

    def _finish(self, each: _Measured, agreement: Agreement | None) -> None:
        part = each.part
        self._leave_flag(part, each.verdict, self._served_devices(each.flags, part.plan, agreement))
        part.state["stage"] = OptState.UNSCALED

    def _leave_flag(self, part: _Part, verdict: Verdict, devices: Sequence[torch.device]) -> None:
        """Keep the flag for the step, and start its copy if the step will ask for it on the host."""
        self._keep(part.state, verdict, devices)
        if not getattr(part.optimizer, "_step_supports_amp_scaling", False):
            verdict.start_mirror()

    def _fail_together(self, parts: Sequence[_Part], agreement: Agreement | None) -> None:
        """Tell the other ranks, in the reduction that they wait in, that this one could not check its gradients."""
        if agreement is None:
            return
        for part in parts:
            self._skip(part.state, part.plan)
        _sum_partial(parts, None)
        told = torch.ones(reference_norm.COLUMNS, dtype=torch.float64, device=self._home(parts[0].plan))
        told[reference_norm.SQUARES] = math.nan  # nobody knows the norm
        agreement.sum_(told)

    def _joint_agreement(self, plans: Sequence[GradPlan]) -> Agreement | None:
        """Return who must agree on all of the optimizers: they share one reduction."""
        first = plans[0]
        if len(plans) == 1:
            return self._agreement(first)
        key = (self.process_group, collectives.default_group())
        if first.joint is None or first.joint[0] != key or [plan() for plan in first.joint[1]] != [*plans]:
            parameters = [parameter for plan in plans for parameter in plan.parameters]
            first.joint = (key, [*map(weakref.ref, plans)], self._new_agreement(parameters))
        agreement: Agreement | None = first.joint[2]
        return agreement

    def _clip_after_unscaling(
        self,
        parts: Sequence[_Part],
        agreement: Agreement | None,
        chosen: set[int] | None,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        model: nn.Module | None,
    ) -> Tensor:
        """Clip in a pass of its own: some of the parameters, or another norm."""
        assert self._scale is not None
        copies = [count for part in parts for count in _copies(part.plan, agreement, model)]
        failure = self._unscale_each(parts, agreement)
        if failure is not None:
            for part in parts:
                self._skip(part.state, part.plan)
            _sum_partial(parts, chosen)
            flag = torch.ones((), dtype=torch.float32, device=self._scale.device)
            norm_over_ranks(*_unknown(flag), norm_type, agreement, flag)
            raise failure
        flag = any_flag([self._flag(part.state) for part in parts], self._scale.device)
        gradients, counts = held_gradients(_parameters(parts), copies, chosen)
        norm, flag = norm_over_ranks(gradients, counts, norm_type, agreement, flag)
        if len(parts) > 1:
            for part in parts:
                self._take_flag(part, flag)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise RuntimeError(NONFINITE.format(norm_type))
        multiply_(gradients, reference_norm.coefficient(flag, norm, max_norm))
        return norm

    def _unscale_each(self, parts: Sequence[_Part], agreement: Agreement | None) -> Exception | None:
        """Unscale what is not; return the first error: the other ranks wait in reductions that are still to come."""
        first: Exception | None = None
        for part in parts:
            if part.state["stage"] is not OptState.READY:
                continue
            try:
                self.unscale_(part.optimizer)
            except Exception as error:
                if agreement is None:
                    raise
                first = first or error
        return first

    def _take_flag(self, part: _Part, flag: Tensor) -> None:
        """Have an optimizer skip, too, if `flag` is set, which all that are clipped together share."""
        state, devices = part.state, (*part.state["found_inf_per_device"],)
        if not devices:
            return
        verdict = self._verdict(state)
        if verdict is None:  # somebody has put other flags there
            state["found_inf_per_device"] = {each: flag.to(each) for each in devices}
            return
        verdict.join(flag)
        self._leave_flag(part, verdict, devices)


def _sum_partial(parts: Sequence[_Part], chosen: set[int] | None) -> None:
    """Take part in the sums of Partial gradients that are still to come, on a rank that cannot use them."""
    parameters = _parameters(parts)
    with suppress(Exception):  # a bad gradient, whose error is known
        held_gradients(parameters, [1] * len(parameters), chosen)


def _unknown(flag: Tensor) -> tuple[list[Tensor], list[int]]:
    """What stands for the gradients of a rank that does not know theirs: their norm is NaN everywhere."""
    return [torch.full_like(flag, math.nan)], [1]


def _parameters(parts: Sequence[_Part]) -> list[Tensor]:
    return [parameter for part in parts for parameter in part.plan.parameters]


def _sum_of(totals: list[Tensor], device: torch.device) -> Tensor:
    if len(totals) == 1:
        return totals[0]
    if not totals:
        return torch.zeros(reference_norm.COLUMNS, dtype=torch.float64, device=device)
    return torch.stack(totals).sum(0)


def _copies(plan: GradPlan, agreement: Agreement | None, model: nn.Module | None) -> list[int]:
    """`copies_of` for a plan, which keeps the answer."""
    group = None if agreement is None else agreement.group
    if plan.copies is None or plan.copies[0] is not group or plan.copies[1]() is not model:
        seen = (lambda: None) if model is None else weakref.ref(model)
        plan.copies = (group, seen, copies_of(plan.parameters, group, model))
    counts: list[int] = plan.copies[2]
    return counts


def _weights(batch: Batch, copies: Sequence[int]) -> list[float] | None:
    """Return each gradient's share in the global sum, the same list as long as `copies` is; None: 1 for all."""
    layout = batch.layout
    if layout.weights is None or layout.weights[0] is not copies:
        weights = [1.0 / copies[slot] for slot in layout.slots]
        layout.weights = (copies, None if set(weights) <= {1.0} else weights)
    weights_: list[float] | None = layout.weights[1]
    return weights_

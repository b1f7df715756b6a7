"""Clipping by the 2-norm of all gradients: a pass that reads, one reduction, a pass that writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton import batch_ops, dispatch
from scaler_triton.clipping import clip_ops, reference_norm
from scaler_triton.clipping.arguments import Request
from scaler_triton.clipping.copies import gradient_copies
from scaler_triton.clipping.parts import Part, PartsMixin
from scaler_triton.flags import Flags, flag_on, fp32_on
from scaler_triton.scale_comparison import write_scales
from scaler_triton.verdict import Verdict

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement
    from scaler_triton.batch import Batch


class _Measured(NamedTuple):
    """What the pass that reads returned for one optimizer."""

    part: Part
    verdict: Verdict
    pairs: list[tuple[Batch, dispatch.Backend]]
    flags: Flags
    totals: Tensor


class AtOnceMixin(PartsMixin):
    """Checks, measures and clips optimizers under one norm, with one reduction."""

    def _clip_at_once(
        self, parts: Sequence[Part], agreement: Agreement | None, request: Request, defer: bool
    ) -> Tensor:
        for part in parts:
            self._records.begin_step(part.state)
        try:
            backend = dispatch.choose_for_scale(self._scale, self._backend, clips=True) if defer else None
            measured = [self._measure(part) for part in parts]
            totals = self._totals(measured, agreement)
        except Exception:
            if agreement is not None:
                self._fail_together([part.optimizer for part in parts], agreement)
            raise
        try:
            self._agree_on_totals(measured, totals, agreement)
            refused = request.error_if_nonfinite and not math.isfinite(reference_norm.norm_of(totals).item())
            if refused:
                _set_from_sums(measured, totals)
                totals[reference_norm.FLAG] = 1.0  # nothing is clipped then
            if backend is not None:
                norm = self._defer_to_step(measured, totals, request.max_norm, backend)
            else:
                norm = self._unscale_and_clip(measured, totals, request.max_norm)
            _set_from_sums(measured, totals)
            for each in measured:
                self._finish(each, agreement)
        except BaseException:
            self._skip_all(parts, defer)
            raise
        if refused:
            if defer:
                self._skip_all(parts, defer)
            raise RuntimeError(reference_norm.NONFINITE.format(2.0))
        return norm

    def _measure(self, part: Part) -> _Measured:
        """Check one optimizer's gradients and sum their squares, each divided by the number of its replicas."""
        verdict = self._new_verdict(part.plan)
        flags: Flags = {}
        totals: list[Tensor] = []

        def add(batch: Batch, flag: Tensor, backend: dispatch.Backend) -> None:
            scale, weights = fp32_on(flag.device, self._scale), _weights(batch, copies)
            total = clip_ops.sum_of_squares_batch(batch, scale, flag, weights, backend, inverse=False)
            totals.append(total.to(verdict.device))

        batches = part.plan.collect(allow_fp16=self._allow_fp16, summed=True)
        copies = gradient_copies(part.plan, part.copies)
        pairs = batch_ops.choose_backends(batches, self._backend, clips=True)
        for batch, backend in pairs:
            flag = flag_on(batch.layout.key.device, flags, verdict.found_inf)
            self._run(part.plan, add, batch, flag, backend)
        verdict.add(flags.values())
        return _Measured(part, verdict, pairs, flags, _sum_of(totals, verdict.device))

    def _totals(self, measured: Sequence[_Measured], agreement: Agreement | None) -> Tensor:
        """Return the sum of the optimizers' totals, with the scale once, for the ranks to compare."""
        totals = _sum_of([each.totals for each in measured], measured[0].verdict.device)
        if agreement is not None and sum(len(each.pairs) for each in measured) != 1:  # a single batch's totals have it
            write_scales(totals[reference_norm.SCALES :], self._scale)
        return totals

    def _agree_on_totals(self, measured: Sequence[_Measured], totals: Tensor, agreement: Agreement | None) -> None:
        """Sum `totals` (written) over the ranks; all optimizers get one flag."""
        if agreement is not None:
            agreement.sum_(totals)
        for each in measured:
            if agreement is not None:
                each.verdict.expect_sums(agreement.size)
            elif len(measured) > 1 and self._flag_devices(each.flags, each.part.plan, agreement):
                each.verdict.set_shared(totals[reference_norm.FLAG])

    def _defer_to_step(
        self, measured: Sequence[_Measured], totals: Tensor, max_norm: float, backend: dispatch.Backend
    ) -> Tensor:
        """Leave unscaling and clipping to the optimizers' steps; return the norm."""
        norm, factor = clip_ops.deferred(totals, self._scale, max_norm, backend, measured[0].verdict)
        for each in measured:
            each.part.state["deferred"] = factor
        return norm

    def _skip_all(self, parts: Sequence[Part], deferred: bool) -> None:
        for part in parts:
            self._skip(part.state)
            part.state["must_skip"] = deferred  # else `update` would require the step that clips

    def _unscale_and_clip(self, measured: Sequence[_Measured], totals: Tensor, max_norm: float) -> Tensor:
        """Unscale and clip all gradients; return the norm."""
        norm: Tensor | None = None
        for each in measured:
            for batch, backend in each.pairs:
                device = batch.layout.key.device
                scale = fp32_on(device, self._scale)
                if device == totals.device:
                    norm = clip_ops.clip_batch_(batch, scale, totals, max_norm, backend, each.verdict)
                else:
                    local = totals.to(device, non_blocking=device.type != "cpu")
                    clip_ops.clip_batch_(batch, scale, local, max_norm, backend)
        return reference_norm.norm_of(totals) if norm is None else norm

    def _finish(self, each: _Measured, agreement: Agreement | None) -> None:
        part = each.part
        devices = self._flag_devices(each.flags, part.plan, agreement)
        self._store_verdict(part.optimizer, part.state, each.verdict, devices)
        self._enter_unscaled(part.state)

    def _fail_together(self, optimizers: Sequence[Any], agreement: Agreement) -> None:
        """Join the reduction that the other ranks wait in, with the failure set: gradients could not be checked."""
        try:
            self._skip_together(optimizers, None)
        finally:  # even if that fails: they wait
            failed = torch.ones(reference_norm.COLUMNS, dtype=torch.float64, device=self._scale.device)
            failed[reference_norm.SQUARES] = math.nan
            failed[reference_norm.SCALES :] = 0.0  # an update clears the failure, but scales are still compared then
            agreement.sum_(failed)


def _set_from_sums(measured: Sequence[_Measured], totals: Tensor) -> None:
    """Compute by ops the flags that no kernel has computed."""
    for each in measured:
        each.verdict.set_from_sums(totals[reference_norm.FLAG :])


def _sum_of(totals: list[Tensor], device: torch.device) -> Tensor:
    if len(totals) == 1:
        return totals[0]
    if not totals:
        return torch.zeros(reference_norm.COLUMNS, dtype=torch.float64, device=device)
    return torch.stack(totals).sum(0)


def _weights(batch: Batch, copies: Sequence[int]) -> list[float] | None:
    """Return 1 / replicas for each gradient, the same list as long as `copies` is the same; None: 1 for all."""
    layout = batch.layout
    if layout.weights is None or layout.weights[0] is not copies:
        weights = [1.0 / copies[position] for position in layout.positions]
        layout.weights = (copies, None if set(weights) <= {1.0} else weights)
    return layout.weights[1]

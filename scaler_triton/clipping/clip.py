"""`clip_grad_norm_`: its checks, and the choice between the two ways to clip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from scaler_triton.clipping.after_unscaling import AfterUnscalingMixin
from scaler_triton.clipping.arguments import Request, checked_optimizers, checked_request
from scaler_triton.clipping.at_once import AtOnceMixin
from scaler_triton.clipping.copies import plan_copies
from scaler_triton.clipping.disabled import clip_unscaled
from scaler_triton.clipping.parts import Part, all_parameters
from scaler_triton.optimizers import takes_factor

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement


_UNSCALES_TOO = " clip_grad_norm_ unscales, too: call one of the two, once per step, and update() after one left out."


class ClippingMixin(AtOnceMixin, AfterUnscalingMixin):
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

        The norm is that of the whole model: shards are summed over the ranks, replicas counted once. It moves 12 bytes
        per fp32 element instead of 20, and makes one reduction (one per dimension for a mesh that is a part of the
        world), after one for each Partial gradient, which all ranks of its mesh must have. An overflow skips the steps
        of all these optimizers; gradients are unscaled then, not clipped. All ranks that must agree call it, with the
        same options, or none does: `unscale_` makes another reduction.

        Args:
            optimizers: one, or several under one norm; their gradients are written, as by `unscale_`.
            max_norm: >= 0, of the unscaled gradients.
            norm_type: 2.0; inf or another p > 0, which takes a reduction for each optimizer and one more.
            error_if_nonfinite: raise torch's RuntimeError on every rank if the norm is NaN or infinite; waits for it.
                What was deferred is skipped then.
            model: what holds the FSDP1 modules, where parameters are theirs; read.
            parameters: any tensors: clip only these, by their norm; their gradients are written. All gradients of the
                optimizers are unscaled and checked. The call may be repeated with others. Warns if the optimizers hold
                none of them.
            defer: leave the second pass to the optimizer's step, which then unscales and clips; the gradients stay
                scaled until then, and unscaling, clipping or updating before it raises. For optimizers that take
                `grad_scale` (`fused=True`).

        Returns: the norm, fp32, shape (), on the scale's device, equal on all ranks; NaN if another rank failed. A
            disabled scaler, which only clips, gives torch's, in torch's dtype, of gradients that are not sharded.

        Raises: as `unscale_`; ValueError naming `optimizers`, `max_norm`, `norm_type`, `model` or `defer`; TypeError
            naming `parameters` or one of the first four, if it is of a wrong type.
        """
        together = checked_optimizers(optimizers)
        with torch.no_grad():
            request = checked_request(max_norm, norm_type, error_if_nonfinite, model, parameters, together)
            if not self._enabled:
                parameters = all_parameters(together)
                return clip_unscaled(parameters, request, self.process_group, sharded=self._is_sharded)
            at_once = request.is_whole and not self._check_unscaled and not self._unscale_is_overridden()
            self._require_scale("clip_grad_norm_", self._report_missing_scale, together, request, at_once, defer)
            for each in together:
                self._check_order(self._state(each), again=request.chosen is not None, hint=_UNSCALES_TOO)
            if defer:
                self._check_deferrable(together, request)
            parts, agreement = self._parts_of(together, request, at_once)
            if at_once:
                return self._clip_at_once(parts, agreement, request, defer)
            return self._clip_after_unscaling(parts, agreement, request)

    def _parts_of(
        self, optimizers: Sequence[Any], request: Request, at_once: bool
    ) -> tuple[list[Part], Agreement | None]:
        """Return the optimizers as parts, and the agreement; if that fails, report it to the other ranks."""
        try:
            plans = [self._records.plan(each) for each in optimizers]
            agreement = self._joint_agreement(plans)
            copies = [plan_copies(plan, agreement, request.model) for plan in plans]
            return [*map(Part, optimizers, map(self._state, optimizers), plans, copies)], agreement
        except ValueError:  # a wrong argument, which raises on all ranks
            raise
        except Exception:
            with suppress(Exception):  # the first error matters more
                self._report_failure(optimizers, request, at_once)
            raise

    def _report_missing_scale(self, optimizers: Sequence[Any], request: Request, at_once: bool, defer: bool) -> None:
        """Report to the ranks that must agree that this one has no scale; raise first what raises on all ranks."""
        if defer:
            self._check_deferrable(optimizers, request)
        self._report_failure(optimizers, request, at_once)

    def _report_failure(self, optimizers: Sequence[Any], request: Request, at_once: bool) -> None:
        """Join all reductions that the other ranks wait in; without plans, which may be what failed.

        Args:
            at_once: there is one reduction; else one for each optimizer, and then the norm's.
        """
        parameters = all_parameters(optimizers)
        agreement = self._new_agreement(parameters)
        if agreement is None:
            return
        self._make_scale(each.device for each in parameters if isinstance(each, Tensor))
        if at_once:
            self._fail_together(optimizers, agreement)
            return
        for optimizer in optimizers:
            state = self._state(optimizer)
            if state["stage"] is OptState.READY:
                self._fail(state, self._new_agreement(all_parameters([optimizer])))
        self._skip_together(optimizers, request.chosen)
        self._report_unknown_norm(agreement, request)

    def _check_deferrable(self, optimizers: Sequence[Any], request: Request) -> None:
        if not request.is_whole:
            got = "parameters=" if request.chosen is not None else f"norm_type {request.norm_type}"
            raise ValueError(f"defer=True clips all gradients by norm_type 2.0, got {got}")
        for optimizer in optimizers:
            if not takes_factor(optimizer):
                name = type(optimizer).__name__
                raise ValueError(f"defer=True needs optimizers that take grad_scale (fused=True), got {name}")
        if self._check_unscaled:
            raise ValueError("defer=True leaves gradients scaled, so check_unscaled=True cannot be done, got both")

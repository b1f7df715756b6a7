"""Clipping in passes of their own, after unscaling: by another norm, or of some of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton.clipping import reference_clip, reference_norm
from scaler_triton.clipping.arguments import Request
from scaler_triton.clipping.parts import Part, PartsMixin, all_parameters
from scaler_triton.clipping.rank_norms import local_gradients, multiply_, norm_of_terms, terms_of_norm, unknown_terms
from scaler_triton.left_unscaled import first_snapshot, has_first_gradient, is_first

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement


class AfterUnscalingMixin(PartsMixin):
    """Unscales optimizers one by one, then clips the chosen gradients by one norm."""

    def _clip_after_unscaling(self, parts: Sequence[Part], agreement: Agreement | None, request: Request) -> Tensor:
        try:
            self._unscale_each(parts, agreement)
            same = [part for part in parts if is_first(part.optimizer, part.state.get("before_loss"))]
            gradients, terms = self._measure_unscaled(parts, request)
        except Exception:
            if agreement is not None:
                self._skip_together([part.optimizer for part in parts], request.chosen)
                self._report_unknown_norm(agreement, request)
            raise
        try:
            norm, flag = norm_of_terms(terms, request.norm_type, agreement)
            if len(parts) > 1 or agreement is not None:
                for part in parts:
                    self._take_flag(part, flag)
            refused = request.error_if_nonfinite and not math.isfinite(norm.item())
            if not refused:
                multiply_(gradients, reference_clip.coefficient(flag, norm, request.max_norm))
            for part in same:  # else this write would be taken for that loss's backward
                part.state["before_loss"] = first_snapshot(part.optimizer)
        except BaseException:
            for part in parts:
                self._skip(part.state)
            raise
        if refused:
            raise RuntimeError(reference_norm.NONFINITE.format(request.norm_type))
        return norm

    def _measure_unscaled(self, parts: Sequence[Part], request: Request) -> tuple[list[Tensor], Tensor]:
        """Return the chosen gradients, and this rank's terms of their norm."""
        flag = self._any_flag(part.state for part in parts)
        unscaled = [part for part in parts if has_first_gradient(part.optimizer, part.state.get("first_gradient"))]
        parameters, copies = all_parameters([part.optimizer for part in parts]), chain(*(part.copies for part in parts))
        gradients, counts = local_gradients(parameters, copies, request.chosen)
        for part in unscaled:
            self._enter_unscaled(part.state)  # its first gradient may have been replaced by a sum
        return gradients, terms_of_norm(gradients, counts, request.norm_type, flag)

    def _report_unknown_norm(self, agreement: Agreement, request: Request) -> None:
        """Join the norm's reduction, which gives NaN on all ranks."""
        terms = unknown_terms(request.norm_type, self._scale.device)
        norm_of_terms(terms, request.norm_type, agreement)

    def _unscale_each(self, parts: Sequence[Part], agreement: Agreement | None) -> None:
        """Unscale those that are not yet; raise the first error only after the last: each one has a reduction."""
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
        try:
            if first is not None:
                raise first
        finally:
            first = None  # else a reference cycle through this frame would keep gradients alive

    def _take_flag(self, part: Part, flag: Tensor) -> None:
        """Replace an optimizer's flag by `flag`, which is of all that are clipped together."""
        state, devices = part.state, (*part.state["found_inf_per_device"],)
        if not devices:
            return
        verdict = self._verdict(state)
        if verdict is None:  # others have replaced the flags
            state.pop("verdict", None)
            state["found_inf_per_device"] = {each: flag.to(each, copy=True) for each in devices}
            return
        verdict.set_shared(flag)
        self._store_verdict(part.optimizer, state, verdict, devices)

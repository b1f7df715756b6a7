"""What `overflow_report` must tell, mixed in before the rest of the specification."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from optimizer_contents import gradients_of, is_fp16
from torch import Tensor
from torch.amp.grad_scaler import OptState

NAN, INF = 1, 2
WORDS = {NAN: "NaN", INF: "Inf", NAN | INF: "NaN and Inf"}

Kinds = dict[int, int]  # by the parameter's id


class Seen:
    """What was seen while so many steps had been skipped.

    Args:
        told: must be told: gradients that held NaN or Inf when they were checked.
        doubtful: may be told, too, of whatever kind: what overflowed only by unscaling if that counts, or was refused.
    """

    def __init__(self, told: Kinds | None = None, doubtful: set[int] | None = None) -> None:
        self.told, self.doubtful = told or {}, doubtful or set()

    def add(self, other: Seen) -> None:
        """Have seen all that another saw."""
        for key, kinds in other.told.items():
            self.told[key] = self.told.get(key, 0) | kinds
        self.doubtful |= other.doubtful


class ReportRules:
    """A skip is explained by what was looked at since the skip before; a postponed step looks again."""

    tells_sparse = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen: dict[int, Seen] = {}
        self._kept: list[Tensor] = []  # whatever was looked at: no other parameter may get its id

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": {}, "_kept": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._enabled:
            self._seen = {}

    def _now(self) -> Seen:
        return self._seen.setdefault(self._counters["skipped"], Seen())

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool = True) -> Any:
        before = self._look(optimizer)
        try:
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except Exception:
            self._now().doubtful.update(before)
            raise
        self._now().add(Seen(before))
        if self._check_unscaled or not 0 < inv_scale.item() < math.inf:
            self._now().doubtful.update(self._look(optimizer))
        return flags

    def clip_grad_norm_(self, optimizers: Any, *args: Any, **kwargs: Any) -> Tensor:
        before = [self._look(optimizer) for optimizer in optimizers]
        try:
            return super().clip_grad_norm_(optimizers, *args, **kwargs)
        except Exception:
            self._now().doubtful.update(*before)  # some may have been looked at
            raise

    def _look(self, optimizer: Any) -> Kinds:
        """Return the kinds in gradients that hold any."""
        holders = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._kept += holders
        pairs = zip(holders, gradients_of(optimizer), strict=True)
        found = {id(p): kinds_in(gradient) for p, gradient in pairs if self.tells_sparse or not gradient.is_sparse}
        return {key: kinds for key, kinds in found.items() if kinds}

    def _recall(self, optimizer: Any) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        before = state["stage"]
        super()._recall(optimizer)
        if before is OptState.READY and state["stage"] is OptState.UNSCALED:
            self._now().add(Seen(self._look(optimizer)))

    def check_report(self, report: Any, named: Iterable[tuple[str, Tensor]]) -> None:
        """Assert that a report says what it must, and nothing else of these parameters."""
        flags = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        pending = any(flag.item() for flag in flags)
        skipped, last = self._counters["skipped"], self._counters["last_skip"]
        assert report.update == (None if pending else last or None)
        seen = self._seen.get(skipped if pending else skipped - 1, Seen())
        named = dict(named)
        bad = {each.name: each for each in report.bad if each.name in named}
        must = {name for name, parameter in named.items() if id(parameter) in seen.told}
        may = {name for name, parameter in named.items() if id(parameter) in seen.doubtful}
        assert must <= set(bad) <= must | may, (report, must, may)
        for name in must - may:
            assert (bad[name].kinds, bad[name].numel) == (WORDS[seen.told[id(named[name])]], named[name].numel()), name


def kinds_in(gradient: Tensor) -> int:
    """Return which kinds a gradient holds; duplicates of sparse fp16 ones are summed."""
    if gradient.is_sparse:
        uncoalesced_half = is_fp16(gradient) and not gradient.is_coalesced()
        gradient = (gradient.float().coalesce().half() if uncoalesced_half else gradient)._values()
    return NAN * bool(torch.isnan(gradient).any()) | INF * bool(torch.isinf(gradient).any())

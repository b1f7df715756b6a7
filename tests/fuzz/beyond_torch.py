"""What our scalers do and torch's do not: clipping, limits, counters; mixed in before the specification of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from optimizer_contents import (
    first_gradient,
    first_write_of,
    gradients_of,
    is_fp16,
    overlaps,
    same_writes,
    sum_up,
    together,
    values_in,
    values_of,
)
from report_rules import ReportRules
from setter_rules import SetterRules
from specification import (
    FAILURE,
    FP32_MAX,
    OVERLAP,
    SMALLEST,
    Refused,
    ShardedSpecification,
    Specification,
    departs,
    unwrapped,
)
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import SkipStreakError

CLIPPING = "clip_grad_norm_"  # new, thus without a number: torch's scaler has no such method
TOLERANCE = 1e-6  # what `clip_grad_norm_` promises of its norm
NO_LIMITS = {
    "min_scale": SMALLEST,
    "max_scale": FP32_MAX,
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "max_consecutive_skips": None,
}
UNSCALES_TOO = " clip_grad_norm_ unscales, too: call one of the two, once per step, and update() after one left out."
LAG = 4  # updates after which too many skips in a row are an error
COUNTERS = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes")


class TooManySkips(Refused):
    """The SkipStreakError of an update that is done."""

    def __init__(self, streak: int, limit: int) -> None:
        departs(13)
        skips = f"{streak} consecutive skip{'s' if streak > 1 else ''}"
        ValueError.__init__(self, f"{skips}, more than max_consecutive_skips={limit}")

    def is_met_by(self, error: BaseException) -> bool:
        return type(error) is SkipStreakError and str(error).startswith(f"{self}; ")


class ExtrasRules:
    """Difference 13: bounds, hysteresis, `check_unscaled`; what the counters count and `was_skipped` tells."""

    def __init__(self, *, check_unscaled: bool = False, limits: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._check_unscaled = check_unscaled
        self._limits = {**NO_LIMITS, **(limits or {})} if self._enabled else NO_LIMITS
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._skips: dict[int, list[Any]] = {}
        self._streaks: list[int] = []  # after each of the last updates
        if self._enabled:
            self._init_scale = min(max(self._init_scale, self._limits["min_scale"]), self._limits["max_scale"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_counters": dict(self._counters), "_skips": {}, "_streaks": []}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state and self._limits != NO_LIMITS:
            departs(13)
            state["scaler_triton"] = {**self._limits, "counters": dict(self._counters)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        extras = state_dict.get("scaler_triton", {})
        self._counters = dict(extras.get("counters", dict.fromkeys(COUNTERS, 0)))
        self._limits = {name: extras.get(name, limit) for name, limit in self._limits.items()}
        self._streaks = []

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        limit = self._limits["max_consecutive_skips"]
        if limit is not None and new_scale is not None:
            self._streaks = []
        elif limit is not None:
            self._streaks.append(self._counters["consecutive_skips"])
            streak = self._streaks.pop(0) if len(self._streaks) > LAG else 0
            if streak > limit:
                raise TooManySkips(streak, limit)

    def _update_as_torch(self) -> None:
        # torch adds the flags up in one of them: what they were is read before.
        self._skips = {key: [bool(flag) for flag in found] for key, found in self._skips.items()}
        bad, before = self._any_flag(), None if self._scale is None else self._scale.clone()
        super()._update_as_torch()
        if bad and self._counters["strikes"] + 1 < self._limits["hysteresis"]:
            departs(13)
            self._scale.copy_(before)
        self._bound_scale()
        self._count(bad, before.item(), self._scale.item())

    def _bound_scale(self) -> None:
        super()._bound_scale()
        bounded = min(max(self._scale.item(), self._limits["min_scale"]), self._limits["max_scale"])
        if self._scale.item() != bounded:
            departs(13)
            self._scale.fill_(bounded)

    def _count(self, bad: bool, before: float, after: float) -> None:
        self._count_flag(bad)
        self._counters["growths"] += after > before
        self._counters["backoffs"] += after < before
        if not bad and (self._limits["consecutive_hysteresis"] or not self._growth_tracker.item()):
            self._counters["strikes"] = 0

    def _count_flag(self, bad: bool) -> None:
        counters = self._counters
        counters["updates"] += 1
        counters["skipped"] += bad
        counters["strikes"] += bad
        counters["consecutive_skips"] = counters["consecutive_skips"] + 1 if bad else 0
        if bad:
            counters["last_skip"] = counters["updates"]

    def _any_flag(self) -> bool:
        states = self._per_optimizer_states.values()
        return any(flag.item() for state in states for flag in state["found_inf_per_device"].values())

    def _update_by_value(self, new_scale: Any) -> None:
        one = not isinstance(new_scale, Tensor) or (new_scale.numel() == 1 and not new_scale.requires_grad)
        if one and self._scale is not None and SMALLEST <= new_scale <= FP32_MAX:
            rounded = torch.tensor(float(new_scale)).item()
            if not self._limits["min_scale"] <= rounded <= self._limits["max_scale"]:
                departs(13)
                raise Refused("new_scale", new_scale)
        checked, bad = self._any_check(), self._any_flag()  # before torch forgets them
        super()._update_by_value(new_scale)
        if checked:
            self._count_flag(bad)
            if self._limits["consecutive_hysteresis"] and not bad:
                self._counters["strikes"] = 0

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
        self._skips.pop(id(optimizer), None)
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self._check_unscaled and not all(values.isfinite().all() for values in values_of(optimizer)):
            for flag in flags.values():
                flag.fill_(1.0)
        return flags

    def _recall(self, optimizer: Any) -> None:
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self._skips.pop(id(optimizer), None)
        super()._recall(optimizer)

    def _fused_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if self._check_unscaled and state["stage"] is OptState.READY:
            departs(13)
            self.unscale_(optimizer)
        return super()._fused_step(optimizer, *args, **kwargs)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            inner = unwrapped(optimizer)
            state = self._per_optimizer_states[id(inner)]
            flags = list(state["found_inf_per_device"].values())  # a fused optimizer's are read when somebody asks
            known = [True] if state.get("must_skip") else [any(flag.item() for flag in flags)]
            takes_flag = hasattr(inner, "_step_supports_amp_scaling") and not state.get("must_skip")
            self._skips[id(inner)] = flags if takes_flag else known
        return result

    def was_skipped(self, optimizer: Any) -> bool:
        if not self._enabled:
            return False
        inner = unwrapped(optimizer)
        if id(inner) not in self._skips:
            name = type(optimizer).__name__
            raise ValueError(f"optimizer must have been stepped and not unscaled since, got {name}")
        return any(bool(flag) for flag in self._skips[id(inner)])

    def stats(self) -> SimpleNamespace:
        shown = {name: value for name, value in self._counters.items() if name != "strikes"}
        return SimpleNamespace(**{**shown, "last_skip": shown["last_skip"] or None})


class Undeferable(Refused):
    """A ValueError that says why `defer=True` cannot be."""

    def __init__(self) -> None:
        ValueError.__init__(self, "defer=True cannot be")

    def is_met_by(self, error: BaseException) -> bool:
        return type(error) is ValueError and str(error).startswith("defer=True")


class ClippingRules:
    """`clip_grad_norm_` is `unscale_` of every optimizer and torch's clipping, by a norm that is right to 1e-6."""

    allows_fp16 = False

    def clip_grad_norm_(
        self,
        optimizers: Sequence[Any],
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        *,
        parameters: Sequence[Tensor] | None = None,
        defer: bool = False,
        measured: Sequence[Tensor] = (),
    ) -> Tensor:
        """Clip by the norm that ours measured, if it is right."""
        departs(CLIPPING)
        optimizers, order = [self._unwrapped(optimizer) for optimizer in optimizers], float(norm_type)
        everything = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        chosen = everything if parameters is None else [p for p in everything if any(p is one for one in parameters)]
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
        self._check_order(optimizers, again=parameters is not None)
        plain = any(not hasattr(optimizer, "_step_supports_amp_scaling") for optimizer in optimizers)
        if defer and (plain or parameters is not None or order != 2.0 or self._check_unscaled):
            raise Undeferable
        same = self._unwritten_since_loss(optimizers)
        if parameters is None and order == 2.0 and not self._check_unscaled:
            exact, promised = self._unscale_at_once(optimizers, chosen, defer)
        else:
            self._unscale_all(optimizers)
            self._sum_up_unscaled(optimizers, chosen)
            exact, promised = torch.linalg.vector_norm(together(chosen), order), True
        norm = agreed(exact, measured, promised)
        refused = error_if_nonfinite and not norm.isfinite()
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        overflow = self._any_overflow(optimizers)
        for optimizer in optimizers if len(optimizers) > 1 else ():
            state = self._per_optimizer_states[id(optimizer)]
            state["stays"] = bool(state["found_inf_per_device"])  # no look at one of them overrules it
            for flag in state["found_inf_per_device"].values():
                flag.fill_(float(overflow))  # all of them skip
        if refused or overflow:
            coefficient = torch.ones(())
        try:
            if defer or not refused:  # as torch: nothing is written
                self._multiply(optimizers, chosen, coefficient, defer)
        except RuntimeError:
            self._skip_all(optimizers)
            raise
        for optimizer in same:  # the clip's writes are no backward's
            self._per_optimizer_states[id(optimizer)]["before_loss"] = first_write_of(optimizer)
        if refused:
            for optimizer in optimizers if defer else ():
                flags = {self._scale.device: torch.ones(())}
                self._per_optimizer_states[id(optimizer)].update(must_skip=True, found_inf_per_device=flags)
            raise RuntimeError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return norm

    def _unscale_at_once(self, optimizers: Sequence[Any], chosen: Sequence[Tensor], defer: bool) -> tuple[Tensor, bool]:
        """Return the norm, and whether it is promised: not where the inverse scale is infinite."""
        self._check_gradients(optimizers)  # all of them, before the first is written
        inverse = self._scale.double().reciprocal().float().double().reshape(())
        exact = torch.linalg.vector_norm(together(chosen)) * inverse
        self._unscale_all(optimizers, leave=defer)
        return exact, bool(inverse.isfinite())

    def _unwritten_since_loss(self, optimizers: Sequence[Any]) -> list[Any]:
        befores = [self._per_optimizer_states[id(optimizer)].get("before_loss") for optimizer in optimizers]
        pairs = zip(optimizers, befores, strict=True)
        return [each for each, before in pairs if before is not None and same_writes(before, first_write_of(each))]

    def _sum_up_unscaled(self, optimizers: Sequence[Any], chosen: Sequence[Tensor]) -> None:
        """Sum up what is chosen; a sum of unscaled terms is unscaled, also in the first gradient's place."""
        states = [(self._per_optimizer_states[id(optimizer)], optimizer) for optimizer in optimizers]
        unscaled = [pair for pair in states if first_gradient(pair[1]) is pair[0]["first"]]
        sum_up(chosen)
        for state, optimizer in unscaled:
            state["first"] = first_gradient(optimizer)

    def _skip_all(self, optimizers: Sequence[Any]) -> None:
        """Have all of them skip: nobody knows what a clip that failed wrote."""
        departs(FAILURE)
        for optimizer in optimizers:
            flags = {self._scale.device: torch.ones(())}
            state = self._per_optimizer_states[id(optimizer)]
            state.update(found_inf_per_device=flags, first=first_gradient(optimizer), stays=True)

    def _check_order(self, optimizers: Sequence[Any], again: bool) -> None:
        for optimizer in optimizers:
            self._check_scale_growth_tracker("clip_grad_norm_")
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError("unscale_() is being called after step().")
            if state["stage"] is OptState.UNSCALED and (not again or "deferred" in state):
                already = "unscale_() has already been called on this optimizer since the last update()."
                raise RuntimeError(already + UNSCALES_TOO)

    def _check_gradients(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._skips.pop(id(optimizer), None)
        for optimizer in optimizers:
            sum_up(parameter for group in optimizer.param_groups for parameter in group["params"])
            if not self.allows_fp16 and any(map(is_fp16, gradients_of(optimizer))):
                raise ValueError("Attempting to unscale FP16 gradients.")
            if any(map(overlaps, gradients_of(optimizer))):
                raise RuntimeError(OVERLAP)

    def _unscale_all(self, optimizers: Sequence[Any], leave: bool = False) -> None:
        """Check every gradient, and unscale it unless the step is to do that."""
        for optimizer in optimizers:
            state = self._per_optimizer_states[id(optimizer)]
            if leave:
                flags = self._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), True)
                state.update(stage=OptState.UNSCALED, found_inf_per_device=flags, first=first_gradient(optimizer))
            elif state["stage"] is OptState.READY:
                self.unscale_(optimizer)

    def _any_overflow(self, optimizers: Sequence[Any]) -> bool:
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        return any(flag.item() for state in states for flag in state["found_inf_per_device"].values())

    def _multiply(self, optimizers: Sequence[Any], chosen: Sequence[Tensor], coefficient: Tensor, defer: bool) -> None:
        for parameter in chosen:
            if parameter.grad is not None and not defer:
                values = values_in(parameter.grad)
                values.copy_(values.to(torch.promote_types(values.dtype, torch.float32)) * coefficient)
        if defer:
            for optimizer in optimizers:
                self._per_optimizer_states[id(optimizer)]["deferred"] = self._scale.reshape(()) / coefficient

    def _step_with_flag(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "deferred" in state:
            optimizer.grad_scale = state["deferred"]  # torch passes on what is there when gradients are unscaled
        return super()._step_with_flag(optimizer, state, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        if self._enabled:
            self._check_scale_growth_tracker("update")
            if any(self._awaits_clipping(key, state) for key, state in self._per_optimizer_states.items()):
                raise RuntimeError(
                    "update() is being called before the step() that clip_grad_norm_(defer=True) left the clipping to."
                )
        super().update(new_scale)

    def _awaits_clipping(self, key: int, state: dict[str, Any]) -> bool:
        alive = not getattr(self._optimizers.get(key), "is_gone", False)
        return alive and "deferred" in state and state["stage"] is OptState.UNSCALED and not state.get("must_skip")


class FullSpecification(ReportRules, ClippingRules, SetterRules, ExtrasRules, Specification):
    """Our GradScaler as it should be."""


class FullShardedSpecification(ReportRules, ClippingRules, SetterRules, ExtrasRules, ShardedSpecification):
    """Our ShardedGradScaler as it should be."""

    allows_fp16 = True


def agreed(exact: Tensor, measured: Sequence[Tensor], promised: bool) -> Tensor:
    """Return the measured norm, which must be right if anything is promised; without one the exact norm."""
    want = exact.abs().float()
    if not measured:
        return want
    (norm,) = measured
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    same = torch.equal(norm, want) or bool(norm.isnan() and want.isnan()) or not promised
    # A last digit of fp32's, where it has fewer than seven, or lies at the end of its range.
    neighbours = torch.nextafter(want, torch.tensor(torch.inf)), torch.nextafter(want, torch.zeros(()))
    assert same or norm in neighbours or abs(norm.double() - exact.abs()) <= TOLERANCE * exact.abs(), (norm, exact)
    return norm.clone()

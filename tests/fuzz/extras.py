"""What our scalers do and torch's do not: clipping, limits, counters, reports; mixed in before the specification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from specification import (
    FAILURE,
    FP32_MAX,
    OVERLAP,
    SMALLEST,
    Refused,
    ShardedSpecification,
    Specification,
    any_set,
    departs,
    gradients_of,
    has_failed,
    is_fp16,
    is_ready,
    overlaps,
    parameters_of,
    unwrapped,
)
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import SkipStreakError

CLIPPING = "clip_grad_norm_"  # new, thus without a number: torch's scaler has no such method
TOLERANCE = 1e-6  # what `clip_grad_norm_` promises of its norm
NO_LIMITS = {"min_scale": SMALLEST, "max_scale": FP32_MAX, "hysteresis": 1, "max_consecutive_skips": None}
LARGEST_INT = 2**63 - 1  # hysteresis is kept in int64
LAG = 4  # updates after which too many skips in a row are an error
COUNTERS = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes")
NAN, INF = 1, 2
WORDS = {NAN: "NaN", INF: "Inf", NAN | INF: "NaN and Inf"}


class Raises(Refused):
    """An error of a type, that begins with a text."""

    def __init__(self, error: type[Exception], begin: str) -> None:
        ValueError.__init__(self, begin)
        self.error, self.begin, self.end = error, begin, ""


class Mistyped(Refused):
    """Difference 2: a TypeError, else as a ValueError."""

    error = TypeError


class OneOf(Refused):
    """Several errors, any of which may be raised first."""

    def __init__(self, errors: list[Refused]) -> None:
        ValueError.__init__(self, "; ".join(map(str, errors)))
        self.errors = errors

    def is_met_by(self, error: BaseException) -> bool:
        return any(each.is_met_by(error) for each in self.errors)


# torch's, with a hint behind it.
ALREADY_UNSCALED = "unscale_() has already been called on this optimizer since the last update(). "


def error_of(name: str, value: Any) -> Refused | None:
    types, is_legal = {
        "min_scale": ((int, float), lambda x: SMALLEST <= x <= FP32_MAX),
        "max_scale": ((int, float), lambda x: SMALLEST <= x <= FP32_MAX),
        "hysteresis": ((int,), lambda x: 1 <= x <= LARGEST_INT),
        "max_consecutive_skips": ((int, type(None)), lambda x: x is None or x >= 0),
    }[name]
    if not isinstance(value, types):
        return Mistyped(name, value)
    return None if is_legal(value) else Refused(name, value)


class ExtrasRules:
    """Difference 13: limits; what the counters count, and what `was_skipped` says."""

    def __init__(self, *, limits: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._limits = {**NO_LIMITS, **(limits or {})} if self._enabled else NO_LIMITS
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._skips: dict[int, list[Any]] = {}
        self._streaks: list[int] = []  # after each of the last updates
        if self._enabled:
            self._init_scale = min(max(self._init_scale, self._limits["min_scale"]), self._limits["max_scale"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_counters": dict(self._counters), "_skips": {}, "_streaks": []}

    @property
    def limits(self) -> tuple[Any, ...]:
        return tuple(self._limits.values())

    def set_limits(self, **changes: Any) -> None:
        """Change what is named, or nothing if any of it is refused; the scale follows in the next update."""
        departs(13)
        for name, widest in (("min_scale", SMALLEST), ("max_scale", FP32_MAX)):
            if name in changes and changes[name] is None:
                changes[name] = widest
        errors = [error for name, value in changes.items() if (error := error_of(name, value)) is not None]
        if errors:
            raise OneOf(errors)
        bounds = {name: torch.tensor(float(changes[name])).item() for name in changes if name.endswith("_scale")}
        limits = {**self._limits, **changes, **bounds}
        if limits["min_scale"] > limits["max_scale"]:
            low, high = limits["min_scale"], limits["max_scale"]
            raise Raises(ValueError, f"min_scale must be <= max_scale, got {low} and {high}")
        self._limits = limits
        if "max_consecutive_skips" in changes:
            self._streaks = []  # updates before it do not count

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
                departs(13)
                skips = f"{streak} consecutive skip{'s' * (streak > 1)}"
                raise Raises(SkipStreakError, f"{skips}, more than max_consecutive_skips={limit}; ")

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
        if not bad and not self._growth_tracker.item():
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
        return any(any_set(state["found_inf_per_device"]) for state in self._per_optimizer_states.values())

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

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
        self._skips.pop(id(optimizer), None)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _begin_step(self, optimizer: Any) -> None:
        if is_ready(self._per_optimizer_states[id(optimizer)]):
            self._skips.pop(id(optimizer), None)
        super()._begin_step(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        inner = unwrapped(optimizer)
        failed = id(inner) in self._per_optimizer_states and has_failed(self._per_optimizer_states[id(inner)])
        result = super().step(inner, *args, **kwargs)
        if self._enabled:
            flags = self._per_optimizer_states[id(inner)]["found_inf_per_device"]
            known = [True] if failed else [any_set(flags)]
            takes_flag = hasattr(inner, "_step_supports_amp_scaling") and not failed
            # A fused optimizer's are read when somebody asks.
            self._skips[id(inner)] = list(flags.values()) if takes_flag else known
        return result

    def was_skipped(self, optimizer: Any) -> bool:
        if not self._enabled:
            return False
        inner = unwrapped(optimizer)
        if id(inner) not in self._skips:
            raise Raises(ValueError, "was_skipped: this ")
        return any(bool(flag) for flag in self._skips[id(inner)])

    def stats(self) -> SimpleNamespace:
        shown = {name: value for name, value in self._counters.items() if name != "strikes"}
        return SimpleNamespace(**{**shown, "last_skip": shown["last_skip"] or None})


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
        measured: Sequence[Tensor] = (),
    ) -> Tensor:
        """Clip by the norm that ours measured, if it is right."""
        departs(CLIPPING)
        optimizers, order = [unwrapped(optimizer) for optimizer in optimizers], float(norm_type)
        everything = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        chosen = everything if parameters is None else [p for p in everything if any(p is one for one in parameters)]
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
        self._check_order(optimizers, again=parameters is not None)
        if parameters is None and order == 2.0:
            exact, promised = self._unscale_at_once(optimizers, chosen)
        else:
            self._unscale_all(optimizers)
            sum_up(chosen)
            exact, promised = torch.linalg.vector_norm(together(chosen), order), True
        norm = agreed(exact, measured, promised)
        overflow = self._skip_together(optimizers)
        if error_if_nonfinite and not norm.isfinite():  # as torch: nothing is written
            raise RuntimeError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        try:
            multiply(chosen, torch.ones(()) if overflow else (max_norm / (norm + 1e-6)).clamp(max=1.0))
        except RuntimeError:
            departs(FAILURE)  # nobody knows what it wrote
            for optimizer in optimizers:
                flags = {self._scale.device: torch.ones(())}
                self._per_optimizer_states[id(optimizer)].update(found_inf_per_device=flags, failed=True)
            raise
        return norm

    def _unscale_at_once(self, optimizers: Sequence[Any], chosen: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """Return the norm, and whether it is promised: not where the inverse scale is infinite."""
        self._check_gradients(optimizers)  # all of them, before the first is written
        inverse = self._scale.double().reciprocal().float().double().reshape(())
        exact = torch.linalg.vector_norm(together(chosen)) * inverse
        self._unscale_all(optimizers)
        return exact, bool(inverse.isfinite())

    def _skip_together(self, optimizers: Sequence[Any]) -> bool:
        """Have all of them skip if one overflowed; return whether any did."""
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        overflow = any(any_set(state["found_inf_per_device"]) for state in states)
        for state in states if len(states) > 1 else ():
            state["stays"] = bool(state["found_inf_per_device"])  # no look at one of them overrules it
            for flag in state["found_inf_per_device"].values():
                flag.fill_(float(overflow))
        return overflow

    def _check_order(self, optimizers: Sequence[Any], again: bool) -> None:
        for optimizer in optimizers:
            self._check_scale_growth_tracker("clip_grad_norm_")
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is OptState.STEPPED:
                raise RuntimeError("unscale_() is being called after step().")
            if stage is OptState.UNSCALED and not again:
                raise Raises(RuntimeError, ALREADY_UNSCALED)

    def _check_gradients(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._skips.pop(id(optimizer), None)
        for optimizer in optimizers:
            sum_up(parameters_of(optimizer))
            if not self.allows_fp16 and any(map(is_fp16, gradients_of(optimizer))):
                raise ValueError("Attempting to unscale FP16 gradients.")
            if any(map(overlaps, gradients_of(optimizer))):
                raise RuntimeError(OVERLAP)

    def _unscale_all(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if is_ready(self._per_optimizer_states[id(optimizer)]):
                self.unscale_(optimizer)


Kinds = dict[int, int]  # by the parameter's id


class Seen:
    """What was seen while so many steps had been skipped.

    Args:
        certain: must be reported: gradients that held NaN or Inf when they were checked.
        doubtful: may be reported, too, of whatever kind: what a check refused, or what overflowed only by unscaling.
    """

    def __init__(self, certain: Kinds | None = None, doubtful: set[int] | None = None) -> None:
        self.certain, self.doubtful = certain or {}, doubtful or set()

    def add(self, certain: Kinds) -> None:
        """Add what another check saw."""
        for key, kinds in certain.items():
            self.certain[key] = self.certain.get(key, 0) | kinds


class ReportRules:
    """A skip is explained by what was looked at since the skip before, as long as the parameters are the same."""

    tells_sparse = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen: dict[int, Seen] = {}
        self._looks: dict[int, tuple[Any, list[Any]]] = {}  # each optimizer with what it looked like at its check
        self._kept: list[Tensor] = []  # whatever was looked at: no other parameter may get its id

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": {}, "_looks": {}, "_kept": []}

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
        self._now().add(before)
        if not 0 < inv_scale.item() < math.inf:
            self._now().doubtful.update(self._look(optimizer))
        return flags

    def _resume(self, optimizer: Any) -> None:
        if id(optimizer) in self._carried:  # a report may name what the update before has counted, too
            self._now().doubtful.update(map(id, parameters_of(optimizer)))
        super()._resume(optimizer)

    def clip_grad_norm_(self, optimizers: Any, *args: Any, **kwargs: Any) -> Tensor:
        before = [self._look(unwrapped(optimizer)) for optimizer in optimizers]
        try:
            return super().clip_grad_norm_(optimizers, *args, **kwargs)
        except Exception:
            self._now().doubtful.update(*before)  # some may have been looked at
            raise

    def _look(self, optimizer: Any) -> Kinds:
        """Return the kinds in gradients that hold any."""
        holders = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        looks = [(parameter, form(parameter.grad)) for parameter in parameters_of(optimizer)]
        before = self._looks.setdefault(id(optimizer), (optimizer, looks))[1]
        if not same(looks, before):
            self._forget(before)
        self._looks[id(optimizer)] = optimizer, looks
        self._kept += parameters_of(optimizer)
        found = {id(p): kinds_in(p.grad) for p in holders if self.tells_sparse or not p.grad.is_sparse}
        return {key: kinds for key, kinds in found.items() if kinds}

    def _forget(self, looks: Sequence[Any]) -> None:
        """Leave open what is reported of an optimizer that has changed: nothing, or what was seen."""
        for seen in self._seen.values():
            for parameter, _ in looks:
                if seen.certain.pop(id(parameter), 0):
                    seen.doubtful.add(id(parameter))

    def check_report(self, report: Any, named: Iterable[tuple[str, Tensor]]) -> None:
        """Assert that a report says what it must, and nothing else of these parameters."""
        for optimizer, looks in self._looks.values():
            if not same([(each, "") for each in parameters_of(optimizer)], [(each, "") for each, _ in looks]):
                self._forget(looks)
        pending = self._any_flag()
        skipped, last = self._counters["skipped"], self._counters["last_skip"]
        assert report.update == (None if pending else last or None)
        seen = self._seen.get(skipped if pending else skipped - 1, Seen())
        named = dict(named)
        bad = {each.name: each for each in report.bad if each.name in named}
        must = {name for name, parameter in named.items() if id(parameter) in seen.certain}
        may = {name for name, parameter in named.items() if id(parameter) in seen.doubtful}
        assert must <= set(bad) <= must | may, (report, must, may)
        for name in must - may:
            assert (bad[name].kinds, bad[name].numel) == (WORDS[seen.certain[id(named[name])]], named[name].numel()), (
                name
            )


class FullSpecification(ReportRules, ClippingRules, ExtrasRules, Specification):
    """Our GradScaler as it should be."""


class FullShardedSpecification(ReportRules, ClippingRules, ExtrasRules, ShardedSpecification):
    allows_fp16 = True


def form(gradient: Tensor | None) -> Any:
    if gradient is None:
        return None
    if gradient.is_sparse:
        return gradient.dtype, gradient._nnz(), gradient.is_coalesced()
    return gradient.dtype, gradient.stride(), gradient.storage_offset()


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether parameters are the same objects, and their gradients of the same form."""
    return len(one) == len(other) and all(a is b and f == g for (a, f), (b, g) in zip(one, other, strict=True))


def kinds_in(gradient: Tensor) -> int:
    """Return which kinds a gradient holds; duplicates of sparse fp16 ones are summed."""
    if gradient.is_sparse:
        uncoalesced_half = is_fp16(gradient) and not gradient.is_coalesced()
        gradient = (gradient.float().coalesce().half() if uncoalesced_half else gradient)._values()
    return NAN * bool(torch.isnan(gradient).any()) | INF * bool(torch.isinf(gradient).any())


def values_in(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def sum_up(parameters: Iterable[Tensor]) -> None:
    """Sum duplicates in sparse gradients: a norm is that of the sums."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and not gradient.is_coalesced():
            parameter.grad = gradient.float().coalesce().half() if is_fp16(gradient) else gradient.coalesce()


def together(parameters: Sequence[Tensor]) -> Tensor:
    parts = [values_in(p.grad).double().flatten() for p in parameters if p.grad is not None]
    whole = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    return whole if whole.numel() else torch.zeros(1, dtype=torch.float64)  # torch has no inf-norm of nothing


def multiply(parameters: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients in fp32 or more, and round once."""
    for parameter in parameters:
        if parameter.grad is not None:
            values = values_in(parameter.grad)
            values.copy_(values.to(torch.promote_types(values.dtype, torch.float32)) * coefficient)


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

"""The specification with what torch's scalers do not have at all: clipping and reports of what overflowed."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from specification import (
    OVERLAP,
    Refused,
    ShardedSpecification,
    Specification,
    any_set,
    gradients_of,
    has_duplicates,
    is_fp16,
    is_ready,
    overlaps,
    parameters_of,
    summed,
    unwrapped,
)
from torch import Tensor
from torch.amp.grad_scaler import OptState

TOLERANCE = 1e-6  # what `clip_grad_norm_` promises of its norm
# torch's, with a hint behind it.
ALREADY_UNSCALED = "unscale_() has already been called on this optimizer since the last update(). "

Kinds = dict[int, set[str]]  # "NaN" and "Inf", by the parameter's id


@dataclass
class Seen:
    """What was seen while so many steps had been skipped."""

    # Must be reported: gradients that held NaN or Inf when they were checked.
    certain: Kinds = field(default_factory=lambda: defaultdict(set))
    # May be reported, too, of whatever kind: what a check refused, or what overflowed only by unscaling.
    doubtful: set[int] = field(default_factory=set)


class FullSpecification(Specification):
    """Our GradScaler as it should be.

    `clip_grad_norm_` is `unscale_` of every optimizer and torch's clipping, by a norm that is right to 1e-6. A report
    explains a skip by what was looked at since the skip before, as long as the parameters are the same.
    """

    allows_fp16 = False
    tells_sparse = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen: dict[int, Seen] = {}  # by the count of skips
        self._looks: dict[int, tuple[Any, list[Any]]] = {}  # each optimizer with what it looked like at its check
        self._kept: list[Tensor] = []  # whatever was looked at: no other parameter may get its id

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": {}, "_looks": {}, "_kept": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._enabled:
            self._seen = {}

    # Clipping.

    def clip_grad_norm_(self, optimizers: Sequence[Any], *args: Any, **kwargs: Any) -> Tensor:
        optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        before = [self._look(optimizer) for optimizer in optimizers]
        try:
            return self._clip(optimizers, *args, **kwargs)
        except Exception:
            self._now().doubtful.update(*before)  # some may have been looked at
            raise

    def _clip(
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
        order = float(norm_type)
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
        except RuntimeError:  # nobody knows what it wrote
            for optimizer in optimizers:
                flags = {self._scale.device: torch.ones(())}
                self._per_optimizer_states[id(optimizer)].update(found_inf_per_device=flags, failed=True)
            raise
        return norm

    def _check_order(self, optimizers: Sequence[Any], again: bool) -> None:
        for optimizer in optimizers:
            self._check_scale_growth_tracker("clip_grad_norm_")
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is OptState.STEPPED:
                raise RuntimeError("unscale_() is being called after step().")
            if stage is OptState.UNSCALED and not again:
                raise Refused(RuntimeError, ALREADY_UNSCALED)

    def _unscale_at_once(self, optimizers: Sequence[Any], chosen: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """Return the norm, and whether it is promised: not where the inverse scale is infinite."""
        for optimizer in optimizers:
            self._skips.pop(id(optimizer), None)
        for optimizer in optimizers:  # all of them are checked before the first is written
            sum_up(parameters_of(optimizer))
            if not self.allows_fp16 and any(map(is_fp16, gradients_of(optimizer))):
                raise ValueError("Attempting to unscale FP16 gradients.")
            if any(map(overlaps, gradients_of(optimizer))):
                raise RuntimeError(OVERLAP)
        inverse = self._scale.double().reciprocal().float().double().reshape(())
        exact = torch.linalg.vector_norm(together(chosen)) * inverse
        self._unscale_all(optimizers)
        return exact, bool(inverse.isfinite())

    def _unscale_all(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if is_ready(self._per_optimizer_states[id(optimizer)]):
                self.unscale_(optimizer)

    def _skip_together(self, optimizers: Sequence[Any]) -> bool:
        """Have all of them skip if one overflowed; return whether any did."""
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        overflow = any(any_set(state["found_inf_per_device"]) for state in states)
        for state in states if len(states) > 1 else ():
            state["stays"] = bool(state["found_inf_per_device"])  # no look at one of them overrules it
            for flag in state["found_inf_per_device"].values():
                flag.fill_(float(overflow))
        return overflow

    # Reports.

    def _now(self) -> Seen:
        return self._seen.setdefault(self._counters["skipped"], Seen())

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool = True) -> Any:
        before = self._look(optimizer)
        try:
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except Exception:
            self._now().doubtful.update(before)
            raise
        for key, kinds in before.items():
            self._now().certain[key] |= kinds
        if not 0 < inv_scale.item() < math.inf:
            self._now().doubtful.update(self._look(optimizer))
        return flags

    def _resume(self, optimizer: Any) -> None:
        if id(optimizer) in self._carried:  # a report may name what the update before has counted, too
            self._now().doubtful.update(map(id, parameters_of(optimizer)))
        super()._resume(optimizer)

    def _look(self, optimizer: Any) -> Kinds:
        """Return the kinds in gradients that hold any."""
        parameters = parameters_of(optimizer)
        looks = [(parameter, form(parameter.grad)) for parameter in parameters]
        before = self._looks.setdefault(id(optimizer), (optimizer, looks))[1]
        if not same(looks, before):
            self._forget(before)
        self._looks[id(optimizer)] = optimizer, looks
        self._kept += parameters
        return {id(p): kinds for p in parameters if p.grad is not None and (kinds := self._kinds_in(p.grad))}

    def _kinds_in(self, gradient: Tensor) -> set[str]:
        if gradient.is_sparse and not self.tells_sparse:
            return set()
        values = values_in(summed(gradient) if is_fp16(gradient) and has_duplicates(gradient) else gradient)
        words = {"NaN": values.isnan().any(), "Inf": values.isinf().any()}
        return {word for word, holds in words.items() if holds}

    def _forget(self, looks: Sequence[Any]) -> None:
        """Leave open what is reported of an optimizer that has changed: nothing, or what was seen."""
        for seen in self._seen.values():
            for parameter, _ in looks:
                if seen.certain.pop(id(parameter), None):
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
            kinds = " and ".join(sorted(seen.certain[id(named[name])], reverse=True))
            assert (bad[name].kinds, bad[name].numel) == (kinds, named[name].numel()), name


class FullShardedSpecification(FullSpecification, ShardedSpecification):
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


def values_in(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def sum_up(parameters: Iterable[Tensor]) -> None:
    """Sum duplicates in sparse gradients: a norm is that of the sums."""
    for parameter in parameters:
        if parameter.grad is not None and has_duplicates(parameter.grad):
            parameter.grad = summed(parameter.grad)


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

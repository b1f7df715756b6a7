"""What the scalers must do on one process: torch's classes, but for the numbered differences of docs/differences.md.

Every place where it departs from torch names the number; what is not departed from is torch itself.

torch's three stages become these phases, by three more keys of torch's dicts and by one dict:
- FAILED: stage UNSCALED and `failed` in the state, also after a step() that raised. The step is skipped whatever the
  flag. The next `scale` makes it READY (difference 23).
- CARRIED: stage READY and an entry in `_carried`, the flag. The next `scale` makes it READY (difference 18).
- stage UNSCALED and `stale` in the state: a loss was scaled since the check, so it is not carried.
- stage UNSCALED and `stays` in the state: it was clipped with others, or carried. No look overrules its flag.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import NoneType, SimpleNamespace
from typing import Any

import grads
import torch
from grads import gradients_of, has_duplicates, is_fp16, values_in
from helpers import params_of
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import SkipStreakError

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126
LARGEST_INT = 2**63 - 1  # hysteresis is kept in int64
LAG = 4  # updates after which too many skips in a row are an error
NO_LIMITS = {"min_scale": SMALLEST, "max_scale": FP32_MAX, "hysteresis": 1, "max_consecutive_skips": None}
ALREADY_UNSCALED = "unscale_() has already been called on this optimizer since the last update(). "  # ours goes on
UNSCALED_LATE = "unscale_() is being called after step(). "  # and here
COUNTERS = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes", "spikes")
OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def any_set(flags: dict[Any, Tensor]) -> bool:
    return any(flag.item() for flag in flags.values())


def is_ready(state: dict[str, Any]) -> bool:
    return state["stage"] is OptState.READY


def versions_of(optimizer: Any) -> list[Any]:
    """Return what changes if a gradient is written or replaced."""
    return [each.grad if each.grad is None else (id(each.grad), each.grad._version) for each in params_of(optimizer)]


def unwrapped(optimizer: Any) -> Any:
    """Difference 15: what a wrapper does, its optimizer does."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


class Refused(Exception):
    """An error that torch does not raise: its type, how its text begins and how it ends; or one of others instead."""

    def __init__(self, error: type[Exception], begin: str, end: str = "") -> None:
        super().__init__(error, begin, end)
        self.error, self.begin, self.end = error, begin, end
        self.others: list[Refused] = []

    def is_met_by(self, error: BaseException) -> bool:
        if any(each.is_met_by(error) for each in self.others):
            return True
        return type(error) is self.error and str(error).startswith(self.begin) and str(error).endswith(self.end)


def is_scale(value: Any) -> bool:
    return SMALLEST <= value <= FP32_MAX


LEGAL_FIELDS: dict[str, Callable[[Any], bool]] = {
    "scale": is_scale,
    "growth_factor": lambda x: 1.0 <= x < math.inf,
    "backoff_factor": lambda x: 0.0 < x <= 1.0,
    "growth_interval": lambda x: x >= 1,
    "_growth_tracker": lambda x: x >= 0,
}
LEGAL_LIMITS: dict[str, tuple[tuple[type, ...], Callable[[Any], bool]]] = {
    "min_scale": ((int, float), is_scale),
    "max_scale": ((int, float), is_scale),
    "hysteresis": ((int,), lambda x: 1 <= x <= LARGEST_INT),
    "max_consecutive_skips": ((int, NoneType), lambda x: x is None or x >= 0),
}


def illegal(name: str, value: Any, error: type[Exception] = ValueError) -> Refused:
    """Difference 2: an error whose text begins with the name that the caller knows and ends with the value."""
    return Refused(error, name, f"got {value!r}")


def demand(field: str, value: Any, name: str | None = None) -> None:
    """Refuse a value that cannot work."""
    if not LEGAL_FIELDS[field](value):
        raise illegal(name or field, value)


def errors_of(limits: dict[str, Any]) -> Iterator[Refused]:
    for name, value in limits.items():
        types, is_legal = LEGAL_LIMITS[name]
        if not isinstance(value, types):
            yield illegal(name, value, TypeError)
        elif not is_legal(value):
            yield illegal(name, value)


class OnEveryDevice(TorchDispatchMode):
    """Difference 9: on a GPU torch's op takes no bf16, and checks fp64 in fp32; on the CPU it does neither."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default and args[0][0].is_cuda
        if not here or args[0][0].dtype not in (torch.bfloat16, torch.float64):
            return func(*args, **(kwargs or {}))
        gradients, found_inf, inv_scale = args
        copies, flag = [gradient.cpu() for gradient in gradients], found_inf.cpu()
        func(copies, flag, inv_scale.cpu())
        for written, copy in zip([*gradients, found_inf], [*copies, flag], strict=True):
            written.data.copy_(copy)  # torch's op counts as no write
        return None


Kinds = dict[int, set[str]]  # "NaN" and "Inf", by the parameter's id


@dataclass
class Seen:
    """What was seen while so many steps had been skipped."""

    # Must be reported: gradients that held NaN or Inf when they were checked.
    certain: Kinds = field(default_factory=lambda: defaultdict(set))
    # May be reported, too, of whatever kind: what a check refused, or what overflowed only by unscaling.
    doubtful: set[int] = field(default_factory=set)


class Specification(torch.amp.GradScaler):
    """Our GradScaler as it should be. `limits`, counters and `was_skipped` are difference 13.

    `clip_grad_norm_` is `unscale_` of every optimizer and torch's clipping, by a norm that is right to 1e-6. A report
    explains a skip by what was looked at since the skip before, as long as the parameters are the same.
    """

    allows_fp16 = False
    overrides_unscale = False
    tells_sparse = True

    def __init__(self, *, limits: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        given = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, **options}
        self._limits = NO_LIMITS | (limits or {}) if self._enabled else NO_LIMITS
        if self._enabled:
            demand("scale", given["init_scale"], "init_scale")
            for field in ("growth_factor", "backoff_factor", "growth_interval"):
                demand(field, given[field])
            self._init_scale = self._limited(self._init_scale)
        else:  # difference 6: all that getters read
            self._init_growth_tracker = 0
            vars(self).update({f"_{name}": value for name, value in given.items() if name not in ("device", "enabled")})
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._carried: dict[int, bool] = {}  # whether the flag was set, by the optimizer's id
        self._divided: dict[int, Any] = {}  # the versions of the gradients then, by the optimizer's id
        self._optimizers: dict[int, Any] = {}  # that were unscaled, by id
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._streaks: list[int] = []  # skips in a row, after each of the last updates
        self._skips: dict[int, list[Any]] = {}  # the flags of the last step, by the optimizer's id
        self._seen: dict[int, Seen] = {}  # by the count of skips
        self._looks: dict[int, tuple[Any, list[Any]]] = {}  # each optimizer with what it looked like at its check
        self._shared: dict[
            int, set[int]
        ] = {}  # the parameters of all that an optimizer was last clipped with, by its id
        self._kept: list[Tensor] = []  # whatever was looked at: no other parameter may get its id

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state |= {"_counters": dict(self._counters), "_streaks": [], "_kept": []}
        state |= {name: {} for name in ("_carried", "_divided", "_optimizers", "_skips", "_seen", "_looks", "_shared")}
        if not self._enabled:  # difference 6: it has states; they name optimizers by id, which a copy cannot keep
            state["_per_optimizer_states"] = defaultdict(_refresh_per_optimizer_state)
        return state

    # Settings and checkpoints.

    def set_growth_factor(self, new_factor: float) -> None:
        demand("growth_factor", new_factor, "new_factor")
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        demand("backoff_factor", new_factor, "new_factor")
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        demand("growth_interval", new_interval, "new_interval")
        super().set_growth_interval(new_interval)

    @property
    def limits(self) -> tuple[Any, ...]:
        return tuple(self._limits.values())

    def set_limits(self, **changes: Any) -> None:
        """Change what is named, or nothing if any of it is refused; the scale follows in the next update."""
        for name in {"min_scale", "max_scale"} & changes.keys():
            if changes[name] is None:
                changes[name] = NO_LIMITS[name]
        errors = list(errors_of(changes))
        if errors:
            errors[0].others = errors[1:]  # any of them may be raised first
            raise errors[0]
        bounds = {name: torch.tensor(float(changes[name])).item() for name in changes if name.endswith("_scale")}
        limits = {**self._limits, **changes, **bounds}
        if limits["min_scale"] > limits["max_scale"]:
            low, high = limits["min_scale"], limits["max_scale"]
            raise Refused(ValueError, f"min_scale must be <= max_scale, got {low} and {high}")
        self._limits = limits
        if "max_consecutive_skips" in changes:
            self._streaks = []  # updates before it do not count

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state and self._limits != NO_LIMITS:
            state["scaler_triton"] = {**self._limits, "counters": dict(self._counters)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._enabled and state_dict:
            for field in LEGAL_FIELDS:
                demand(field, state_dict[field])
        super().load_state_dict(state_dict)
        if self._enabled:
            extras = state_dict.get("scaler_triton", {})
            self._counters = dict(extras.get("counters", dict.fromkeys(COUNTERS, 0)))
            self._limits = {name: extras.get(name, limit) for name, limit in self._limits.items()}
            self._streaks, self._seen = [], {}
            # Difference 24: torch keeps what was unscaled or stepped before.
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            self._carried.clear()

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        """Difference 6: it may be called again, and makes what is still missing."""
        scale, tracker = getattr(self, "_scale", None), getattr(self, "_growth_tracker", None)
        self._growth_tracker = None
        super()._lazy_init_scale_growth_tracker(torch.device(dev))
        self._scale = self._scale if scale is None else scale
        self._growth_tracker = self._growth_tracker if tracker is None else tracker

    # A step.

    def scale(self, outputs: Any) -> Any:
        for key in self._carried.keys() & self._per_optimizer_states.keys() if self._carried else ():
            if is_ready(self._per_optimizer_states[key]):
                self._per_optimizer_states[key]["found_inf_per_device"] = {}
        self._carried.clear()
        for state in self._per_optimizer_states.values() if self._enabled else ():
            if state["stage"] is OptState.UNSCALED and state.get("failed"):
                # Difference 23: torch takes the gradients of a later loss for those that it has unscaled.
                state.clear()
                state.update(_refresh_per_optimizer_state())
            elif state["stage"] is OptState.UNSCALED:
                state["stale"] = True
        return super().scale(outputs)

    def unscale_(self, optimizer: Any) -> None:
        optimizer = unwrapped(optimizer)
        super().unscale_(optimizer)
        if self._enabled:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            state = self._per_optimizer_states[id(optimizer)]
            for word in ("failed", "stays", "stale"):
                state.pop(word, None)
            self._carried.pop(id(optimizer), None)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool = True) -> Any:
        if id(optimizer) in self._carried and self._divided.get(id(optimizer)) == versions_of(optimizer):
            inv_scale = torch.ones_like(inv_scale)  # difference 18
        before = self._look(optimizer)
        self._skips.pop(id(optimizer), None)
        try:
            flags = self._divide(optimizer, inv_scale, found_inf, allow_fp16)
        except Exception:
            self._now().doubtful.update(before)
            raise
        for key, kinds in before.items():
            self._now().certain[key] |= kinds
        if not 0 < inv_scale.item() <= 1:
            self._now().doubtful.update(self._look(optimizer))
        return flags

    def _divide(self, optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool) -> Any:
        is_refused = not allow_fp16 and any(map(is_fp16, gradients_of(optimizer)))
        if any(map(grads.overlaps, gradients_of(optimizer))) and not is_refused:
            raise RuntimeError(OVERLAP)  # torch raises the same, after it has written the gradients of other dtypes
        if allow_fp16:
            grads.sum_up(params_of(optimizer), fp16_only=True)  # difference 16
        with OnEveryDevice():
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: Any) -> Any:
        optimizer = unwrapped(optimizer)
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        if is_ready(state) and id(optimizer) in self._carried:
            flags = state["found_inf_per_device"] or {
                self._scale.device: torch.tensor(float(self._carried[id(optimizer)]))
            }
            state["found_inf_per_device"] = flags
            return flags
        known = state["found_inf_per_device"]
        stays = state["stage"] is OptState.UNSCALED and (state.get("failed") or state.get("stays"))
        if known and (state["stage"] is OptState.STEPPED or stays):  # difference 1
            return known
        return super()._check_inf_per_device(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = unwrapped(optimizer)
        if not self._enabled or "closure" in kwargs or self._scale is None or self._growth_tracker is None:
            return super().step(optimizer, *args, **kwargs)
        state, fused = self._per_optimizer_states[id(optimizer)], hasattr(optimizer, "_step_supports_amp_scaling")
        if is_ready(state):
            self._skips.pop(id(optimizer), None)
        self._resume(optimizer)
        if state["stage"] is OptState.UNSCALED and state.get("failed") and (state["found_inf_per_device"] or fused):
            state["stage"] = OptState.STEPPED
            self._skips[id(optimizer)] = [True]
            return None
        try:
            result = (self._fused_step if fused else super().step)(optimizer, *args, **kwargs)
        except Exception:
            if state["stage"] is OptState.UNSCALED:
                state["failed"] = True
            raise
        flags = state["found_inf_per_device"]  # those of a fused optimizer are read when somebody asks
        self._skips[id(optimizer)] = list(flags.values()) if fused else [any_set(flags)]
        return result

    def _resume(self, optimizer: Any) -> None:
        """Difference 18: make a carried step an unscaled one, with the flag of its check or of a later look."""
        state = self._per_optimizer_states[id(optimizer)]
        if id(optimizer) in self._carried:  # a report may name what the update before has counted, too
            self._now().doubtful.update(map(id, params_of(optimizer)), self._shared.get(id(optimizer), ()))
        if is_ready(state) and id(optimizer) in self._carried:
            flag = self._carried.pop(id(optimizer)) or any_set(state["found_inf_per_device"])
            found_inf = {self._scale.device: torch.tensor(float(flag))}
            state.update(stage=OptState.UNSCALED, found_inf_per_device=found_inf, stays=True)

    def _fused_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer)  # raises
        if is_ready(state):
            self._check_inf_per_device(optimizer)
        if grads.lacks_momentum(optimizer) and any_set(state["found_inf_per_device"]):  # difference 14
            state["stage"] = OptState.STEPPED
            return None
        unchecked = not state["found_inf_per_device"]
        if unchecked:  # difference 12: torch passes the int 0, and fails if there are gradients by now
            state["found_inf_per_device"] = {self._scale.device: torch.zeros(())}
        try:
            return super().step(optimizer, *args, **kwargs)
        except Exception:  # nobody knows what it divided: it can only be skipped now
            del optimizer.grad_scale, optimizer.found_inf
            state.update(stage=OptState.UNSCALED, failed=True)
            raise
        finally:
            if unchecked:
                state["found_inf_per_device"] = {}

    def was_skipped(self, optimizer: Any) -> bool:
        if not self._enabled:
            return False
        flags = self._skips.get(id(unwrapped(optimizer)))
        if flags is None:
            raise Refused(ValueError, "was_skipped: this ")
        return any(bool(flag) for flag in flags)

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
        everything = [parameter for optimizer in optimizers for parameter in params_of(optimizer)]
        chosen = everything if parameters is None else [p for p in everything if any(p is one for one in parameters)]
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
        self._check_order(optimizers, again=parameters is not None)
        if parameters is None and order == 2.0 and not self.overrides_unscale:
            exact, promised = self._unscale_at_once(optimizers, chosen)
        else:
            self._unscale_all(optimizers)
            grads.sum_up(chosen)
            exact, promised = torch.linalg.vector_norm(grads.together(chosen), order), True
        norm = grads.agreed(exact, measured, promised)
        overflow = self._skip_together(optimizers)
        if error_if_nonfinite and not norm.isfinite():  # as torch: nothing is written
            raise RuntimeError(
                f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        try:
            grads.multiply(chosen, torch.ones(()) if overflow else (max_norm / (norm + 1e-6)).clamp(max=1.0))
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
                raise Refused(RuntimeError, UNSCALED_LATE)
            if stage is OptState.UNSCALED and not again:
                raise Refused(RuntimeError, ALREADY_UNSCALED)

    def _unscale_at_once(self, optimizers: Sequence[Any], chosen: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """Return the norm, and whether it is promised: not where the inverse scale is infinite."""
        for optimizer in optimizers:
            self._skips.pop(id(optimizer), None)
        for optimizer in optimizers:  # all of them are checked before the first is written
            grads.sum_up(params_of(optimizer))
            self._validate(optimizer)
        inverse = self._scale.double().reciprocal().float().double().reshape(())
        exact = torch.linalg.vector_norm(grads.together(chosen)) * inverse
        self._unscale_all(optimizers)
        return exact, bool(inverse.isfinite())

    def _validate(self, optimizer: Any) -> None:
        if not self.allows_fp16 and any(map(is_fp16, gradients_of(optimizer))):
            raise ValueError("Attempting to unscale FP16 gradients.")
        if any(map(grads.overlaps, gradients_of(optimizer))):
            raise RuntimeError(OVERLAP)

    def _unscale_all(self, optimizers: Sequence[Any]) -> None:
        ready = [optimizer for optimizer in optimizers if is_ready(self._per_optimizer_states[id(optimizer)])]
        for optimizer in ready:  # here, too; a sum means the same as its terms, also where a later optimizer fails
            self._validate(optimizer)
            grads.sum_up(params_of(optimizer), fp16_only=True)
        for optimizer in ready:
            self.unscale_(optimizer)

    def _skip_together(self, optimizers: Sequence[Any]) -> bool:
        """Have all of them skip if one overflowed; return whether any did."""
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        overflow = any(any_set(state["found_inf_per_device"]) for state in states)
        all_of_them = {id(parameter) for optimizer in optimizers for parameter in params_of(optimizer)}
        self._shared.update(dict.fromkeys(map(id, optimizers), all_of_them))
        for state in states if len(states) > 1 else ():
            state["stays"] = bool(state["found_inf_per_device"])  # no look at one of them overrules it
            for flag in state["found_inf_per_device"].values():
                flag.fill_(float(overflow))
        return overflow

    # An update.

    def update(self, new_scale: Any = None) -> None:
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        states, unstepped = self._per_optimizer_states, self._unstepped()
        self._remember_divided(unstepped)
        for key, flag in self._carried.items():
            if key in states and is_ready(states[key]):  # what was found since the last update counts in the next, too
                self._carried[key] = flag or any_set(states[key]["found_inf_per_device"])
        if new_scale is None:
            self._update_by_flags()
        else:
            self._update_by_value(new_scale)
        carried = {k: flag for k, flag in self._carried.items() if k not in states or is_ready(states[k])}
        self._carried = carried | unstepped
        self._end_streaks(by_value=new_scale is not None)

    def _remember_divided(self, unstepped: Iterable[int]) -> None:
        """Difference 18: remember the gradients of the steps that an update leaves carried."""
        for key in unstepped:
            is_failed = self._per_optimizer_states[key].get("failed")
            optimizer = None if is_failed else self._optimizers.get(key, lambda: None)()
            self._divided[key] = None if optimizer is None else versions_of(optimizer)
            self._kept += [] if optimizer is None else gradients_of(optimizer)

    def _unstepped(self) -> dict[int, bool]:
        """Return the flags to carry: before the update, which adds up the flags in one of them."""
        states = {k: s for k, s in self._per_optimizer_states.items() if not s.get("stale")}
        unscaled = {k: s for k, s in states.items() if s["stage"] is OptState.UNSCALED}
        checked = {k: s for k, s in unscaled.items() if s["found_inf_per_device"]}  # else nothing was divided
        return {key: state.get("failed") or any_set(state["found_inf_per_device"]) for key, state in checked.items()}

    def _update_by_flags(self) -> None:
        if self._growth_tracker.item() >= self._growth_interval and self._any_check():  # difference 3
            self._growth_tracker.fill_(self._growth_interval - 1)
        # torch adds the flags up in one of them: what they were is read before.
        self._skips = {key: [bool(flag) for flag in found] for key, found in self._skips.items()}
        bad, before = self._any_flag(), self._scale.item()
        self._update_as_torch()
        if bad and self._counters["strikes"] + 1 < self._limits["hysteresis"]:
            self._scale.fill_(before)
        self._scale.fill_(self._limited(self._scale.item()))
        self._count_flag(bad)
        self._counters["growths"] += self._scale.item() > before
        self._counters["backoffs"] += self._scale.item() < before
        if not bad and not self._growth_tracker.item():
            self._counters["strikes"] = 0

    def _update_as_torch(self) -> None:
        super().update()

    def _update_by_value(self, new_scale: Any) -> None:
        one = isinstance(new_scale, Tensor) and new_scale.numel() == 1 and not new_scale.requires_grad
        if one or not isinstance(new_scale, Tensor):  # torch refuses the others
            demand("scale", new_scale, "new_scale")
            rounded = torch.tensor(float(new_scale)).item()
            if not self._limits["min_scale"] <= rounded <= self._limits["max_scale"]:
                raise illegal("new_scale", new_scale)
        if isinstance(new_scale, int):  # difference 5, which a tensor of another shape is, too
            new_scale = float(new_scale)
        if one:
            new_scale = new_scale.reshape(self._scale.shape)
        checked, bad = self._any_check(), self._any_flag()  # before torch forgets them
        super().update(new_scale)
        if checked:
            self._count_flag(bad)

    def _limited(self, scale: float) -> float:
        """Difference 4, and closer limits."""
        bounded = SMALLEST if math.isnan(scale) else scale
        return min(max(bounded, self._limits["min_scale"]), self._limits["max_scale"])

    def _end_streaks(self, by_value: bool) -> None:
        limit = self._limits["max_consecutive_skips"]
        if limit is None:
            return
        if by_value:
            self._streaks = []
            return
        self._streaks.append(self._counters["consecutive_skips"])
        streak = self._streaks.pop(0) if len(self._streaks) > LAG else 0
        if streak > limit:
            skips = f"{streak} consecutive skip{'s' * (streak > 1)}"
            raise Refused(
                SkipStreakError, f"{skips}, more than max_consecutive_skips={limit} (raised {LAG} updates late"
            )

    def _any_check(self) -> bool:
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def _any_flag(self) -> bool:
        return any(any_set(state["found_inf_per_device"]) for state in self._per_optimizer_states.values())

    def _count_flag(self, bad: bool) -> None:
        counters = self._counters
        counters["updates"] += 1
        counters["skipped"] += bad
        counters["strikes"] += bad
        counters["consecutive_skips"] = counters["consecutive_skips"] + 1 if bad else 0
        if bad:
            counters["last_skip"] = counters["updates"]

    def stats(self) -> SimpleNamespace:
        shown = {name: value for name, value in self._counters.items() if name != "strikes"}
        return SimpleNamespace(**{**shown, "last_skip": shown["last_skip"] or None})

    # Reports.

    def _now(self) -> Seen:
        return self._seen.setdefault(self._counters["skipped"], Seen())

    def _look(self, optimizer: Any) -> Kinds:
        """Return the kinds in gradients that hold any."""
        parameters = params_of(optimizer)
        looks = [(parameter, grads.form(parameter.grad)) for parameter in parameters]
        before = self._looks.setdefault(id(optimizer), (optimizer, looks))[1]
        if not grads.same(looks, before):
            self._forget(before)
        self._looks[id(optimizer)] = optimizer, looks
        self._kept += parameters
        return {id(p): kinds for p in parameters if p.grad is not None and (kinds := self._kinds_in(p.grad))}

    def _kinds_in(self, gradient: Tensor) -> set[str]:
        if gradient.is_sparse and not self.tells_sparse:
            return set()
        values = values_in(grads.summed(gradient) if is_fp16(gradient) and has_duplicates(gradient) else gradient)
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
            if not grads.same([(each, "") for each in params_of(optimizer)], [(each, "") for each, _ in looks]):
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


class ShardedSpecification(Specification, TorchShardedGradScaler):
    allows_fp16 = True

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
        # Difference 1: fused Adam takes a flag of shape () only.
        return super()._unscale_grads_(optimizer, inv_scale, found_inf.reshape(()), allow_fp16)

    def _update_as_torch(self) -> None:
        # Difference 4: on the CPU torch's class rounds the factor, too, and grows to infinity.
        torch.amp.GradScaler.update(self)

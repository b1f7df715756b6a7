"""What the scalers must do on one process: torch's classes, but for the numbered ones in docs/differences.md.

Every place where it departs from torch calls `departs(number)`; what is not departed from is torch itself.

torch's three stages become these phases. A state is one of torch's dicts; two more keys and one dict are all there is:
- FAILED: stage UNSCALED and `failed` in the state. The step is skipped whatever the flag.
- stage UNSCALED and `began` in the state: its step() raised. The next `scale` makes it READY (difference 23).
- CARRIED: stage READY and an entry in `_carried`, the flag. The next `scale` makes it READY (difference 18).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

FP32_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-126
FP16_SUMS = 16  # duplicates in sparse fp16 gradients are added up in fp32, as torch's ShardedGradScaler does
FAILURE = "failure"  # the page's "When something fails": nothing is written before all was checked
OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)

departures: Counter[int | str] = Counter()  # how often a run met each difference


def departs(number: int | str) -> None:
    """Mark a departure from torch, by its number or by a word that a constant stands for."""
    departures[number] += 1


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Any) -> Iterator[Tensor]:
    return (parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)


def is_fp16(gradient: Tensor) -> bool:
    """Return whether GradScaler refuses to unscale it."""
    return gradient.dtype is torch.float16


def overlaps(gradient: Tensor) -> bool:
    if gradient.layout is not torch.strided or not gradient.numel():
        return False
    return any(stride == 0 < size - 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True))


def lacks_momentum(optimizer: Any) -> bool:
    """Return whether it is an SGD whose momentum its next step will make."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
        if parameter.grad is not None
    )


def any_set(flags: dict[Any, Tensor]) -> bool:
    return any(flag.item() for flag in flags.values())


class Refused(ValueError):
    """Difference 2: a ValueError whose text begins with the field and ends with the value."""

    error: type[Exception] = ValueError

    def __init__(self, field: str, value: Any) -> None:
        departs(2)
        super().__init__(f"{field} must be legal, got {value!r}")
        self.begin, self.end = field, f"got {value!r}"

    def is_met_by(self, error: BaseException) -> bool:
        return type(error) is self.error and str(error).startswith(self.begin) and str(error).endswith(self.end)


LEGAL = {
    "scale": lambda x: SMALLEST <= x <= FP32_MAX,
    "growth_factor": lambda x: 1.0 <= x < math.inf,
    "backoff_factor": lambda x: 0.0 < x <= 1.0,
    "growth_interval": lambda x: x >= 1,
    "_growth_tracker": lambda x: x >= 0,
}


def demand(field: str, value: Any, name: str | None = None) -> None:
    """Difference 2: refuse a value that cannot work, by the name the caller knows it by."""
    if not LEGAL[field](value):
        raise Refused(name or field, value)


class OnEveryDevice(TorchDispatchMode):
    """Difference 9: on a GPU torch's op takes no bf16, and checks fp64 in fp32; on the CPU it does neither."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default and args[0][0].is_cuda
        if not here or args[0][0].dtype not in (torch.bfloat16, torch.float64):
            return func(*args, **(kwargs or {}))
        departs(9)
        gradients, found_inf, inv_scale = args
        copies, flag = [gradient.cpu() for gradient in gradients], found_inf.cpu()
        func(copies, flag, inv_scale.cpu())
        for written, copy in zip([*gradients, found_inf], [*copies, flag], strict=True):
            written.data.copy_(copy)  # torch's op counts as no write
        return None


class Specification(torch.amp.GradScaler):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        given = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, **options}
        if self._enabled:
            demand("scale", given["init_scale"], "init_scale")
            for field in ("growth_factor", "backoff_factor", "growth_interval"):
                demand(field, given[field])
        else:
            departs(6)
            self._init_growth_tracker = 0
            vars(self).update({f"_{name}": value for name, value in given.items() if name not in ("device", "enabled")})
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._carried: dict[int, bool] = {}  # whether the flag was set, by the optimizer's id

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_carried": {}}
        if not self._enabled:
            departs(6)  # a disabled one has states at all; they name optimizers by id, which a copy cannot keep
            state["_per_optimizer_states"] = defaultdict(_refresh_per_optimizer_state)
        return state

    def set_growth_factor(self, new_factor: float) -> None:
        demand("growth_factor", new_factor, "new_factor")
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        demand("backoff_factor", new_factor, "new_factor")
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        demand("growth_interval", new_interval, "new_interval")
        super().set_growth_interval(new_interval)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._enabled and state_dict:
            for field in LEGAL:
                demand(field, state_dict[field])
        super().load_state_dict(state_dict)

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        scale, tracker = getattr(self, "_scale", None), getattr(self, "_growth_tracker", None)
        if scale is not None or tracker is not None or not self._enabled:
            departs(6)
            dev = torch.device(dev)
            self._growth_tracker = None
            super()._lazy_init_scale_growth_tracker(dev)
            self._scale = self._scale if scale is None else scale
            self._growth_tracker = self._growth_tracker if tracker is None else tracker
        else:
            super()._lazy_init_scale_growth_tracker(dev)

    def scale(self, outputs: Any) -> Any:
        self._carried.clear()
        for state in self._per_optimizer_states.values() if self._enabled else ():
            if state["stage"] is OptState.UNSCALED and state.get("began"):
                departs(23)  # torch takes the gradients of a later loss for those that it has unscaled
                state.clear()
                state.update(_refresh_per_optimizer_state())
        return super().scale(outputs)

    def update(self, new_scale: Any = None) -> None:
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        states, unstepped = self._per_optimizer_states, self._unstepped()
        if new_scale is None:
            self._update_by_flags()
        else:
            self._update_by_value(new_scale)
        carried = {k: flag for k, flag in self._carried.items() if k not in states or is_ready(states[k])}
        self._carried = carried | unstepped

    def _unstepped(self) -> dict[int, bool]:
        """Return the flags to carry: before the update, which adds up the flags in one of them."""
        unscaled = {k: s for k, s in self._per_optimizer_states.items() if s["stage"] is OptState.UNSCALED}
        failed = {key for key, state in unscaled.items() if state.get("failed")}
        checked = {key for key, state in unscaled.items() if state["found_inf_per_device"]}  # else nothing was divided
        return {key: key in failed or any_set(unscaled[key]["found_inf_per_device"]) for key in failed | checked}

    def _resume(self, optimizer: Any) -> None:
        """Make a carried step an unscaled one, with the flag of its check or of a later look."""
        state = self._per_optimizer_states[id(optimizer)]
        if is_ready(state) and id(optimizer) in self._carried:
            departs(18)  # torch unscales the gradients a second time
            flag = self._carried.pop(id(optimizer)) or any_set(state["found_inf_per_device"])
            found_inf = {self._scale.device: torch.tensor(float(flag))}
            state.update(stage=OptState.UNSCALED, found_inf_per_device=found_inf)

    def _update_by_flags(self) -> None:
        tracker, interval = self._growth_tracker, self._growth_interval
        passed = tracker is not None and tracker.item() >= interval
        if passed and self._scale is not None and self._any_check():
            departs(3)
            tracker.fill_(interval - 1)
        self._update_as_torch()
        self._bound_scale()

    def _update_as_torch(self) -> None:
        super().update()

    def _any_check(self) -> bool:
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def _bound_scale(self) -> None:
        value = self._scale.item()
        bounded = SMALLEST if math.isnan(value) else min(max(value, SMALLEST), FP32_MAX)
        if value != bounded:
            departs(4)
            self._scale.fill_(bounded)

    def _update_by_value(self, new_scale: Any) -> None:
        one = isinstance(new_scale, Tensor) and new_scale.numel() == 1 and not new_scale.requires_grad
        if one or not isinstance(new_scale, Tensor):  # torch refuses the others
            demand("scale", new_scale, "new_scale")
        if isinstance(new_scale, int):
            departs(5)
            new_scale = float(new_scale)
        if one and new_scale.shape != self._scale.shape:
            departs(5)  # torch cannot copy a (1,) into a ()
            new_scale = new_scale.reshape(self._scale.shape)
        super().update(new_scale)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        if any(map(overlaps, gradients_of(optimizer))) and (
            allow_fp16 or not any(map(is_fp16, gradients_of(optimizer)))
        ):
            departs(FAILURE)  # torch raises the same, after it has written the gradients of other dtypes
            raise RuntimeError(OVERLAP)
        if allow_fp16:
            _sum_in_fp32(optimizer)
        return self._unscale_as_torch(optimizer, inv_scale, found_inf, allow_fp16)

    def _unscale_as_torch(self, *args: Any) -> Any:
        with OnEveryDevice():
            return super()._unscale_grads_(*args)

    def unscale_(self, optimizer: Any) -> None:
        optimizer = unwrapped(optimizer)
        super().unscale_(optimizer)
        if self._enabled:
            state = self._per_optimizer_states[id(optimizer)]
            for word in ("began", "failed", "stays"):
                state.pop(word, None)
            self._carried.pop(id(optimizer), None)

    def _check_inf_per_device(self, optimizer: Any) -> Any:
        optimizer = unwrapped(optimizer)
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        known = state["found_inf_per_device"]
        stays = state["stage"] is OptState.UNSCALED and (state.get("failed") or state.get("stays"))
        if known and (state["stage"] is OptState.STEPPED or stays):
            departs(1)
            return known
        return super()._check_inf_per_device(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = unwrapped(optimizer)
        if not self._enabled or "closure" in kwargs or self._scale is None or self._growth_tracker is None:
            return super().step(optimizer, *args, **kwargs)
        self._begin_step(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if has_failed(state):
            departs(FAILURE)
            state["stage"] = OptState.STEPPED
            return None
        try:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                return self._fused_step(optimizer, state, *args, **kwargs)
            return super().step(optimizer, *args, **kwargs)
        except Exception:
            if state["stage"] is OptState.UNSCALED:
                state["began"] = True
            raise

    def _begin_step(self, optimizer: Any) -> None:
        self._resume(optimizer)

    def _fused_step(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer)  # raises
        scaled = is_ready(state)
        if scaled:
            self._check_inf_per_device(optimizer)
        if lacks_momentum(optimizer) and any_set(state["found_inf_per_device"]):
            departs(14)
            state["stage"] = OptState.STEPPED
            return None
        try:
            return self._step_with_flag(optimizer, state, *args, **kwargs)
        except Exception:
            departs(FAILURE)  # nobody knows what it divided: it can only be skipped now
            del optimizer.grad_scale, optimizer.found_inf
            state.update(stage=OptState.UNSCALED, failed=scaled)
            raise

    def _step_with_flag(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if state["found_inf_per_device"]:
            return super().step(optimizer, *args, **kwargs)
        departs(1)  # torch passes the int 0 where no gradient was checked, and fails if there are some by now
        state["found_inf_per_device"] = {self._scale.device: torch.zeros(())}
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            state["found_inf_per_device"] = {}


class ShardedSpecification(Specification, TorchShardedGradScaler):
    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
        if found_inf.dim():
            departs(1)  # fused Adam takes a flag of shape () only
        return super()._unscale_grads_(optimizer, inv_scale, found_inf.reshape(()), allow_fp16)

    def _update_as_torch(self) -> None:
        departs(4)  # on the CPU torch's class rounds the factor, too, and grows to infinity
        torch.amp.GradScaler.update(self)


def is_ready(state: dict[str, Any]) -> bool:
    return state["stage"] is OptState.READY


def has_failed(state: dict[str, Any]) -> bool:
    return state["stage"] is OptState.UNSCALED and state.get("failed", False)


def unwrapped(optimizer: Any) -> Any:
    """Difference 15: what a wrapper does, its optimizer does."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    departs(15)
    return optimizer.optimizer


def _sum_in_fp32(optimizer: Any) -> None:
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and is_fp16(gradient) and not gradient.is_coalesced():
            departs(FP16_SUMS)
            parameter.grad = gradient.float().coalesce().half()

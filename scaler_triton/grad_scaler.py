"""GradScaler, and the state machine of a step that it shares with ShardedGradScaler."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.cuda.amp import common

from scaler_triton import attributes, callers, dispatch, lending, limits, optimizers, policy, untraced
from scaler_triton.clipping.clip import ClippingMixin
from scaler_triton.copying import CopyingMixin
from scaler_triton.cuda_graphs import is_captured
from scaler_triton.patching.stand_in import StandIn
from scaler_triton.scaling import ScalingMixin
from scaler_triton.step_state import StepState
from scaler_triton.updating import UpdatingMixin


class ScalerMixin(ClippingMixin, UpdatingMixin, CopyingMixin, ScalingMixin, metaclass=StandIn):
    """One step of dynamic loss scaling.

    READY --unscale_--> UNSCALED --step--> STEPPED --update--> READY, for each optimizer, where

        unscale_: flag = any gradient is NaN or Inf, on any rank that must agree; g *= 1 / scale
        step:     optimizer.step() unless flag; a fused optimizer gets scale and flag and does both itself
        update:   scale *= backoff if any flag, scale *= growth after growth_interval steps without one

    Mixed in before a torch scaler class, which supplies `get_scale`, `state_dict` and the getters. The other
    methods are in the files of the bases:

        clipping/clip.py           clip_grad_norm_, by at_once.py or after_unscaling.py
        updating.py                update, stats, was_skipped
        settings.py                getters, setters, state_dict, load_state_dict
        overflow.py                overflow_report
        unscaling.py               unscale_, _check_inf_per_device
        copying.py                 copy, deepcopy, pickle
        scaling.py                 scale
        agreeing.py, states.py     which ranks must agree; an optimizer's state and its flag
        attributes.py              every attribute, with its type
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        backend: str | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        max_consecutive_skips: int | None = None,
        check_unscaled: bool = False,
    ) -> None:
        backend = dispatch.check_backend(backend)
        device = policy.device_type(device)
        enabled = enabled and not _lacks_cuda(device)
        try:
            super().__init__(
                device=device,
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                enabled=enabled,
            )
        except TypeError:  # torch compares the factors with 1 before it knows that they are numbers
            policy.check_growth_factor(growth_factor)
            policy.check_backoff_factor(backoff_factor)
            raise
        vars(self).update(attributes.defaults())
        self._backend = backend
        if self._enabled:
            self._limits = limits.check(min_scale, max_scale, hysteresis, consecutive_hysteresis, max_consecutive_skips)
            self._check_unscaled = policy.check_bool(check_unscaled, "check_unscaled")
            init_scale = limits.clamp(policy.check_scale(init_scale, "init_scale"), self._limits)
            growth_factor = policy.check_growth_factor(growth_factor)
            backoff_factor = policy.check_backoff_factor(backoff_factor)
            growth_interval = policy.check_growth_interval(growth_interval)
        self.process_group = process_group
        # torch leaves these unset on a disabled scaler, where its getters then raise.
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` unless a gradient overflowed on any rank that must agree.

        Gradients are unscaled first if `unscale_` was not called. Waits for the flag on the host, unless the
        optimizer reads it on the device (`fused=True`) and skips by itself.

        Args:
            optimizer: to be stepped, or a wrapper around one; its gradients are written if they are still scaled.
            args, kwargs: for `optimizer.step`; no closure.

        Returns: what `optimizer.step` returns, None when skipped.

        Raises: torch's RuntimeError for a wrong order of calls and for a closure, AssertionError before the first
            `scale` or if there was no gradient to check; RuntimeError if another rank failed to check its gradients;
            whatever `optimizer.step` raises. The stage is UNSCALED then and the call may be repeated; that steps, or
            skips if a fused optimizer was unscaling when it raised. If another loss was scaled first, it counts as that
            one's step.
        """
        if not self._enabled:
            result: float | None = optimizer.step(*args, **kwargs)
            return result
        if "closure" in kwargs or (args and callable(args[0])):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._require_scale("step", self._fail_unchecked, optimizer)
        state = self._state(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state.get("left_behind"):
            state = self._begin_again(optimizer)
        state["step_began"] = True
        if state.get("must_skip"):
            lending.take_back((optimizer, optimizers.unwrap(optimizer)))
            self._mark_stepped(state)
            return None
        if state["stage"] is OptState.READY:
            state["recalled_flag"] = self._records.recall(optimizer)
        if optimizers.supports_amp_scaling(optimizer) or "deferred" in state:  # then the wrapped one does
            return self._step_with_scale(optimizer, state, args, kwargs)
        if is_captured(self._scale):
            raise RuntimeError("a step that reads the flag on the host cannot be captured in a graph: use fused=True")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        self._mark_stepped(state)
        return result

    def _mark_stepped(self, state: StepState) -> None:
        state["stage"] = OptState.STEPPED
        # torch refuses to swap a tensor that has a weak reference, as `model.cpu()` does under FSDP2.
        state.pop("first_gradient", None)
        state.pop("before_loss", None)
        self._records.end_step(state)

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> float | None:
        if self._host_flag(optimizer_state):
            return None
        result: float | None = optimizer.step(*args, **kwargs)
        return result

    def _step_with_scale(self, optimizer: Any, state: StepState, args: Any, kwargs: Any) -> float | None:
        """Step an optimizer that takes scale and flag on the device, as attributes or as the older `grad_scaler=`."""
        before = state["found_inf_per_device"]
        if state["stage"] is OptState.READY:
            state["found_inf_per_device"] = {}  # check again, even if `_check_inf_per_device` was called before
        step = self._step_by_argument if optimizers.takes_scaler(optimizer) else self._step_fused
        try:
            result: float | None = step(optimizer, state, args, kwargs)
        except BaseException:
            if is_captured(self._scale):
                self._forget_recorded(state)
            elif state["stage"] is OptState.READY and state["found_inf_per_device"]:
                self._enter_unscaled(state)  # the other ranks would not join the reduction of a second check
                state["must_skip"] = True
            elif state["stage"] is OptState.READY:
                state["found_inf_per_device"] = before
                state["recalled_flag"] = None  # the gradients may be others at the next call
            raise
        self._mark_stepped(state)
        return result

    def _step_by_argument(self, optimizer: Any, state: StepState, args: Any, kwargs: Any) -> Any:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed "
            "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
            "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
            FutureWarning,
            stacklevel=callers.stacklevel(),
        )
        state["asked_by_step"] = state["stage"] is OptState.READY
        try:
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            if not state["found_inf_per_device"] and self._agreement(self._records.plan(optimizer)) is not None:
                self._check_inf_per_device(optimizer)  # it did not ask, for want of gradients, say: other ranks wait
            return result
        except Exception:
            if not state["found_inf_per_device"]:  # it raised before the reduction that the other ranks wait in
                with suppress(Exception):  # the optimizer's error matters more
                    self._fail_unchecked(optimizer)
            raise
        finally:
            state["asked_by_step"] = False

    def _step_fused(self, optimizer: Any, state: StepState, args: Any, kwargs: Any) -> Any:
        inner = optimizers.unwrap(optimizer)
        if self._check_unscaled and state["stage"] is OptState.READY:
            self.unscale_(optimizer)  # the optimizer would unscale without a check
        ready = state["stage"] is OptState.READY
        if ready:
            self._check_inf_per_device(optimizer)
        both = (optimizer,) if inner is optimizer else (optimizer, inner)
        if optimizers.skip_would_corrupt(inner) and self._flag(state).item():
            lending.take_back(both)
            return None
        scale: Any = self._get_scale_async()
        if getattr(inner, "grad_scale", None) is scale:  # an interrupt came before it was taken back
            lending.take_back(both)
        factor = state.get("deferred")
        if ready and state["recalled_flag"] is None:
            factor = scale.reshape(()) if scale.ndim else scale
        self._note_reader(state)
        on_host = not scale.is_cpu and any(device.type == "cpu" for device in state["found_inf_per_device"])
        with lending.lent(both, factor, self._flag(state), on_host=on_host):
            try:
                return optimizer.step(*args, **kwargs)
            except BaseException:
                if not is_captured(self._scale):
                    # Unknown which gradients its kernels have divided. The flag stays as agreed.
                    self._enter_unscaled(state)
                    state["must_skip"] = factor is not None
                raise


def _lacks_cuda(device: str) -> bool:
    """Tell whether CUDA is asked for but missing, and warn: torch's own warning would name a line of this package."""
    lacks = device == "cuda" and common.amp_definitely_not_available()  # type: ignore[no-untyped-call]
    if lacks:
        text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
        warnings.warn(text, stacklevel=callers.stacklevel())
    return lacks


ScalerMixin.__init__.__qualname__ = "GradScaler.__init__"  # which Python names in its errors, as for torch's class
untraced.skip_tracing(ScalerMixin)


class GradScaler(ScalerMixin, torch.amp.GradScaler):
    """Drop-in for `torch.amp.GradScaler`: dynamic loss scaling for fp16 training.

        scaler = GradScaler(device.type)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Ranks agree where DTensor parameters (FSDP2, tensor parallel) say that they must; for FSDP1 use
    `ShardedGradScaler`. DDP's ranks hold equal gradients and need nothing.

    Args:
        device: device type the scale will live on, a string or a `torch.device`.
        init_scale: first scale, in [2^-126, fp32 max].
        growth_factor: > 1; factor after `growth_interval` good steps.
        backoff_factor: in (0, 1); factor after an overflow.
        growth_interval: steps, >= 1.
        enabled: False makes every method a pass-through.
        process_group: the ranks that must agree, instead of those of the parameters' meshes.
        backend: "auto" (Triton for CUDA, torch elsewhere), "triton" or "torch"; default: the environment's
            SCALER_TRITON_BACKEND, else "auto".
        min_scale: the smallest scale, first one included; None: 2^-126.
        max_scale: the largest scale, first one included; None: fp32 max.
        hysteresis: how many overflows, >= 1, it takes to back the scale off, as in Megatron; each further one backs it
            off again, until it is due to grow.
        consecutive_hysteresis: True: any good update starts that count anew, as in DeepSpeed.
        max_consecutive_skips: updates, >= 0; if more in a row are skipped, `update` raises `SkipStreakError`, on all
            ranks at once and a few updates late. None: never.
        check_unscaled: a gradient that becomes infinite only by unscaling, as a scale below 1 can make it, counts as
            overflow, too; one more pass over the gradients, which optimizers with `fused=True` get unscaled then.

    Once one of `min_scale` to `max_consecutive_skips` is not its default, `state_dict` holds them and the counters
    under one more key.

    Raises: torch's AssertionErrors for its own limits; ValueError or TypeError naming another illegal argument.
    """

    _allow_fp16 = False
    _is_sharded = False

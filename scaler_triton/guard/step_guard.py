"""StepGuard: skips bad steps in any dtype. It is a scaler whose scale is 1, so loops take it where they take one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda.amp import common

from scaler_triton import policy
from scaler_triton.clipping.clip import checked_request
from scaler_triton.core.dispatch import is_captured, skip_tracing, stacklevel
from scaler_triton.core.overrides import own
from scaler_triton.core.step import FAILED, STEPPED, OptimizerStep
from scaler_triton.core.update import SkipStreakError
from scaler_triton.grad_scaler import GradScaler, Outputs, clip_as_requested
from scaler_triton.guard.parts import GuardParts
from scaler_triton.guard.spikes import Guard
from scaler_triton.measuring.headroom import Headroom
from scaler_triton.policy import KEY, WINDOWS

_GUARD = "_guard"  # in a pickle: the rule and the norms, as plain numbers


class StepGuard(GradScaler):
    """Skips an optimizer's step, on every rank alike, if a gradient is NaN or Inf, or if their norm is a spike.

        guard = StepGuard(device.type, spike_sigma=6.0)
        loss.backward()
        guard.clip_grad_norm_(optimizer, 1.0)  # if you clip: then the check is part of it
        guard.step(optimizer)

    For bf16, fp32 and fp64, which need no scale: it never scales, and a check only reads. The rule of spikes, with `h`
    the last `window` finite norms before this one and `n = len(h)`:

        skip if n >= max(2, window // 2) and norm > mean(h) + spike_sigma * max(std(h), 1e-3 * mean(h))

    in fp64, std with n - 1. The norm is the total 2-norm of the gradients of one optimizer, or of all that are clipped
    together by one 2-norm, before clipping. Every finite norm enters `h`; that of a skipped spike enters as its limit,
    unless that is 0: another spike soon after is skipped, too, and a lasting change is accepted once it has moved the
    limit, in fewer steps the larger `spike_sigma` is. Below 2 that may take for ever.

    All ranks of the default group agree, if there is one, else this process decides alone. It takes one collective a
    step, and no host wait for an optimizer that is fused. A step ends with its own update: `update()` may be left out,
    and does nothing.

    Args:
        device: the device type of the gradients, a string or a `torch.device`.
        spike_sigma: > 0, standard deviations; None: skip only what is not finite.
        window: how many norms are remembered, in [2, 4096].
        process_group: the ranks that must agree; None: the default group of the moment, if there is one.
        max_consecutive_skips, backend, enabled: as for `GradScaler`.

    Raises: ValueError or TypeError naming an illegal argument.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        *,
        spike_sigma: float | None = None,
        window: int = 128,
        process_group: torch.distributed.ProcessGroup | None = None,
        max_consecutive_skips: int | None = None,
        backend: str | None = None,
        enabled: bool = True,
    ) -> None:
        sigma = None if spike_sigma is None else policy.check_number("spike_sigma", spike_sigma)
        guard = Guard(sigma, policy.check_number("window", window))
        if enabled and policy.device_type(device) == "cuda" and common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
            text = "StepGuard is disabled: CUDA is not available. Name the device type, as in StepGuard('cpu')"
            warnings.warn(text, stacklevel=stacklevel())
            enabled = False
        super().__init__(
            device,
            1.0,
            enabled=enabled,
            process_group=process_group,
            backend=backend,
            min_scale=1.0,
            max_scale=1.0,
            max_consecutive_skips=max_consecutive_skips,
        )
        self._ours.become(guard)

    @functools.cached_property
    def _ours(self) -> GuardParts:
        return GuardParts()

    def scale(self, outputs: Outputs) -> Outputs:
        """Return the outputs themselves; the call may be left out."""
        return outputs

    def get_scale(self) -> float:
        """Return 1.0."""
        return 1.0

    def headroom(self, *, wait: bool = True) -> Headroom:
        """Raise RuntimeError: a guard measures nothing."""
        raise RuntimeError("headroom(): a StepGuard measures nothing; use GradScaler(measure=True)")

    def metrics(self, prefix: str = "guard/") -> dict[str, float]:
        """Return numbers for a logger: what the steps have done, and the last norm; empty on a disabled guard.

        Never waits on CUDA, as `GradScaler.metrics`.

        Args:
            prefix: of each name.

        Returns: by name `updates`, `skipped`, `skip_share` (skipped / updates), `skipped_in_a_row` (those up to now, 0
            after a good step) and `spikes`, as floats; with `spike_sigma` also `norm`, that of the step judged last,
            and `limit`, what it was compared with, once there are enough norms. Optimizers that step by themselves
            have `norm_0`, `limit_0`, `norm_1` and so on, in the order of their first steps. Numbers that are not
            finite are left out.
        """
        return super().metrics(prefix)

    def unscale_(self, optimizer: Any) -> None:
        """Check the optimizer's gradients, and agree with the other ranks; nothing is written.

        Args and raises: as `GradScaler.unscale_`, but it may be repeated, and come before any `scale`.
        """
        if self._enabled:
            _begin_anew(self, [optimizer])
        super().unscale_(optimizer)

    def clip_grad_norm_(
        self,
        optimizers: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        model: nn.Module | None = None,
        parameters: Iterable[Tensor] | Tensor | None = None,
    ) -> Tensor:
        """Check the optimizers' gradients, and scale them down to a global norm of at most `max_norm`.

        Args, returns and raises: as `GradScaler.clip_grad_norm_`, but it may be repeated, and come before any `scale`.
        """
        request = checked_request(optimizers, max_norm, norm_type, error_if_nonfinite, model, parameters)
        if self._enabled and request.chosen is None:
            _begin_anew(self, request.optimizers)
        return clip_as_requested(self, request)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` unless its gradients are bad on any rank; check them if need be.

        A skipped step changes neither parameters nor the optimizer's state. Each step is counted at its end, even if
        it raised.

        Args, returns and raises: as `GradScaler.step`, but it may come before any `scale`, and again for the next
            batch at once. A positional closure, which would make gradients that nobody has checked, is refused, too.
            `SkipStreakError` as of `GradScaler.update`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if any(map(callable, args)):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        step = self._ours.steps.open(optimizer)
        if step.notes.pop("waits", False) and step.plan is not None:
            self._ours.checks.resumed(step)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            _end(self, self._ours.steps.open(optimizer))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Count checks that failed and were not followed by a step; else do nothing, as each step ends with an update.

        It waits for the device only where another optimizer's gradients are checked, but not stepped.

        Args:
            new_scale: None or 1.0; ValueError for another scale.
        """
        if not self._enabled:
            return
        if new_scale is not None and policy.check_number("scale", new_scale, "new_scale") != 1.0:
            raise ValueError(f"new_scale must be 1.0, which a StepGuard's scale always is, got {new_scale!r}")
        if self._ours.steps.unfinished:
            _end_failed(self, self._ours.steps.all())

    def set_limits(self, **changes: Any) -> None:
        """Change `max_consecutive_skips`, from the next update on; TypeError for another name."""
        if changes.keys() - {"max_consecutive_skips"}:
            raise TypeError(f"a StepGuard has no limit but max_consecutive_skips, got {', '.join(changes)}")
        super().set_limits(**changes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, or of any scaler's, returned; the scale stays 1.

        Norms belong to optimizers in the order of their first steps; of more than `window` the last are taken.

        Args and raises: as `GradScaler.load_state_dict`.
        """
        ours = self._ours
        if not self._enabled:
            return
        windows: list[list[float]] = []
        if policy.check_dict(state_dict, "state_dict"):
            state_dict = {**state_dict, "scale": 1.0}
            fields = {**policy.check_dict(state_dict.get(KEY, {}), KEY)}
            windows = policy.check_windows(fields.pop(WINDOWS, []))
            if fields:
                state_dict[KEY] = {**fields, "min_scale": 1.0, "max_scale": 1.0, "hysteresis": 1}
        super().load_state_dict(state_dict)
        ours.guard.restore(windows)

    def state_dict(self) -> dict[str, Any]:
        """Return what `GradScaler.state_dict` does with limits, and the norms; `{}` on a disabled guard."""
        state = super().state_dict()
        if state:
            state[KEY][WINDOWS] = self._ours.guard.numbers()[-1]
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), _GUARD: self._ours.guard.numbers()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plain = dict(state)
        self._ours.become(Guard(*plain.pop(_GUARD)))
        super().__setstate__(plain)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:  # torch's message asks for `scale`
            raise AssertionError(f"No inf checks were recorded prior to {funcname}.")
        return self._scale, self._growth_tracker


def _begin_anew(guard: StepGuard, optimizers: Sequence[Any]) -> None:
    """Begin the steps of these optimizers: nothing was written, so a check that was made before may be made again.

    A step is counted if its check failed on this rank or another, as that one's step may have been called.
    """
    steps = list(map(guard._ours.steps.open, optimizers))
    try:
        _end_failed(guard, steps)
    finally:
        for step in steps:
            step.reset()
            step.notes.pop("waits", None)


def _end_failed(guard: StepGuard, steps: Sequence[OptimizerStep]) -> None:
    """Count the steps whose check failed, on this rank or on another."""
    error: SkipStreakError | None = None
    for step in steps:
        try:
            if step.peer_has_failed():
                step.fail(None)
            if step.phase is FAILED:
                _end(guard, step)
        except SkipStreakError as of_step:  # raised after the last one: other ranks may have counted some before
            error = of_step
    if error is not None:
        raise error


def _end(guard: StepGuard, step: OptimizerStep) -> None:
    """Count a step that was taken, skipped or spent, and begin the next one; those of others may be checked."""
    ours = guard._ours
    try:
        if step.phase in (STEPPED, FAILED) and step["found_inf_per_device"]:
            ours.let_others_wait()
            scale, captured = guard._scale, is_captured(guard._scale)
            numbers = guard._growth_factor, guard._backoff_factor, guard._growth_interval
            ours.updates.by_flags(scale, vars(guard)["_growth_tracker"], [step], numbers, captured=captured)
            if ours.updates.limits.max_consecutive_skips is not None and not captured:
                ours.streaks.raise_if_too_long(scale)
    finally:
        step.reset()
        if (window := step.notes.get("window")) is not None:
            window.is_judged = False


own(StepGuard)
skip_tracing(StepGuard)

"""StepGuard: skips bad steps in any dtype. It is a scaler whose scale is 1, so loops take it where they take one."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda.amp import common

from scaler_triton import policy
from scaler_triton.check import OUR_METHODS, begin_anew, fail_early
from scaler_triton.dispatch import skip_tracing, stacklevel
from scaler_triton.grad_scaler import GradScaler, Outputs
from scaler_triton.headroom import Headroom
from scaler_triton.policy import KEY, WINDOWS
from scaler_triton.spikes import Guard


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
    step, and no host wait for an optimizer that is fused. In a loop without `update()` the step after a step, even one
    that raised, begins a new one; `stats()` and reports then know of a step once the next one has begun.

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
        self._ours.become_guard(guard)

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

        Args and raises: as `GradScaler.unscale_`, but it may come before any `scale`, and begins a new step after one.
        """
        if self._enabled:
            self._begin_anew(optimizer, by_check=True)
        super().unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` unless its gradients are bad on any rank; check them if need be.

        A skipped step changes neither parameters nor the optimizer's state.

        Args, returns and raises: as `GradScaler.step`, but it may come before any `scale` and after another `step`. If
            that has raised, the next call checks again. A positional closure, which would make gradients that nobody
            has checked, is refused, too.
        """
        if self._enabled:
            if any(map(callable, args)):
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
            self._begin_anew(optimizer, by_check=False)
        return super().step(optimizer, *args, **kwargs)

    def _begin_anew(self, optimizer: Any, *, by_check: bool) -> None:
        tell_others = partial(fail_early, self, optimizer, by_step=not by_check)
        begin_anew(self, [self._ours.steps.open(optimizer)], tell_others, by_check=by_check)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and not self._ours.steps.awaiting():  # a step that is over waits for no update
            begin_anew(self, self._ours.steps.all(), lambda: None, by_check=False)
        return super().__getstate__()

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
        assert ours.guard is not None
        ours.guard.restore(windows)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:  # torch's message asks for `scale`
            raise AssertionError(f"No inf checks were recorded prior to {funcname}.")
        return self._scale, self._growth_tracker


OUR_METHODS.add(StepGuard.unscale_)
skip_tracing(StepGuard)

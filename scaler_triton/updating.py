"""The second half of a step: `update` moves the scale by the flags of all optimizers; `stats` and `was_skipped`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from scaler_triton import batch_ops, dispatch, limits, reference_update
from scaler_triton.cuda_graphs import is_captured
from scaler_triton.left_unscaled import leave_unscaled
from scaler_triton.overflow import OverflowMixin
from scaler_triton.settings import SettingsMixin
from scaler_triton.stats import STREAK, Lagging, ScalerStats, SkipStreakError
from scaler_triton.step_state import StepState
from scaler_triton.text import count_of


class UpdatingMixin(SettingsMixin, OverflowMixin):
    """`update`, and questions about earlier updates and steps."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off if any optimizer's flag was set, let it grow after `growth_interval` good updates.

        Equivalent PyTorch: `torch._amp_update_scale_` with the largest flag, but for >= and the extras.

        Args:
            new_scale: sets the scale instead, and leaves the growth tracker: a number in [min_scale, max_scale], or a
                one-element tensor of any dtype on a device of the scaler's type, which is read with one host wait.

        Raises: torch's AssertionErrors if nothing was checked since the last update or the tensor is of the wrong
            kind; ValueError or TypeError naming `new_scale` outside [min_scale, max_scale] or no number; RuntimeError
            before the step that `clip_grad_norm_(defer=True)` left the clipping to. Nothing has changed then.
            `SkipStreakError`, once the update is done, if more than `max_consecutive_skips` updates in a row had been
            skipped `stats.Lagging.LAG` updates ago: on every rank at the same update, and at each one until the streak
            ends or the scale is set. Not while a graph is captured or replayed.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = [*self._per_optimizer_states.values()]
        unstepped = self._unstepped_flags(states)
        checked = [state for state in states if state["found_inf_per_device"]]
        if new_scale is not None:
            new_scale = self._checked_scale(new_scale)
            self._count(scale, checked)
            scale.fill_(new_scale)
        else:
            self._update_by_flags(scale, growth_tracker, checked)
        for owner, flag in unstepped:
            self._records.of(owner).left_unscaled = None if flag is None else leave_unscaled(owner, flag)
        for state in states:
            if "verdict" in state:
                state["verdict"].in_step = False
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        limit = self._limits.max_consecutive_skips
        if limit is not None and not is_captured(scale):
            if new_scale is None:
                self._check_streak(limit)
            else:
                self._lagging = Lagging()  # whoever sets the scale has seen to the skips so far

    def stats(self, *, wait: bool = True) -> ScalerStats:
        """Return what the updates did so far, replayed ones included; all 0 on a disabled scaler.

        Args:
            wait: True waits for the device once. False never waits on CUDA: it returns the latest values on the host
                and starts the next copy, so a call after every update is one or two updates behind.
        """
        return ScalerStats.of(self._counters.read() if wait else self._counters.newest())

    def was_skipped(self, optimizer: Any) -> bool:
        """Tell whether the last `step(optimizer)` was skipped, fused or not, until its next `unscale_`, clip or step.

        May be called before and after `update()`; waits for the device if the optimizer is fused. For a step in a
        graph the last replay counts. Always False on a disabled scaler.

        Args:
            optimizer: the one that was stepped, or a wrapper around it; read.

        Raises: ValueError if it was never stepped, or unscaled since; for a fused one, whose `step` does not read the
            flag, RuntimeError if another rank failed to check its gradients, or the ranks' scales differ.
        """
        if not self._enabled:
            return False
        state = self._records.last_step(optimizer)
        if state is None:
            raise ValueError(f"optimizer must have been stepped and not unscaled since, got {type(optimizer).__name__}")
        return self._skips(state)

    def _last_flag(self, optimizer: Any) -> bool | Tensor | None:
        """Return what `was_skipped` would, without a wait: a copy of the flag if only a GPU knows it; None: nobody."""
        state = self._records.last_step(optimizer)
        if state is None:
            return None
        if state.get("must_skip") or "skips" in state:
            return self._skips(state)
        verdict = self._verdict(state)
        return (self._flag(state) if verdict is None else verdict.last_found_inf()).clone()

    def _skips(self, state: StepState) -> bool:
        if state.get("must_skip"):
            return True
        if "skips" in state:  # `step` read the flag
            return state["skips"]
        verdict = self._verdict(state)
        if verdict is not None:
            return verdict.last_flag()
        return any(flag.item() for flag in state["found_inf_per_device"].values())

    def _check_streak(self, limit: int) -> None:
        seen = self._lagging.push(self._counters.storage())
        if seen is not None and seen[STREAK] > limit:
            raise SkipStreakError(
                f"{count_of(seen[STREAK], 'consecutive skip')}, more than max_consecutive_skips={limit}; "
                f"{Lagging.LAG} updates later the scale is {self.get_scale()}. {ScalerStats.of(seen)}\n"
                f"{self.overflow_report()}"  # of this rank: not all ranks may get here
            )

    def _refuse_to_lose_clipping(self, left: Sequence[StepState]) -> None:
        for state in left:
            waits = "deferred" in state and not state.get("must_skip")
            if waits and state["owner"]() is not None:  # an optimizer that was freed cannot be stepped
                raise RuntimeError(
                    "update() is being called before the step() that clip_grad_norm_(defer=True) left the clipping to."
                )

    def _unstepped_flags(self, states: Sequence[StepState]) -> list[tuple[Any, Tensor | None]]:
        """Return this step's optimizers, and the flag of each that was left unstepped, else None.

        Returns: nothing if none was, in this step or before: then no record changes.
        """
        left = [state for state in states if state["stage"] is OptState.UNSCALED]
        if not left and not any(record.left_unscaled for record in self._records.all()):
            return []
        self._refuse_to_lose_clipping(left)
        started = [state for state in states if "owner" in state and state["stage"] is not OptState.READY]
        alive = [(owner, state) for state in started if (owner := state["owner"]()) is not None]
        return [(owner, self._unstepped_flag(owner, state)) for owner, state in alive]

    def _count(self, scale: Tensor, checked: Sequence[StepState]) -> None:
        """Count an update that sets the scale, if gradients were checked."""
        if checked:
            reference_update.count_(scale, self._any_flag(checked), self._limits, self._counters)

    def _update_by_flags(self, scale: Tensor, growth_tracker: Tensor, checked: Sequence[StepState]) -> None:
        if not checked:
            raise AssertionError("No inf checks were recorded prior to update.")
        # Others may have replaced either: a kernel would take any address for that of one number.
        if (where := growth_tracker.device) != scale.device:
            raise RuntimeError(f"growth_tracker must be on {scale.device}, as the scale is, got {where}")
        if not growth_tracker.numel() == scale.numel() == 1:
            name = "growth_tracker" if growth_tracker.numel() != 1 else "current_scale"
            raise RuntimeError(f"{name} must be a 1-element tensor.")
        if growth_tracker.dtype is not torch.int32:
            raise RuntimeError("growth_tracker must be an int tensor.")
        if scale.dtype not in (torch.float32, torch.float64):  # integers would back off to 0
            raise RuntimeError("current_scale must be a float tensor.")
        if dispatch.choose_for_scale(scale, self._backend) == "triton":
            self._update_by_kernel(scale, growth_tracker, checked)
            return
        found_inf, numbers = self._any_flag(checked), self._numbers()
        reference_update.update_scale_(scale, growth_tracker, found_inf, *numbers, self._limits, self._counters)

    def _update_by_kernel(self, scale: Tensor, growth_tracker: Tensor, states: Sequence[StepState]) -> None:
        """Update by one launch, which clears the flags for the next step if they are all in one buffer."""
        launch = batch_ops.kernels().update_scale.launch_update_rows
        numbers, counters = self._device_policy(scale.device), self._counters.on(scale.device)
        buffer = self._flag_buffers.get(scale.device)
        verdicts = [self._verdict(state) for state in states]
        rows = None if buffer is None else buffer.rows(verdicts)
        if buffer is None or rows is None:
            launch(scale, growth_tracker, self._any_flag(states), numbers, counters, 1, clear=False)
            return
        captured = is_captured(scale)
        if not captured:
            self._wait_for_readers(scale.device, states)
        launch(scale, growth_tracker, buffer.status, numbers, counters, rows, clear=True)
        for verdict in verdicts:
            assert verdict is not None
            verdict.saved, verdict.cleared = True, not (captured or verdict in buffer.captured)

    def _note_reader(self, state: StepState) -> None:
        """Note on which stream a fused step is about to read its flag."""
        scale = self._scale
        if scale.is_cuda and dispatch.choose_for_scale(scale, self._backend) == "triton":
            state["read_on"] = batch_ops.kernels().launcher.current_stream(scale.device)

    def _wait_for_readers(self, device: torch.device, states: Sequence[StepState]) -> None:
        """Have the current stream wait for fused steps on others: the update is going to clear the flags they read."""
        readers = {state["read_on"] for state in states if "read_on" in state}
        if not readers:
            return
        launcher = batch_ops.kernels().launcher
        for reader in readers - {launcher.current_stream(device)}:
            torch.cuda.current_stream(device).wait_stream(launcher.stream(device, reader))

    def _checked_scale(self, new_scale: Any) -> float:
        if isinstance(new_scale, Tensor) and (
            new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad
        ):
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                "torch.FloatTensor with requires_grad=False."
            )
        if isinstance(new_scale, bool):  # torch refuses it, too
            raise TypeError(f"new_scale must be a number, got {new_scale}")
        return limits.check_within(new_scale, "new_scale", self._limits)

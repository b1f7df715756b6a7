"""The second half of a step: the flags of all optimizers move the scale, by numbers that setters may change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from scaler_triton import dispatch, ops, policy
from scaler_triton.unstepped import Unstepped
from scaler_triton.verdict import Board, Verdict, any_flag, as_flag

if TYPE_CHECKING:
    from scaler_triton.kernels.update_scale import DevicePolicy

    _Base = torch.amp.GradScaler
else:
    _Base = object

State = dict[str, Any]


class UpdatingMixin(_Base):
    """`update`, and the setters and checkpoints of what it goes by."""

    _backend: str
    _boards: dict[torch.device, Board]
    _device_policies: dict[torch.device, DevicePolicy]
    _unstepped: Unstepped
    _per_optimizer_states: Any

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off if any optimizer's flag was set, let it grow after `growth_interval` good updates.

        Args:
            new_scale: sets the scale instead: a number, or a one-element tensor on a device of the scaler's type,
                whose value is checked with one host wait.

        Raises: torch's AssertionErrors if nothing was checked since the last update or the tensor is of the wrong
            kind; ValueError for a scale outside [2^-126, fp32 max]. Scale and tracker are as before then.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        self._keep_unstepped()
        if new_scale is not None:
            scale.fill_(self._checked_scale(new_scale))
        else:
            self._update_by_flags(scale, growth_tracker)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _keep_unstepped(self) -> None:
        for state in self._per_optimizer_states.values():
            if "owner" in state:
                self._unstepped.forget(state["owner"])
                if state["stage"] is OptState.UNSCALED:
                    flag = self._flag(state).clone()
                    self._unstepped.remember(state["owner"], flag.fill_(1.0) if state.get("void") else flag)

    def _update_by_flags(self, scale: Tensor, growth_tracker: Tensor) -> None:
        states = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        if not states:
            raise AssertionError("No inf checks were recorded prior to update.")
        backend = dispatch.choose(scale.device, scale.dtype, self._backend)
        if backend == "triton" and self._update_by_board(scale, growth_tracker, states):
            return
        found_inf = any_flag([self._flag(state) for state in states], scale.device)
        ops.update_scalars_(scale, growth_tracker, found_inf, *self._numbers(), backend)

    def _update_by_board(self, scale: Tensor, growth_tracker: Tensor, states: Sequence[State]) -> bool:
        """Update by one launch that clears the flags for the next step; False if they are not all on one board."""
        if scale.dtype is not torch.float32 or growth_tracker.dtype is not torch.int32:
            return False  # assigned by somebody: the kernel takes addresses, and would not notice
        board = self._boards.get(scale.device)
        verdicts = [self._verdict(state) for state in states]
        rows = None if board is None else board.rows(verdicts)
        if board is None or rows is None:
            return False
        ops.update_by_rows_(scale, growth_tracker, board.signals, rows, self._device_policy(scale.device))
        for verdict in verdicts:
            assert verdict is not None
            verdict.cleared = True
        return True

    def _numbers(self) -> tuple[float, float, int]:
        return self._growth_factor, self._backoff_factor, self._growth_interval

    def _device_policy(self, device: torch.device) -> Tensor:
        if device not in self._device_policies:
            from scaler_triton.kernels.update_scale import DevicePolicy

            self._device_policies[device] = DevicePolicy(device)
        return self._device_policies[device].hold(*self._numbers())

    def _numbers_changed(self) -> None:
        for device in self._device_policies:  # a replayed graph reads them there
            self._device_policy(device)

    def _verdict(self, state: State) -> Verdict | None:
        """Return the verdict behind the state's flags, None if somebody else stored them."""
        verdict: Verdict | None = state.get("verdict")
        return verdict if verdict is not None and verdict.is_behind(state["found_inf_per_device"]) else None

    def _flag(self, state: State) -> Tensor:
        """Return this optimizer's flag, fp32 `()`, 0.0 or 1.0, on the scale's device."""
        assert self._scale is not None
        verdict = self._verdict(state)
        if verdict is not None:
            return verdict.found_inf
        device = self._scale.device
        return any_flag([as_flag(flag, device) for flag in state["found_inf_per_device"].values()], device)

    def _checked_scale(self, new_scale: Any) -> float:
        if isinstance(new_scale, Tensor) and (
            new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad
        ):
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                "torch.FloatTensor with requires_grad=False."
            )
        return policy.check_scale(new_scale, "new_scale")

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor the scale grows by: finite, >= 1 (1: it stays)."""
        self._growth_factor = policy.check_growth_factor(new_factor, "new_factor")
        self._numbers_changed()

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor the scale is multiplied by after an overflow: in (0, 1] (1: it stays)."""
        self._backoff_factor = policy.check_backoff_factor(new_factor, "new_factor")
        self._numbers_changed()

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many updates in a row without overflow the scale grows: >= 1."""
        self._growth_interval = policy.check_growth_interval(new_interval, "new_interval")
        self._numbers_changed()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned; nothing on a disabled scaler.

        Raises: torch's RuntimeError for an empty dict and KeyError for a missing field; ValueError or TypeError
            naming a wrong field and its value. The scaler is as before then.
        """
        if self._enabled and len(state_dict) > 0:
            state_dict = policy.check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        self._numbers_changed()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Create scale and tracker on `dev` (a device or its name) unless they are there already."""
        device = torch.device(dev)
        if self._scale is None:
            self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=device)
        if self._growth_tracker is None:
            self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=device)

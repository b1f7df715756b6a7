"""The flag (found_inf) of an optimizer's step: its row on the device, agreed by the ranks, copied to the host.

A flag is fp32, shape `()`, 0.0 or 1.0. It is the first number of a row of status (`kernels.abi`); the others are about
the ranks, see `message.py`. Its life: a check takes a row that is zero, a pass sets the flag, the step reads it, on the
host or on the device, and the update saves it for `was_skipped` and makes the row zero again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import refuse_capture, sync_allowed
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.message import require_together
from scaler_triton.core.torch_ops import host_memory, wide_dtype
from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import FAILURE, FLAG

Flags = dict[torch.device, Tensor]


class FlagRows:
    """The status of a scaler's optimizers on one device, a row each, so that an update reads all in one launch.

    `extra` has as many numbers for each row as the scaler's looks want to keep with a flag; None: none.
    """

    @torch.inference_mode(False)  # later steps write it outside that mode
    def __init__(self, device: torch.device, n_extra: int = 0) -> None:
        refuse_capture(device, "a scaler's first step")
        # A copy from the host is waited for; a zeroing kernel could run after another stream has set a flag.
        with sync_allowed(device):
            self.status = torch.zeros(abi.ROWS, abi.STATUS, dtype=torch.float32, device="cpu").to(device)
            self.last_flags = torch.zeros(abi.ROWS, dtype=torch.float32, device="cpu").to(device)  # before an update
            extra = torch.zeros(abi.ROWS, n_extra, dtype=wide_dtype(device), device="cpu")
            self.extra = extra.to(device) if n_extra else None
        self.of_graphs: set[Flag] = set()  # flags that graphs write at each replay: their rows are never freed
        self._free = list(reversed(range(abi.ROWS)))

    @torch.inference_mode(False)
    def flag(self) -> Flag:
        """Return a flag on a free row, which is freed with the flag, or on new memory if no row is free."""
        if not self._free:
            extra = None if self.extra is None else torch.zeros_like(self.extra[0])
            return make_flag(torch.zeros_like(self.status[0]), extra=extra)
        row = self._free.pop()
        flag = make_flag(self.status[row], self, row, None if self.extra is None else self.extra[row])
        # Callers may keep the tensor of a flag after the step has got another.
        weakref.finalize(flag.found_inf, self._free.append, row).atexit = False
        return flag


def make_flag(status: Tensor, rows: FlagRows | None = None, row: int = 0, extra: Tensor | None = None) -> Flag:
    """Return a flag for a row of status."""
    on_host = status.is_cpu and type(status) is Tensor  # not one of torch's fake tensors
    return (HostFlag if on_host else Flag)(status, rows, row, extra)


class Flag:
    """Whether one optimizer's step is to be skipped; `status` is fp32 [STATUS], perhaps one of the `rows`."""

    def __init__(self, status: Tensor, rows: FlagRows | None = None, row: int = 0, extra: Tensor | None = None) -> None:
        self.status, self.rows, self.row, self.extra = status, rows, row, extra
        self.device = status.device
        self.found_inf = status[FLAG]
        self.is_zero = False  # whether flag and failure are known to be zero
        self._copy = HostCopy()
        self._forget()

    def _forget(self) -> None:
        """Forget the last check."""
        self.has_gradients = False  # whether it looked at gradients on this device
        self.elsewhere: Flags = {}  # what its passes have set on other devices
        self.written = False  # whether it began to write gradients
        self.is_captured = False  # whether it was recorded into a graph
        self.is_final = False  # whether it covers other optimizers or was summed: `_check_inf_per_device` keeps it
        # Over how many ranks its status was summed; 0: it is their maximum; None: no other ranks had to agree.
        self.summed_over: int | None = None
        self.reader: int | None = None  # handle of the stream on which a fused step reads it
        self.is_saved = False  # whether an update has copied the flag into `rows.last_flags`
        self._copied = False  # whether the copy on the host is of its status

    def clear(self, captured: bool = False) -> None:
        """Clear the status for a new check; always in a capture, as each replay follows another step."""
        if captured or not self.is_zero:
            self.status.zero_()
        self.is_zero = False
        self._forget()
        self.is_captured = captured

    def found_inf_on(self, device: torch.device) -> Tensor:
        """Return what a pass over gradients on `device` sets: `found_inf` at home, elsewhere what `gather` adds."""
        if device == self.device:
            self.has_gradients = True
            return self.found_inf
        if device not in self.elsewhere:
            self.elsewhere[device] = torch.zeros_like(self.found_inf, device=device)
        return self.elsewhere[device]

    def take(self, flags: Flags) -> None:
        """Take what an override has found on each device."""
        self.elsewhere = dict(flags)
        self.has_gradients = self.device in flags

    def devices(self) -> list[torch.device]:
        """Return where gradients were checked."""
        return [*([self.device] if self.has_gradients else ()), *self.elsewhere]

    def gather(self) -> bool:
        """Set the flag if a part of it is set; return whether one on the CPU is, which is known without a wait."""
        is_known = False
        for part in self.elsewhere.values():
            if not part.is_cpu or type(part) is not Tensor or part.item() != 0.0:
                is_known |= part.is_cpu and type(part) is Tensor
                self.found_inf.copy_(torch.maximum(self.found_inf, as_flag(part, self.device)))
        self.elsewhere.pop(self.device, None)  # what an override has found at home
        return is_known

    def is_set(self) -> bool:
        """Return whether the flag is set, waiting for its device."""
        return bool(self.found_inf.item() != 0.0)

    def share(self, overflows: Tensor) -> None:
        """Set the flag to 1.0 if `overflows`, that of optimizers which are checked together, is not 0, else to 0.0."""
        torch.ne(overflows, 0, out=self.found_inf)
        self.is_final, self._copied = True, False  # an earlier copy has this optimizer's own flag

    def on_devices(self, devices: Sequence[torch.device]) -> Flags:
        """Return the flag on each device, in their order."""
        flag, home = self.found_inf, self.device
        return {each: flag if each == home else flag.to(each) for each in dict.fromkeys(devices)}

    def start_copy(self) -> None:
        """Start copying the status to the host, without waiting."""
        self._copy.start(self.status)
        self._copied = True

    def on_host(self, *, copied: bool = True) -> bool:
        """Return whether the flag is set, waiting for the device; raise if the ranks are apart.

        A copy of the last check's that is under way will do if `copied`.
        """
        status = self._copy.read() if copied and self._copied else self.status.tolist()
        if self.summed_over is not None:
            require_together(status, self.summed_over, self.device)
        return bool(status[FLAG] != 0.0)  # NaN is set, too

    def last(self) -> bool:
        """Return the flag of the last step, waiting for the device; until an update, raise as `on_host` does."""
        if self.summed_over is not None:
            require_together(self.status.tolist(), self.summed_over, self.device)
        return bool(self.last_found_inf().item())

    def last_found_inf(self) -> Tensor:
        """Return the tensor that holds the flag of the last step until the next one."""
        return self.rows.last_flags[self.row] if self.rows is not None and self.is_saved else self.found_inf

    def save(self) -> None:
        """Save a flag that graphs write, as the updating kernel does: replays will, so it is read from there."""
        if self.rows is not None and self in self.rows.of_graphs:
            self.rows.last_flags[self.row].copy_(self.found_inf)
            self.is_saved = True


class HostFlag(Flag):
    """A flag on the CPU, where Python reads and writes the memory itself: an op costs twenty times as much."""

    def __init__(self, status: Tensor, *given: Any) -> None:
        super().__init__(status, *given)
        self._memory = host_memory(status)

    def clear(self, captured: bool = False) -> None:
        """Clear the status for a new check."""
        self._memory[FLAG] = self._memory[FAILURE] = 0.0
        self._forget()

    def gather(self) -> bool:
        """Set the flag if a part of it is set; return whether it is."""
        if self.elsewhere:
            super().gather()
        return self._memory[FLAG] != 0.0  # type: ignore[no-any-return]

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._memory[FLAG] != 0.0  # type: ignore[no-any-return]

    def start_copy(self) -> None:
        """Do nothing: it is there."""

    def on_host(self, *, copied: bool = True) -> bool:
        """Return whether the flag is set; raise if the ranks are apart."""
        if self.summed_over is not None:
            require_together(self._memory, self.summed_over, self.device)
        return self._memory[FLAG] != 0.0  # type: ignore[no-any-return]


def as_flag(flag: Tensor, device: torch.device) -> Tensor:
    """Return a flag of any dtype and one element as fp32 `()`, 0.0 or 1.0, on `device`; NaN counts as set."""
    return (flag != 0).to(device=device, dtype=torch.float32).reshape(())


def any_flag(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1.0, fp32 `()`, on `device`, if any of `flags` is set, else 0.0."""
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    return functools.reduce(torch.maximum, [as_flag(flag, device) for flag in flags] or [nothing])

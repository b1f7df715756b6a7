"""Flags (`found_inf`: fp32, shape (), 0.0 or 1.0): converted, combined, copied to other devices, kept by device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Flags = dict[torch.device, Tensor]


def as_flag(flag: Tensor, device: torch.device) -> Tensor:
    """Return a flag of any dtype and one element as fp32 `()`, 0.0 or 1.0, on `device`; NaN counts as set."""
    return (flag != 0).to(device=device, dtype=torch.float32).reshape(())


def any_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return fp32 `()` on `device`: 1.0 if any of `flags` (each 0.0 or 1.0) is set."""
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    result = flags[0] if flags[0].device == device else flags[0].to(device)
    for flag in flags[1:]:
        result = torch.maximum(result, flag.to(device))
    return result


def flag_on(device: torch.device, flags: Flags, found_inf: Tensor) -> Tensor:
    """Return `flags[device]`, creating it if missing: `found_inf` itself on its own device, else a zero."""
    if device not in flags:
        flags[device] = found_inf if device == found_inf.device else torch.zeros_like(found_inf, device=device)
    return flags[device]


def fp32_on(device: torch.device, number: Tensor) -> Tensor:
    """Return a one-element tensor as fp32 on `device`, itself if it is that already, without a host wait."""
    if number.device == device and number.dtype is torch.float32:
        return number
    # Not to the CPU: it would read before the copy has arrived.
    return number.to(device=device, dtype=torch.float32, non_blocking=device.type != "cpu")


class FlagsByDevice(dict[torch.device, Tensor]):
    """Flags by device. Records any read: whoever has a flag may write it by a collective, unversioned."""

    was_read = False

    def __iter__(self) -> Iterator[torch.device]:
        return super().__iter__()  # where it is overridden, a copy of the dict is made by the methods below

    def __getitem__(self, device: torch.device) -> Tensor:
        self.was_read = True
        return super().__getitem__(device)

    def get(self, *args: Any) -> Any:
        self.was_read = True
        return super().get(*args)

    def setdefault(self, *args: Any) -> Any:
        self.was_read = True
        return super().setdefault(*args)

    def values(self) -> Any:
        self.was_read = True
        return super().values()

    def items(self) -> Any:
        self.was_read = True
        return super().items()

"""Verdict: one optimizer's flag in one step, found on this rank, agreed with the others, served where it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from scaler_triton.collectives import Agreement
from scaler_triton.mirror import HostMirror, version

# Positions in the tensor that the ranks reduce; the flag is a view of it, so one reduction serves both.
_FLAG, _FAILED = 0, 1


def as_flag(flag: Tensor, device: torch.device) -> Tensor:
    """Return any flag as fp32 `()`, 0.0 or 1.0, on `device`; NaN counts as set."""
    return (flag != 0).to(device=device, dtype=torch.float32).reshape(())


def any_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return fp32 `()` on `device`: 1.0 if any of `flags` (each 0.0 or 1.0) is set."""
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=device)
    result = flags[0].to(device)
    for flag in flags[1:]:
        result = torch.maximum(result, flag.to(device))
    return result


class Verdict:
    """Whether one optimizer's step is to be skipped.

    Args:
        device: where the flag lives: the scale's.
    """

    def __init__(self, device: torch.device) -> None:
        self._signals = torch.zeros(2, dtype=torch.float32, device=device)
        self._mirror: HostMirror | None = None
        self._served: list[tuple[Tensor, int | None]] = []
        self._per_device: dict[torch.device, Tensor] = {}
        self.found_inf = self._signals[_FLAG]

    def add(self, flags: Iterable[Tensor]) -> None:
        """Take in flags of other devices, and whatever an override returned as flags."""
        for flag in flags:
            if flag is not self.found_inf:
                self.found_inf.copy_(torch.maximum(self.found_inf, as_flag(flag, self.found_inf.device)))

    def agree(self, agreement: Agreement | None) -> None:
        """Become the maximum over the ranks that must agree: one all-reduce, none where nobody else must."""
        if agreement is not None:
            agreement.maximum_(self._signals)

    def fail(self, agreement: Agreement | None) -> None:
        """Tell the other ranks that this one could not check its gradients; they skip, and raise when they read."""
        self._signals.fill_(1.0)
        self.agree(agreement)

    def skip(self) -> None:
        """Have this rank skip, without an error when the flag is read: it has raised one already."""
        self._signals[_FLAG], self._signals[_FAILED] = 1.0, 0.0

    def serve(self, devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
        """Return the flag on each of `devices`."""
        home = self.found_inf.device
        self._per_device = {d: self.found_inf if d == home else self.found_inf.to(d) for d in dict.fromkeys(devices)}
        self._served = [(flag, version(flag)) for flag in self._per_device.values()]
        return self._per_device

    def is_behind(self, flags: dict[torch.device, Tensor]) -> bool:
        """Tell whether `flags` are the ones served here, and nobody has written others or into them since."""
        return (
            flags is self._per_device
            and len(flags) == len(self._served)
            and all(
                flag is mine and version(flag) == seen
                for flag, (mine, seen) in zip(flags.values(), self._served, strict=True)
            )
        )

    def start_mirror(self) -> None:
        """Start copying the flag to the host, without waiting."""
        self._mirror = HostMirror(self._signals)

    def on_host(self) -> bool:
        """Return the flag as a bool, waiting for its copy only.

        Raises: RuntimeError if another rank could not check its gradients.
        """
        if self._mirror is None:
            self.start_mirror()
            assert self._mirror is not None
        values = self._mirror.read()
        if values[_FAILED]:
            raise RuntimeError("Another rank failed to check its gradients, so this step is skipped on all ranks.")
        return bool(values[_FLAG])

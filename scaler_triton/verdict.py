"""Verdict: one optimizer's `found_inf`: set on this rank, reduced over ranks, copied to every device that needs it."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.agreement import Agreement
from scaler_triton.cuda_graphs import is_captured
from scaler_triton.flags import Flags, FlagsByDevice, as_flag
from scaler_triton.host_memory import host_memory
from scaler_triton.mirror import HostMirror, version_counter
from scaler_triton.scale_comparison import MAX, Comparison, compare_maxima, compare_sums, constants

if TYPE_CHECKING:
    from scaler_triton.flag_buffer import FlagBuffer

# The status that the ranks all-reduce: the flag, whether a rank failed to check its gradients, and two numbers by which
# the scales are compared: after a MAX reduction the maxima of the scales and of their negatives; after a SUM (clipping)
# the sum of the scales, and `excess` as in `set_from_sums`.
_FLAG, _FAILED, _SCALES = range(3)
COLUMNS = 4
_NO_SCALE = -math.inf
_version_of = attrgetter("_version")


class Verdict:
    """Whether one optimizer's step is to be skipped; reused from step to step.

    Args:
        status: fp32, (4,), on the scale's device, as above.
        buffer: the FlagBuffer of which the status is row `row`; None: of none.
    """

    def __init__(self, status: Tensor, buffer: FlagBuffer | None = None, row: int = 0) -> None:
        self.buffer, self.row = buffer, row
        self.device = status.device
        self.found_inf = status[_FLAG]
        self.cleared = False  # whether flag and failure are known to be zero
        self.saved = False  # whether an update has copied the flag into `buffer.last_flags`
        self.in_step = False  # whether it holds the flag of a step that no update has ended
        self.shared = False  # whether it is the flag of several optimizers, which were clipped together
        self._pending_ranks = 0  # not 0: the status is still to be computed from sums over so many ranks
        self._status, self._scales = status, status[_SCALES:]
        self._host_status = host_memory(status) if status.is_cpu and type(status) is Tensor else None
        self._compare: Comparison | None = None
        self._mirror: HostMirror | None = None
        self._mirrored = False
        self._per_device = FlagsByDevice()
        self._flags: list[Tensor] = []  # keeps their ids from being reused
        self._identities: list[int | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Verdict:
        """Return itself, which does not own the flags of the copied state."""
        return self

    def reset(self, captured: bool = False) -> None:
        """Clear the status for a new step; during a capture always, as each replay follows another step."""
        if captured or not self.cleared:
            if self._host_status is None:
                self._status.zero_()
            else:
                self._host_status[_FLAG] = self._host_status[_FAILED] = 0.0
        self.cleared = self.saved = self.shared = self._mirrored = False
        self._compare = None
        self._pending_ranks = 0

    def add(self, flags: Iterable[Tensor]) -> None:
        """Set the flag if any of `flags` is set: those of other devices, or what an override returned."""
        for flag in flags:
            if flag is not self.found_inf:
                self.found_inf.copy_(torch.maximum(self.found_inf, as_flag(flag, self.device)))

    def set_shared(self, flags: Tensor) -> None:
        """Set the flag to that of optimizers that are clipped together: 1.0 if `flags` is not 0, else 0.0.

        Args:
            flags: the sum of their flags, one element, on this device.
        """
        torch.ne(flags, 0, out=self.found_inf)
        self.shared = True

    def write_scale(self, scale: Tensor) -> None:
        """Add the scale (one element, on this device) to the status, so that `agree` compares the ranks' scales."""
        torch.mul(scale, constants(scale, torch.float32, 1.0, -1.0), out=self._scales)

    def agree(self, agreement: Agreement) -> None:
        """Reduce the status to its maximum over the ranks, by one all-reduce."""
        agreement.maximum_(self._status)
        self._compare = compare_maxima

    def expect_sums(self, ranks: int) -> None:
        """Announce sums over so many ranks, from which a kernel or `set_from_sums` will compute the status."""
        self._pending_ranks = ranks
        self._compare = functools.partial(compare_sums, ranks)
        self.shared = True

    def leave_to_kernel(self) -> tuple[Tensor, int]:
        """Return the status for a kernel to write, and the number of ranks in its sums; 0: nothing to be written.

        `set_from_sums` does nothing afterwards.
        """
        ranks, self._pending_ranks = self._pending_ranks, 0
        return self._status, ranks

    def set_from_sums(self, sums: Tensor) -> None:
        """Compute the status from the announced sums, unless a kernel has done so.

            excess = sums[2] * sums[3] / ranks**2 - 1   # 0 for equal scales, else larger
            status = [sums[0] != 0, sums[1] != 0, sums[2], excess]

        Args:
            sums: fp64, [4], on this device: the number of ranks with an overflow, of ranks that failed, and the sums
                of what `write_scales` wrote.
        """
        ranks = self.leave_to_kernel()[1]
        if not ranks:
            return
        torch.clamp(sums, max=constants(sums, torch.float64, 1.0, 1.0, MAX, MAX), out=self._status)
        below = constants(sums, torch.float64, -1.0)
        torch.addcmul(below, sums[2:3], sums[3:], value=1 / ranks**2, out=self._scales[1:])

    def copy_to(self, devices: Sequence[torch.device]) -> Flags:
        """Return the flag on each of `devices`, without duplicates, in their order."""
        flag, home = self.found_inf, self.device
        if devices and devices.count(home) == len(devices):
            flags = {home: flag}
        else:
            flags = {each: flag if each == home else flag.to(each) for each in dict.fromkeys(devices)}
        self._per_device, self._flags = FlagsByDevice(flags), [*flags.values()]
        self._identities = _identities(flags.values())
        return self._per_device

    def owns(self, flags: Flags) -> bool:
        """Tell whether `flags` is what `copy_to` returned last, and no flag in it was replaced or written since."""
        return flags is self._per_device and _identities(dict.values(flags)) == self._identities

    def flag(self) -> Tensor:
        """Return the flag as 0.0 or 1.0, even if others have written into it, such as a sum over ranks."""
        return as_flag(self.found_inf, self.device) if self._per_device.was_read else self.found_inf

    def start_mirror(self) -> None:
        """Start copying the status to the host without waiting; not in a capture, whose events cannot be waited for."""
        if self._host_status is None and not is_captured(self._status):
            self._copy()

    def _copy(self) -> None:
        if self._mirror is None:
            self._mirror = HostMirror(self._status)
        self._mirror.start()
        self._mirrored = True

    def on_host(self) -> bool:
        """Return the flag as a bool, waiting for its copy only: a new one if others may have written into the flag.

        Raises: RuntimeError if another rank could not check its gradients, or the ranks' scales differ.
        """
        values = self._mirrored_values() if self._host_status is None else self._host_status.tolist()
        if self._compare is not None:
            _check(self._compare, values)
        return bool(values[_FLAG])

    def _mirrored_values(self) -> list[float]:
        if not self._mirrored or self._per_device.was_read:
            self._copy()
        assert self._mirror is not None
        return self._mirror.read()

    def last_flag(self) -> bool:
        """Return the flag of the last step, even if an update has cleared it since, waiting for the device.

        Raises: as `on_host`; but a failure of another rank is cleared by the update, too.
        """
        if self._compare is not None:
            _check(self._compare, self._status.tolist())
        return bool(self.last_found_inf().item())

    def last_found_inf(self) -> Tensor:
        """Return the flag of the last step where it is on the device, until the next one."""
        return self.buffer.last_flags[self.row] if self.buffer is not None and self.saved else self.found_inf


def _identities(flags: Collection[Tensor]) -> list[int | None]:
    """Return the flags' ids and version counters, which change if one is replaced or written."""
    try:
        return [*map(id, flags), *map(_version_of, flags)]
    except RuntimeError:  # an inference tensor among them
        return [*map(id, flags), *map(version_counter, flags)]


def _check(compare: Comparison, values: Sequence[float]) -> None:
    """Raise if the reduced status tells of a failed rank or of different scales."""
    if values[_FAILED]:
        raise RuntimeError("Another rank failed to check its gradients, so this step is skipped on all ranks.")
    apart = compare(*values[_SCALES:])
    if apart:
        raise RuntimeError(
            f"The ranks hold different scales, {apart}: they no longer train one model. Go back to a checkpoint "
            "in which they agree, or set one scale on all of them with update(new_scale)."
        )


def report_failure(agreement: Agreement, device: torch.device) -> None:
    """Join the reduction of a status with the failure set: the other ranks skip, and raise when they read the flag."""
    agreement.maximum_(torch.tensor([1.0, 1.0, _NO_SCALE, _NO_SCALE], dtype=torch.float32, device=device))

"""Verdict: one optimizer's flag in one step, found on this rank, agreed with the others, served where it is needed."""

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
from scaler_triton.flags import Flags, ServedFlags, as_flag
from scaler_triton.mirror import HostMirror, version_counter
from scaler_triton.scale_comparison import MAX, Comparison, compare_maxima, compare_sums, constants

if TYPE_CHECKING:
    from scaler_triton.flag_buffer import FlagBuffer

# Positions in the signals that the ranks reduce; the flag is a view of them, so one reduction serves all. From the last
# two it shows whether their scales are equal: where maxima are taken, those of the scale and its negative; where sums
# are, the sum of the scales, and `excess` as `settle` has it.
_FLAG, _FAILED, _SCALES = range(3)
COLUMNS = 4
_NO_SCALE = -math.inf
_version_of = attrgetter("_version")


class Verdict:
    """Whether one optimizer's step is to be skipped; used again from step to step.

    Args:
        signals: fp32, (4,), on the scale's device; flag, failure, and the scales that the ranks compare.
        buffer: where the signals lie, at `row`; None: nowhere but here.
    """

    def __init__(self, signals: Tensor, buffer: FlagBuffer | None = None, row: int = 0) -> None:
        self.buffer, self.row = buffer, row
        self.device = signals.device
        self.found_inf = signals[_FLAG]
        self.cleared = False  # whether flag and failure are known to be zero
        self.moved = False  # whether an update has copied the flag into `buffer.last`
        self.shared = False  # whether optimizers that were clipped together have it, whatever each one's gradients are
        self._unsettled = 0  # the ranks whose sums it is yet to become
        self._signals, self._scales = signals, signals[_SCALES:]
        # Where they are on the host they are read and cleared as numbers: an op costs several times that.
        self._host_signals = signals.numpy() if signals.is_cpu and type(signals) is Tensor else None
        self._compare: Comparison | None = None
        self._mirror: HostMirror | None = None
        self._mirrored = False
        self._per_device = ServedFlags()
        self._served: list[Tensor] = []  # keeps alive what the identities name
        self._identities: list[int | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Verdict:
        """Return itself: a copied state has its own flags, which are not the ones served here."""
        return self

    def begin(self, captured: bool = False) -> None:
        """Forget the step before; in a graph whatever that will be: replays follow what the host has not foreseen."""
        if captured or not self.cleared:
            if self._host_signals is None:
                self._signals.zero_()
            else:
                self._host_signals.fill(0.0)
        self.cleared = self.moved = self.shared = self._mirrored = False
        self._compare = None
        self._unsettled = 0

    def add(self, flags: Iterable[Tensor]) -> None:
        """Take in flags of other devices, and whatever an override returned as flags."""
        for flag in flags:
            if flag is not self.found_inf:
                self.found_inf.copy_(torch.maximum(self.found_inf, as_flag(flag, self.device)))

    def join(self, flags: Tensor) -> None:
        """Become 1.0 if `flags` is not 0, else 0.0: the flag that optimizers clipped together share.

        Args:
            flags: the sum of their flags, one element, on this device.
        """
        torch.ne(flags, 0, out=self.found_inf)
        self.shared = True

    def show_scale(self, scale: Tensor) -> None:
        """Have the ranks compare their scales (one element, on this device) when they agree."""
        torch.mul(scale, constants(scale, torch.float32, 1.0, -1.0), out=self._scales)

    def agree(self, agreement: Agreement) -> None:
        """Become the maximum over the ranks that must agree, by one all-reduce."""
        agreement.maximum_(self._signals)
        self._compare = compare_maxima

    def expect_sums(self, ranks: int) -> None:
        """Announce sums over so many ranks, which a kernel or `settle` is to turn into signals."""
        self._unsettled = ranks
        self._compare = functools.partial(compare_sums, ranks)
        self.shared = True

    def leave_to_kernel(self) -> tuple[Tensor, int]:
        """Return the signals that the caller's kernel is to write, and how many ranks its sums are of; 0: it need not.

        `settle` does nothing afterwards.
        """
        ranks, self._unsettled = self._unsettled, 0
        return self._signals, ranks

    def settle(self, sums: Tensor) -> None:
        """Become what the announced sums tell, unless a kernel has seen to it.

            excess = sums[2] * sums[3] / ranks**2 - 1   # 0 for equal scales, else larger
            signals = [sums[0] != 0, sums[1] != 0, sums[2], excess]

        Args:
            sums: fp64, [4], on this device: how many ranks saw an overflow, how many failed to look, and what
                `write_scales` wrote.
        """
        ranks = self.leave_to_kernel()[1]
        if not ranks:
            return
        torch.clamp(sums, max=constants(sums, torch.float64, 1.0, 1.0, MAX, MAX), out=self._signals)
        below = constants(sums, torch.float64, -1.0)
        torch.addcmul(below, sums[2:3], sums[3:], value=1 / ranks**2, out=self._scales[1:])

    def serve(self, devices: Sequence[torch.device]) -> Flags:
        """Return the flag on each of `devices`, in the order of their first mention."""
        flag, home = self.found_inf, self.device
        if devices and devices.count(home) == len(devices):
            flags = {home: flag}
        else:
            flags = {each: flag if each == home else flag.to(each) for each in dict.fromkeys(devices)}
        self._per_device, self._served = ServedFlags(flags), [*flags.values()]
        self._identities = _identities(flags.values())
        return self._per_device

    def is_behind(self, flags: Flags) -> bool:
        """Tell whether `flags` are the ones served here, and nobody has written others or into them since."""
        return flags is self._per_device and _identities(dict.values(flags)) == self._identities

    def flag(self) -> Tensor:
        """Return the flag, 0.0 or 1.0, whatever somebody who took it wrote into it, such as a sum over ranks."""
        return as_flag(self.found_inf, self.device) if self._per_device.taken else self.found_inf

    def start_mirror(self) -> None:
        """Start copying the flag to the host, without waiting; not into a graph, whose events cannot be waited for."""
        if self._host_signals is None and not is_captured(self._signals):
            self._copy()

    def _copy(self) -> None:
        if self._mirror is None:
            self._mirror = HostMirror(self._signals)
        self._mirror.start()
        self._mirrored = True

    def on_host(self) -> bool:
        """Return the flag as a bool, waiting for its copy only: for one made now if somebody took the flag meanwhile.

        Raises: RuntimeError if another rank could not check its gradients, or the ranks' scales differ.
        """
        values = self._mirrored_values() if self._host_signals is None else self._host_signals.tolist()
        if self._compare is not None:
            self._check(values)
        return bool(values[_FLAG])

    def _mirrored_values(self) -> list[float]:
        if not self._mirrored or self._per_device.taken:
            self._copy()
        assert self._mirror is not None
        return self._mirror.read()

    def _check(self, values: Sequence[float]) -> None:
        if values[_FAILED]:
            raise RuntimeError("Another rank failed to check its gradients, so this step is skipped on all ranks.")
        apart = "" if self._compare is None else self._compare(*values[_SCALES:])
        if apart:
            raise RuntimeError(
                f"The ranks hold different scales, {apart}: they no longer train one model. Go back to a checkpoint "
                "in which they agree, or set one scale on all of them with update(new_scale)."
            )

    def last(self) -> bool:
        """Return the flag of the last step, also when an update has cleared it since, waiting for the device.

        Raises: as `on_host`; that another rank failed is no longer known once the flag was cleared.
        """
        if self._compare is not None:
            self._check(self._signals.tolist())
        flag = self.buffer.last[self.row] if self.buffer is not None and self.moved else self.found_inf
        return bool(flag.item())


def _identities(flags: Collection[Tensor]) -> list[int | None]:
    """Return what changes when one of `flags` is written, or another tensor stands in its place."""
    try:
        return [*map(id, flags), *map(_version_of, flags)]
    except RuntimeError:  # an inference tensor among them
        return [*map(id, flags), *map(version_counter, flags)]


def tell_failure(agreement: Agreement, device: torch.device) -> None:
    """Tell the other ranks that this one could not check its gradients; they skip, and raise when they read."""
    agreement.maximum_(torch.tensor([1.0, 1.0, _NO_SCALE, _NO_SCALE], dtype=torch.float32, device=device))

"""The flag (found_inf) of an optimizer's step: its row on the device, agreed by the ranks, copied to the host.

A flag is fp32, shape `()`, 0.0 or 1.0. It is the first number of a row of status (`kernels.abi`), which the ranks
reduce; the other three report a rank that failed, and compare the ranks' scales:

    status = [found_inf, failed, scale, -scale]             # each rank's; a MAX reduction
    status = [found_inf, failed, sum of scales, excess]     # where totals are summed: to clip, judge spikes or measure
    excess = sum(scale) * sum(1 / scale) / ranks**2 - 1     # 0 for equal scales, else larger
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import is_captured, refuse_capture, sync_allowed
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.torch_ops import combine_, constants, exponent_of, host_memory, times_power_of_2, wide_dtype
from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import FAILED, FLAG

Flags = dict[torch.device, Tensor]

# For n equal scales, `excess` is below n times this in any order of summation, by the dtype of the sums: each of 2n
# roundings is at most an eighth of it.
_ROUNDING = {torch.float64: 2.0**-50, torch.float32: 2.0**-21}

# The binades in which ranks place their largest scaled gradient; the first and the last take all beyond, too.
BINADES, LOWEST_BINADE = 64, -31
PACKED = 3 + BINADES


class PeerFailedError(RuntimeError):
    """Another rank failed to check its gradients."""


class FlagRows:
    """The status of a scaler's optimizers on one device, a row each, so that an update reads all in one launch."""

    @torch.inference_mode(False)  # later steps write it outside that mode
    def __init__(self, device: torch.device, measures: bool = False) -> None:
        refuse_capture(device, "a scaler's first step")
        # A copy from the host is waited for; a zeroing kernel could run after another stream has set a flag.
        with sync_allowed(device):
            self.status = torch.zeros(abi.ROWS, abi.STATUS, dtype=torch.float32, device="cpu").to(device)
            self.last_flags = torch.zeros(abi.ROWS, dtype=torch.float32, device="cpu").to(device)  # before an update
            empty = torch.zeros(abi.ROWS, abi.MEASURED_ROW, dtype=wide_dtype(device), device="cpu")
            self.measured = empty.to(device) if measures else None  # what the checks have measured
        self.captured: set[Flag] = set()  # flags that graphs write at each replay: their rows are never freed
        self._free = list(reversed(range(abi.ROWS)))

    @torch.inference_mode(False)
    def flag(self) -> Flag:
        """Return a flag on a free row, which is freed with the flag, or on new memory if no row is free."""
        if not self._free:
            measured = None if self.measured is None else torch.zeros_like(self.measured[0])
            return Flag(torch.zeros_like(self.status[0]), measured=measured)
        row = self._free.pop()
        flag = Flag(self.status[row], self, row, None if self.measured is None else self.measured[row])
        # Callers may keep the tensor of a flag after the step has got another.
        weakref.finalize(flag.found_inf, self._free.append, row).atexit = False
        return flag


class Flag:
    """Whether one optimizer's step is to be skipped; `status` is fp32 [STATUS], perhaps one of the `rows`."""

    def __init__(
        self, status: Tensor, rows: FlagRows | None = None, row: int = 0, measured: Tensor | None = None
    ) -> None:
        self.status, self.rows, self.row = status, rows, row
        self.measured = measured  # what the last check has measured, fp64 [MEASURED_ROW]; None: it does not measure
        self.measured_copy = HostCopy()
        self.device = status.device
        self.found_inf = status[FLAG]
        self.cleared = False  # whether flag and failure are known to be zero
        self.saved = False  # whether an update has copied the flag into `rows.last_flags`
        self.captured = False  # whether the check was recorded into a graph
        self.reader: int | None = None  # handle of the stream on which a fused step reads it
        self.is_final = False  # whether it covers other optimizers or was summed: `_check_inf_per_device` keeps it
        # Over how many ranks it was summed; 0: it is their maximum; None: no other ranks had to agree.
        self.summed_over: int | None = None
        self._copy = HostCopy()
        self._copied = False  # whether that copy is of the last check's status
        # On the CPU Python reads and writes the memory itself: an op costs twenty times as much.
        self._memory = host_memory(status) if status.is_cpu and type(status) is Tensor else None

    def clear(self, captured: bool = False) -> None:
        """Clear the status for a new check; always in a capture, as each replay follows another step."""
        if self._memory is not None:
            self._memory[FLAG] = self._memory[FAILED] = 0.0
        else:
            if captured or not self.cleared:
                self.status.zero_()
            self.cleared = self._copied = False
        self.captured, self.saved, self.is_final = captured, False, False
        self.reader = self.summed_over = None

    def add(self, flags: Iterable[Tensor]) -> None:
        """Set the flag if any of `flags` is set, which are on other devices or were returned by an override."""
        for flag in flags:
            if flag is self.found_inf or (flag.is_cpu and type(flag) is Tensor and flag.item() == 0.0):
                continue  # on the CPU a look costs neither a wait nor a launch
            self.found_inf.copy_(torch.maximum(self.found_inf, as_flag(flag, self.device)))

    def is_set(self) -> bool:
        """Return whether the flag is set, waiting for its device."""
        return (self.found_inf.item() if self._memory is None else self._memory[FLAG]) != 0.0

    def share(self, overflows: Tensor) -> None:
        """Set the flag to 1.0 if `overflows`, that of optimizers which are clipped together, is not 0, else to 0.0."""
        torch.ne(overflows, 0, out=self.found_inf)
        self.is_final, self._copied = True, False  # an earlier copy has this optimizer's own flag

    def numbers(self, scale: Tensor) -> Tensor:
        """Return what `agree` reduces, with the scale (one element, on this device), so that ranks compare theirs."""
        if self.measured is None:
            torch.mul(scale, constants(scale, torch.float32, 1.0, -1.0), out=self.status[abi.SCALE :])
            return self.status
        totals = torch.zeros(abi.TOTALS, dtype=wide_dtype(self.device), device=self.device)
        totals[abi.OVERFLOWS] = self.found_inf
        write_scales(totals[abi.SCALES :], scale)
        return totals

    def agree(self, numbers: Tensor, peers: Ranks) -> None:
        """Reduce the status to its maximum over the ranks, by one all-reduce; a sum if the numbers are totals."""
        if numbers is self.status:
            peers.reduce_(numbers, "MAX")
            self.summed_over = 0
        else:
            sum_totals_([self], numbers, peers)
            self.read_sums(numbers)

    def read_sums(self, totals: Tensor) -> None:
        """Compute the status from totals (`wide_dtype`, [TOTALS], on this device) that were summed over the ranks."""
        sums = totals[abi.OVERFLOWS :]
        torch.clamp(sums, max=constants(sums, sums.dtype, 1.0, 1.0, abi.MAX_SCALE, abi.MAX_SCALE), out=self.status)
        scales, inverses = totals[abi.SCALES : abi.SCALES + 1], totals[abi.INVERSES :]
        minus_one, ranks = constants(totals, totals.dtype, -1.0), self.summed_over or 1
        torch.addcmul(minus_one, scales, inverses, value=1 / ranks**2, out=self.status[abi.EXCESS :])

    def on_devices(self, devices: Sequence[torch.device]) -> Flags:
        """Return the flag on each device, in their order."""
        flag, home = self.found_inf, self.device
        return {each: flag if each == home else flag.to(each) for each in dict.fromkeys(devices)}

    def start_copy(self) -> None:
        """Start copying the status to the host, without waiting; on the CPU it is there."""
        if self._memory is None:
            self._copy.start(self.status)
            self._copied = True

    def on_host(self, *, copied: bool = True) -> bool:
        """Return whether the flag is set, waiting for the device; raise if the ranks are apart.

        A copy of the last check's that is under way will do if `copied`.
        """
        values: Sequence[float]
        if self._memory is not None:
            values = self._memory
        else:
            values = self._copy.read() if copied and self._copied else self.status.tolist()
        if self.summed_over is not None:
            self._raise_if_apart(values)
        return bool(values[FLAG] != 0.0)  # NaN is set, too

    def last(self) -> bool:
        """Return the flag of the last step, waiting for the device; until an update, raise as `on_host` does."""
        if self.summed_over is not None:
            self._raise_if_apart(self.status.tolist())
        return bool(self.last_found_inf().item())

    def last_found_inf(self) -> Tensor:
        """Return the tensor that holds the flag of the last step until the next one."""
        return self.rows.last_flags[self.row] if self.rows is not None and self.saved else self.found_inf

    def save(self) -> None:
        """Save a flag that graphs write, as the updating kernel does: replays will, so it is read from there."""
        if self.rows is not None and self in self.rows.captured:
            self.rows.last_flags[self.row].copy_(self.found_inf)
            self.saved = True

    def _raise_if_apart(self, values: Any) -> None:
        """Raise if the agreed status shows a failed rank or different scales."""
        if values[FAILED]:
            raise PeerFailedError("Another rank failed to check its gradients, so this step is skipped on all ranks.")
        scale, other = values[abi.SCALE], values[abi.EXCESS]
        if self.summed_over:
            apart = _compare_sums(self.summed_over, scale, other, _ROUNDING[wide_dtype(self.device)])
        else:
            apart = "" if scale == -other else f"from {-other} to {scale}"
        if apart:
            raise RuntimeError(
                f"The ranks hold different scales, {apart}: they no longer train one model. Go back to a checkpoint "
                "in which they agree, or set one scale on all of them with update(new_scale)."
            )


def report_failure(peers: Ranks, device: torch.device, *, by_norm: bool, measures: bool) -> None:
    """Join the reduction of a check with the failure set; if it gives a norm or `measures`, totals are summed."""
    if by_norm or measures:
        # Without a scale, too: an update clears the failure, but scales are still compared.
        totals = [math.nan, 1.0, 1.0, 0.0, 0.0] + [0.0] * (PACKED if measures else 0)
        peers.reduce_(torch.tensor(totals, dtype=wide_dtype(device), device=device), "SUM")
    else:
        status = [1.0, 1.0, -math.inf, -math.inf]  # no scale: the others compare theirs
        peers.reduce_(torch.tensor(status, dtype=torch.float32, device=device), "MAX")


def write_scales(rows: Tensor, scale: Tensor) -> None:
    """Write the scale and its inverse into `rows` (`wide_dtype`, [2]), for ranks that compare their sums."""
    torch.pow(scale, constants(scale, rows.dtype, 1.0, -1.0), out=rows)


def _compare_sums(ranks: int, scales: float, excess: float, rounding: float) -> str:
    """Return how the scales differ, "" if they do not, from their sum and their mean's excess over the harmonic."""
    if not (excess > ranks * rounding or math.isnan(scales)):
        return ""
    high = min(scales, abi.MAX_SCALE) / ranks
    low = high / (1 + min(excess, abi.MAX_SCALE))
    # As many digits as it takes to distinguish them, at least six.
    digits = next((digits for digits in range(6, 17) if f"{low:.{digits}g}" != f"{high:.{digits}g}"), 6)
    return f"some below {low:.{digits}g}, some above {high:.{digits}g}"


def sum_totals_(flags: Sequence[Flag], totals: Tensor, peers: Ranks) -> None:
    """Replace the totals of one check by their sums over the ranks, and what it has measured, by one all-reduce.

    Of flags that share the check, the first gets what is measured.
    """
    row = flags[0].measured
    if row is None:
        peers.reduce_(totals, "SUM")
    else:
        for other in flags[1:]:
            combine_(row, other.measured)
            other.measured.zero_()  # type: ignore[union-attr]
        sums = torch.cat([totals, _packed(row)])
        peers.reduce_(sums, "SUM")
        totals.copy_(sums[: abi.TOTALS])
        _unpack_(row, sums[abi.TOTALS :])
    for flag in flags:  # a kernel or `read_sums` computes their status
        flag.summed_over, flag.is_final = len(peers.ranks), True


def _packed(row: Tensor) -> Tensor:
    """Return a row as numbers that ranks may sum, `wide_dtype`, [PACKED]."""
    exponents = torch.arange(LOWEST_BINADE, LOWEST_BINADE + BINADES, device=row.device)
    binade = (exponent_of(row[abi.LARGEST] / row[abi.MEASURED_AT]) + exponent_of(row[abi.MEASURED_AT])).clamp(
        LOWEST_BINADE, LOWEST_BINADE + BINADES - 1
    )
    one = (exponents == binade) & (row[abi.LARGEST] > 0)
    return torch.cat([row[abi.ZEROS : abi.SEEN + 1], one.to(row.dtype)])


def _unpack_(row: Tensor, sums: Tensor) -> None:
    """Replace a row by what all ranks have measured, given the sums of `_packed`."""
    counts, histogram = sums[:3], sums[3:]
    exponents = torch.arange(LOWEST_BINADE, LOWEST_BINADE + BINADES, device=row.device)
    binade = torch.where(histogram > 0, exponents, LOWEST_BINADE).amax() - exponent_of(row[abi.MEASURED_AT])
    largest = times_power_of_2(row[abi.MEASURED_AT], binade)
    row[abi.LARGEST] = torch.where(histogram.sum() > 0, largest, 0.0)
    row[abi.ZEROS : abi.SEEN + 1] = counts


def as_flag(flag: Tensor, device: torch.device) -> Tensor:
    """Return a flag of any dtype and one element as fp32 `()`, 0.0 or 1.0, on `device`; NaN counts as set."""
    return (flag != 0).to(device=device, dtype=torch.float32).reshape(())


def any_flag(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1.0, fp32 `()`, on `device`, if any of `flags` is set, else 0.0."""
    found = [as_flag(flag, device) for flag in flags]
    return functools.reduce(torch.maximum, found) if found else torch.zeros((), dtype=torch.float32, device=device)


def fp32_on(device: torch.device, number: Tensor) -> Tensor:
    """Return a one-element tensor as fp32 on `device`; only a copy to the CPU waits."""
    if number.device == device and number.dtype is torch.float32:
        return number
    # The CPU would read before a copy without a wait has arrived.
    return number.to(device=device, dtype=torch.float32, non_blocking=device.type != "cpu")


class HostCopy:
    """A small tensor's values on the host: from CUDA in pinned memory, with an event; elsewhere in a clone."""

    def __init__(self, latest: Any = None) -> None:
        self.latest = latest  # what `newest` returned last
        self._source: Tensor | None = None  # the tensor of the last start
        self._copy: Any = None
        self._event: torch.cuda.Event | None = None

    def start(self, source: Tensor) -> None:
        """Start a copy on the current stream; it overwrites the previous one."""
        if source is not self._source:
            self._prepare(source)
        if self._event is None:
            self._copy = source.clone()
        elif torch.cuda.current_device() == source.device.index:
            self._copy.copy_(source, non_blocking=True)
            self._event.record()
        else:
            with torch.cuda.device(source.device):
                self.start(source)

    @torch.inference_mode(False)
    def _prepare(self, source: Tensor) -> None:
        self._event = None
        if source.is_cuda and type(source) is Tensor:  # not one of torch's fake tensors
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._memory = host_memory(self._copy)
            with torch.cuda.device(source.device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._source = source

    def read(self) -> Any:
        """Return the values of the last start as `tolist` does, waiting for that copy only."""
        if self._event is not None:
            self._event.synchronize()
            return self._memory.tolist()
        return self._copy.tolist()

    def has_arrived(self) -> bool:
        """Return whether `read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def newest(self, source: Tensor) -> Any:
        """Return the newest values that have arrived, and start the next copy; never wait on CUDA.

        Before any has arrived it is the first `latest`. While a graph is captured nothing is started.
        """
        for _ in range(0 if is_captured(source) else 2):  # twice: off CUDA the first copy has arrived already
            if source is self._source:
                if not self.has_arrived():
                    break
                self.latest = self.read()
            self.start(source)
        return self.latest


class OnDevice:
    """Numbers that updates read or write: a list until `on` is first called, then a tensor on the scale's device.

    It stays the same tensor on that device, as graphs hold its address.
    """

    dtype = torch.float64

    def __init__(self, values: Sequence[Any]) -> None:
        self.values: list[Any] | Tensor = list(values)

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, which updates on `device` write."""
        if isinstance(self.values, list) or self.values.device != device:
            refuse_capture(device, "a scaler's first step")
            with torch.inference_mode(False), sync_allowed(device):
                # Kernels on other streams read it, so the copy is waited for, once per scaler.
                dtype = self.dtype if self.dtype is torch.int64 else wide_dtype(device)
                self.values = torch.tensor(self.read(), dtype=dtype, device="cpu").to(device)
        return self.values

    def set(self, values: Sequence[Any]) -> None:
        """Write other values."""
        if isinstance(self.values, list):
            self.values = list(values)
        else:
            self.values.copy_(torch.tensor(values, dtype=self.dtype, device="cpu"))

    def read(self) -> list[Any]:
        """Return a copy of the values, waiting for the device."""
        return list(self.values) if isinstance(self.values, list) else self.values.tolist()

"""The update rule: growth, backoff and limits of the scale, and the counters that `stats` returns.

    if found_inf: strikes += 1; tracker = 0; scale *= backoff_factor if strikes >= hysteresis else 1
    elif tracker + 1 < growth_interval: tracker += 1
    else: scale = scale * growth_factor if that is finite else scale; tracker = strikes = 0
    scale = clamp(scale, min_scale, max_scale)                # NaN becomes min_scale

This is `torch._amp_update_scale_` except for >= and the limits. Products are computed in fp64 and rounded once to fp32,
as in torch. Hysteresis is that of Megatron's `DynamicGradScaler` (megatron/core/optimizer/grad_scaler.py). There are
three implementations with the same bits: Python for a scale on the CPU, torch's ops, and `kernels/update_scale.py`; the
last two also have the headroom policy, see `headroom.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.core import policy
from scaler_triton.core.dispatch import choose_for_scale, kernels, stream_of, sync_allowed
from scaler_triton.core.flag import Flag, FlagRows, HostCopy, OnDevice, any_flag
from scaler_triton.core.policy import Limits, no_counters
from scaler_triton.core.torch_ops import host_memory, increment_version
from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import MAX_TRACKER, STREAK, UPDATES
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.check import Ours
    from scaler_triton.grad_scaler import GradScaler
    from scaler_triton.measuring.headroom import HeadroomRule

_ROUNDS_TO_INF = 2.0**128 - 2.0**103  # the smallest double that fp32 rounds to infinity

Numbers = tuple[float, float, int]  # growth_factor, backoff_factor, growth_interval


class SkipStreakError(FloatingPointError):
    """More updates in a row were skipped than `max_consecutive_skips` allows."""


@dataclass(frozen=True)
class ScalerStats:
    """What a scaler's updates have done so far.

    Args:
        updates: calls of `update`; `update(new_scale)` counts only if gradients were checked before it.
        skipped: updates in which at least one step was skipped.
        consecutive_skips: how many of them were the last ones in a row; 0 after an update without overflow.
        growths: updates that made the scale larger, even by a limit; `update(new_scale)` does not count.
        backoffs: updates that made it smaller, even by a limit.
        last_skip: the number of the last update that skipped, from 1; None if none did.
        spikes: steps that a `StepGuard` skips because their norm is a spike; counted when they are checked.
    """

    updates: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    growths: int = 0
    backoffs: int = 0
    last_skip: int | None = None
    spikes: int = 0

    @classmethod
    def of(cls, counters: Sequence[int]) -> ScalerStats:
        """Return counters as stats."""
        updates, skipped, streak, growths, backoffs, last_skip, _, spikes = counters
        return cls(updates, skipped, streak, growths, backoffs, last_skip or None, spikes)


class Counters(OnDevice):
    """A scaler's counters, int64 [COUNTERS] on a device."""

    dtype = torch.int64

    def __init__(self) -> None:
        super().__init__(no_counters())
        self.copy = HostCopy(self.values)

    def set(self, values: Sequence[int]) -> None:
        """Write other values."""
        super().set(values)
        self.copy = HostCopy(list(values))  # what was copied before is older

    def read(self) -> list[int]:
        """Return a copy of the values, waiting for the device."""
        values = super().read()
        self.copy = HostCopy(values)
        return values

    def newest(self) -> list[int]:
        """Return the newest values that have arrived on the host, and start the next copy; never waits on CUDA."""
        newest: list[int] = self.values if isinstance(self.values, list) else self.copy.newest(self.values)
        return newest


class LaggingCounters:
    """The counters of `LAG` updates ago, which are on the host by then, and equal on every rank."""

    LAG = 4  # updates

    def __init__(self) -> None:
        self._taken: list[HostCopy] = []

    def push(self, values: Tensor) -> list[int] | None:
        """Store the counters after an update, and return those of `LAG` updates before; None if there are none yet."""
        is_full = len(self._taken) == self.LAG
        oldest = self._taken.pop(0) if is_full else HostCopy()
        seen = oldest.read() if is_full else None
        oldest.start(values)
        self._taken.append(oldest)
        return seen


class DevicePolicy(OnDevice):
    """The numbers of the rule in device memory, where graphs read the current ones at each replay.

    They are fp64: scalar arguments of a kernel would be fp32, in which 1.1 is another number.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__([0.0] * abi.POLICY)
        self.memory = self.on(device)
        self.held: tuple[Any, ...] = ()  # the numbers and limits that are in it

    def hold(self, numbers: Numbers, limits: Limits) -> Tensor:
        """Set the values, if they differ, and return their tensor."""
        if self.held != (numbers, limits):
            self.held = ()  # unknown if the copy is interrupted
            with sync_allowed(self.memory.device):
                if self.memory.is_cuda:  # updates and replays that are queued, on any stream, use the old values
                    torch.cuda.synchronize(self.memory.device)
                self.set([*numbers, limits.min_scale, limits.max_scale, limits.hysteresis])
            self.held = numbers, limits
        return self.memory


class Updater:
    """How a scale and its tracker are updated: by a kernel, by Python (`on_host`) or by torch's ops."""

    def __init__(self, scale: Any, growth_tracker: Any, ours: Ours) -> None:
        self.scale, self.growth_tracker, self.device = scale, growth_tracker, scale.device
        self.rows: FlagRows = ours.rows_on(scale.device)
        self.by_kernel = choose_for_scale(scale, ours.steps.requested) == "triton"
        self.stream = stream_of(scale, ours.steps.requested)
        # Fake tensors cannot be read.
        on_host = not self.by_kernel and scale.is_cpu and type(scale) is type(growth_tracker) is Tensor
        self.on_host = on_host and ours.headroom is None
        values = ours.counters.values
        self.counters: Any = values if self.on_host and isinstance(values, list) else ours.counters.on(scale.device)
        if self.by_kernel:
            self.policy = ours.policies.get(self.device) or DevicePolicy(self.device)
            ours.policies[self.device] = self.policy
            self.launch = self._launch(ours)
        if self.on_host:
            self.counted = self.counters if isinstance(self.counters, list) else host_memory(self.counters)
            self.tracker = host_memory(growth_tracker.view(-1))
            self.address = growth_tracker.data_ptr()  # of that memory, which users may replace

    def _launch(self, ours: Ours) -> Any:
        """Return the kernel's launch where all flags are the scaler's own; a new scale or tracker changes nothing."""
        before, rows = ours.updater, self.rows
        if before is not None and before.by_kernel and before.rows is rows and before.counters is self.counters:
            return before.launch
        options = {} if ours.headroom is None else ours.headroom.options(rows.measured)
        tensors = rows.status, rows.last_flags, self.policy.memory, self.counters
        return kernels().update_scale.bind_update(*tensors, clear=True, for_good=True, **options)


def update_by_flags(
    scaler: GradScaler, scale: Tensor, tracker: Tensor, checked: Sequence[Any], captured: bool, *, keep: bool = False
) -> None:
    """Update the scale by the flags of the `checked` steps; a kernel also clears those that are the scaler's own.

    It does not with `keep`, as some are still to be used.
    """
    ours = scaler._ours
    updater, limits, exposed = ours.updater, ours.limits, ours.steps.exposed
    if (
        updater is None
        or updater.scale is not scale
        or updater.growth_tracker is not tracker
        or updater.counters is not ours.counters.values
        or (updater.on_host and updater.address != tracker.data_ptr())
    ):
        _check_numbers(scale, tracker)
        updater = ours.updater = Updater(scale, tracker, ours)
    numbers = scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
    if updater.on_host:
        found_inf = False
        for step in checked:
            flag: Any = step.flag if not exposed else _own_flag(step)
            if flag is not None:
                found_inf |= flag.is_set()
            else:
                found_inf |= any(each.item() != 0.0 for each in step["found_inf_per_device"].values())
        update_on_host_(scale, updater.tracker, found_inf, numbers, limits, updater.counted)
        return
    if updater.by_kernel and updater.policy.held != (numbers, limits):
        updater.policy.hold(numbers, limits)
    mask = 0
    for step in checked:
        flag = step.flag if not exposed else _own_flag(step)
        if keep or not updater.by_kernel or flag is None or flag.rows is not updater.rows:
            _update_by_any_flag(ours, scale, tracker, checked, numbers)
            return
        mask |= 1 << flag.row
        if flag.reader is not None and not captured and flag.reader != updater.stream():  # a fused step may read it
            torch.cuda.current_stream(updater.device).wait_stream(kernels().launch.stream(updater.device, flag.reader))
    updater.launch(scale, tracker, mask)
    increment_version((scale,))  # as torch's op does: a loss that was scaled before cannot be differentiated after it
    for step in checked:
        step.flag.saved, step.flag.cleared = True, not (captured or step.flag in updater.rows.captured)


def _own_flag(step: Any) -> Flag | None:
    """Return a step's flag if it is the scaler's own; other code may have written flags, or put in its own mappings."""
    return step.own_flag() if hasattr(step, "own_flag") else None


def _saved_any_flag(checked: Sequence[Any], device: torch.device) -> Tensor:
    """Save the flags that graphs write, and return whether any of the steps' flags is set, fp32 `()` on `device`."""
    for step in checked:
        if (flag := _own_flag(step)) is not None:
            flag.save()
    return any_flag((flag for step in checked for flag in step["found_inf_per_device"].values()), device)


def _update_by_any_flag(ours: Ours, scale: Tensor, tracker: Tensor, checked: Sequence[Any], numbers: Numbers) -> None:
    """Update where no kernel does it, or not all flags are the scaler's own."""
    updater: Any = ours.updater
    headroom = ours.headroom
    flag = _saved_any_flag(checked, updater.device)
    measured = None if headroom is None else headroom.measured_by(checked, updater.device)
    if not updater.by_kernel:
        update_by_ops_(scale, tracker, flag, numbers, ours.limits, updater.counters, headroom, measured)
        return
    options = {} if headroom is None else headroom.options(measured)
    tensors = flag, flag, updater.policy.memory, updater.counters
    kernels().update_scale.bind_update(*tensors, clear=False, **options)(scale, tracker, 1)
    increment_version((scale,))


def set_scale(scaler: GradScaler, new_scale: Any, checked: Sequence[Any]) -> None:
    """Set the scale; this counts as an update if gradients were checked."""
    ours, scale = scaler._ours, scaler._scale
    if isinstance(new_scale, Tensor) and (
        new_scale.device.type != scaler._device or new_scale.numel() != 1 or new_scale.requires_grad
    ):
        raise AssertionError(
            "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
            "torch.FloatTensor with requires_grad=False."
        )
    if isinstance(new_scale, bool):  # torch refuses it, too
        raise TypeError(f"new_scale must be a number, got {new_scale}")
    number, (low, high, *_) = policy.check_number("scale", new_scale, "new_scale"), ours.limits
    if not low <= policy.as_fp32(number) <= high:
        raise ValueError(f"new_scale must be in [min_scale, max_scale], [{low}, {high}], got {new_scale!r}")
    if checked:  # as an update that changes neither scale nor tracker
        counters, found_inf = ours.counters.on(scale.device), _saved_any_flag(checked, scale.device)
        counters.copy_(_counted(counters, found_inf != 0, scale, scale, keeps_strikes=True))
    if ours.headroom is not None:  # the overflow that lowered the cap may have had another cause than the scale
        ours.headroom.on(scale.device)[abi.CAP].clamp_(min=number)
    scale.fill_(number)
    ours.lagging = LaggingCounters()  # skips before it no longer count


def check_streak(scaler: GradScaler) -> None:
    """Raise SkipStreakError if too many updates in a row were skipped."""
    ours, limit = scaler._ours, scaler._ours.limits.max_consecutive_skips
    seen = ours.lagging.push(ours.counters.on(scaler._scale.device))
    if seen is not None and limit is not None and seen[STREAK] > limit:
        by_now = "" if ours.guard is not None else f"; by now the scale is {scaler.get_scale()}"
        raise SkipStreakError(
            f"{count_of(seen[STREAK], 'consecutive skip')}, more than max_consecutive_skips={limit} "
            f"(raised {LaggingCounters.LAG} updates late{by_now}). {ScalerStats.of(seen)}\n"
            f"{scaler.overflow_report()}"  # this rank's only: not all ranks may get here
        )


def write_numbers(scaler: GradScaler) -> None:
    """Write the rule's numbers to the memory that graphs read at each replay."""
    for held in scaler._ours.policies.values():  # none on a disabled scaler, which may lack the numbers
        held.hold((scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval), scaler._ours.limits)


def _check_numbers(scale: Any, growth_tracker: Any) -> None:
    """Raise torch's errors for an illegal scale or tracker: users may replace both, and a kernel takes any address."""
    if not isinstance(scale, Tensor) or not isinstance(growth_tracker, Tensor):
        torch._amp_update_scale_(scale, growth_tracker, torch.zeros(()), 2.0, 0.5, 1)  # raises torch's TypeError
    if growth_tracker.device != scale.device:
        raise RuntimeError(f"growth_tracker must be on {scale.device}, as the scale is, got {growth_tracker.device}")
    if not growth_tracker.numel() == scale.numel() == 1:
        name = "growth_tracker" if growth_tracker.numel() != 1 else "current_scale"
        raise RuntimeError(f"{name} must be a 1-element tensor.")
    if growth_tracker.dtype is not torch.int32:
        raise RuntimeError("growth_tracker must be an int tensor.")
    if scale.dtype not in (torch.float32, torch.float64):  # integers would back off to 0
        raise RuntimeError("current_scale must be a float tensor.")


def update_on_host_(
    scale: Tensor,
    tracker: memoryview[Any],
    found_inf: bool,
    numbers: Numbers,
    limits: Limits,
    counters: memoryview[Any] | list[int],
) -> None:
    """Update a scale (fp32 or fp64) on the CPU in Python's doubles, in which torch's op multiplies, too.

    Tracker and counters are numbers in memory, as an op of torch's would cost half as much as all of this.
    """
    growth_factor, backoff_factor, interval = numbers
    before = value = scale.item()
    counters[UPDATES] += 1
    if found_inf:
        counters[abi.SKIPPED] += 1
        counters[STREAK] += 1
        counters[abi.STRIKES] += 1
        counters[abi.LAST_SKIP] = counters[UPDATES]
        tracker[0] = 0
        if counters[abi.STRIKES] >= limits.hysteresis:
            value = before * backoff_factor
    else:
        counters[STREAK] = 0
        good = tracker[0] + 1
        if good >= interval:
            tracker[0] = counters[abi.STRIKES] = 0
            if abs(before * growth_factor) < _ROUNDS_TO_INF:  # false of NaN
                value = before * growth_factor
        elif good <= MAX_TRACKER:
            tracker[0] = good
    if not limits.min_scale <= value <= limits.max_scale:
        value = limits.clamp(value)
    if value == before:
        increment_version((scale,))  # as if the same value was written, which torch's op does
        return
    scale.fill_(value)
    after = scale.item()  # perhaps rounded back
    counters[abi.GROWTHS] += after > before
    counters[abi.BACKOFFS] += after < before


def update_by_ops_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    numbers: Numbers,
    limits: Limits,
    counters: Tensor,
    headroom: HeadroomRule | None = None,
    measured: Tensor | None = None,
) -> None:
    """Update on any device without a host wait; if memory runs out, nothing has changed.

    With `headroom` the rule moves its cap, and what was `measured` (fp64 [1, MEASURED_ROW]) the scale below that.
    """
    bad, ruled = found_inf.reshape(()) != 0, scale
    if headroom is not None:
        ruled = torch.where(bad, scale, headroom.on(scale.device)[abi.CAP].to(scale.dtype))
    after = ruled.clone()
    growth, backoff, interval = numbers
    # torch's op grows only at tracker + 1 == interval: with this cap a tracker beyond it grows, too (difference 3).
    tracker = growth_tracker.clamp(max=min(interval, MAX_TRACKER) - 1)
    reachable = interval if interval <= MAX_TRACKER else 0  # CUDA's kernel would take it modulo 2^32
    torch._amp_update_scale_(after, tracker, found_inf, growth, backoff, reachable)
    if limits.hysteresis > 1:
        spared = bad & (counters[abi.STRIKES] + 1 < limits.hysteresis)
        after = torch.where(spared, ruled, after)
    after = _clamped(after, limits)
    if headroom is not None and measured is not None:
        headroom.on(scale.device)[abi.CAP] = after.reshape(())
        fits = headroom.scale_below(after.reshape(()), scale.reshape(()), measured, bad)
        after = torch.where(bad, after, _clamped(fits.to(after.dtype), limits))
    counted = _counted(counters, bad, scale, after, keeps_strikes=tracker.reshape(()) != 0)
    for held, value in ((scale, after), (growth_tracker, tracker), (counters, counted)):
        held.copy_(value)


def _counted(counters: Tensor, bad: Tensor, scale: Tensor, after: Tensor, *, keeps_strikes: Tensor | bool) -> Tensor:
    """Return the counters after an update that moves the scale; strikes are kept at least until the scale may grow."""
    updates, skipped, streak, growths, backoffs, last_skip, strikes, spikes = counters.unbind()
    updates = updates + 1
    return torch.stack([
        updates,
        skipped + bad,
        (streak + 1) * bad,
        growths + (after > scale).reshape(()),
        backoffs + (after < scale).reshape(()),
        torch.where(bad, updates, last_skip),
        (strikes + bad) * (bad | keeps_strikes),
        spikes,
    ])  # fmt: skip


def _clamped(scale: Tensor, limits: Limits) -> Tensor:
    low, high = limits.min_scale, limits.max_scale
    return scale.nan_to_num(nan=low, posinf=high).clamp(low, high)

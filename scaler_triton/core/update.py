"""The update rule: growth, backoff and limits of the scale, and the counters that `stats` returns.

    if found_inf: strikes += 1; tracker = 0; scale *= backoff_factor if strikes >= hysteresis else 1
    elif tracker + 1 < growth_interval: tracker += 1
    else: scale = scale * growth_factor if that is finite else scale; tracker = strikes = 0
    scale = clamp(scale, min_scale, max_scale)                # NaN becomes min_scale

This is `torch._amp_update_scale_` except for >= and the limits. Products are computed in fp64 and rounded once to fp32,
as in torch. Hysteresis is that of Megatron's `DynamicGradScaler` (megatron/core/optimizer/grad_scaler.py). There are
three implementations with the same bits: Python for a scale on the CPU, torch's ops, and `kernels/update_scale.py`. A
room may set the scale by another rule, of which this one is a part: see `Rule`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton import policy
from scaler_triton.core.dispatch import choose_for_scale, is_captured, kernels, stream_of, sync_allowed
from scaler_triton.core.flag import Flag, any_flag
from scaler_triton.core.memory import HostCopy, OnDevice
from scaler_triton.core.put_off import PutOff
from scaler_triton.core.step import OptimizerStep
from scaler_triton.core.torch_ops import host_memory, increment_version
from scaler_triton.kernels import abi
from scaler_triton.kernels.abi import MAX_TRACKER, STREAK, UPDATES
from scaler_triton.policy import NO_LIMITS, Limits, no_counters

if TYPE_CHECKING:
    from scaler_triton.core.check import Checks

_ROUNDS_TO_INF = 2.0**128 - 2.0**103  # the smallest double that fp32 rounds to infinity

Numbers = tuple[float, float, int]  # growth_factor, backoff_factor, growth_interval


class SkipStreakError(FloatingPointError):
    """More updates in a row were skipped than `max_consecutive_skips` allows."""


class Counters(OnDevice):
    """A scaler's counters, int64 [COUNTERS] on a device."""

    dtype = torch.int64

    def __init__(self) -> None:
        super().__init__(no_counters())
        self.copy = HostCopy(self.values)
        self.settle: Callable[[], None] = lambda: None  # brings them up to date: `Updates.settle`

    def set(self, values: Sequence[int]) -> None:
        """Write other values."""
        self.settle()
        super().set(values)
        self.copy = HostCopy(list(values))  # what was copied before is older

    def skip_count_on(self, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that returns the number of skips on `device`, int32 [1], which updates write."""
        return functools.partial(self._skip_count, device)

    def _skip_count(self, device: torch.device) -> Tensor:
        low_words = self.on(device).view(torch.int32)[::2]
        return low_words[abi.SKIPPED : abi.SKIPPED + 1]

    def read_skips(self) -> int:
        """Return the number of skips, waiting for the device."""
        return int(self.values[abi.SKIPPED])

    def read(self) -> list[int]:
        """Return a copy of the values, waiting for the device."""
        self.settle()
        values = super().read()
        self.copy = HostCopy(values)
        return values

    def newest(self) -> list[int]:
        """Return the newest values that have arrived on the host, and start the next copy; never waits on CUDA."""
        self.settle()
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


class Rule:
    """Another rule for the scale, of which torch's is a part: torch's then moves a number of the rule's own.

    It reads what looks keep with each flag (`FlagRows.extra`), fp64 rows.
    """

    def row_of(self, checked: Sequence[Any], device: torch.device) -> Tensor:
        """Return one row, [1, n_extra], on `device`, for all the `checked` steps together."""
        raise NotImplementedError

    def launch_options(self, rows: Any) -> dict[str, Any]:
        """Return the arguments with which `bind_update` follows the rule, given such rows."""
        raise NotImplementedError

    def moved(self, scale: Tensor, bad: Tensor) -> Tensor:
        """Return what torch's rule is to move: the scale if the update is `bad`, or the rule's own number."""
        raise NotImplementedError

    def scale_after(self, moved: Tensor, scale: Tensor, row: Tensor, bad: Tensor) -> Tensor:
        """Return the scale after an update, before it is clamped; `moved` is what torch's rule has made of that."""
        raise NotImplementedError


class Updater:
    """How a scale and its tracker are updated: by a kernel, by Python (`on_host`) or by torch's ops."""

    def __init__(self, scale: Any, growth_tracker: Any, ours: Updates) -> None:
        self.scale, self.growth_tracker, self.device = scale, growth_tracker, scale.device
        requested = ours.checks.requested
        self.rows = ours.checks.rows_on(scale.device)
        self.by_kernel = choose_for_scale(scale, requested) == "triton"
        self.stream = stream_of(scale, requested)
        # Fake tensors cannot be read.
        on_host = not self.by_kernel and scale.is_cpu and type(scale) is type(growth_tracker) is Tensor
        self.on_host = on_host and ours.rule is None
        values = ours.counters.values
        self.counters: Any = values if self.on_host and isinstance(values, list) else ours.counters.on(scale.device)
        if self.by_kernel:
            self.policy = ours.policies.get(self.device) or DevicePolicy(self.device)
            ours.policies[self.device] = self.policy
            self.launch = self._launch(ours)
        if self.on_host:
            self.counted = ours.counters.on_host()
            self.tracker = host_memory(growth_tracker.view(-1))
            self.address = growth_tracker.data_ptr()  # of that memory, which users may replace

    def serves(self, scale: Tensor, tracker: Tensor, counters: Any) -> bool:
        """Return whether it was made for these; users may replace all of them, and their memory."""
        return (
            self.scale is scale
            and self.growth_tracker is tracker
            and self.counters is counters
            and not (self.on_host and self.address != tracker.data_ptr())
        )

    def wait_for(self, stream: int | None) -> None:
        """Have the current stream wait for the one with this handle, if it is another; None: for none."""
        if stream is not None and stream != self.stream():
            other = kernels().launch.stream(self.device, stream)
            torch.cuda.current_stream(self.device).wait_stream(other)

    def _launch(self, ours: Updates) -> Any:
        """Return the kernel's launch where all flags are the scaler's own; a new scale or tracker changes nothing."""
        before, rows = ours.updater, self.rows
        if before is not None and before.by_kernel and before.counters is self.counters:
            return before.launch
        options = {} if ours.rule is None else ours.rule.launch_options(rows.extra)
        tensors = rows.status, rows.last_flags, self.policy.memory, self.counters
        return kernels().update_scale.bind_update(*tensors, clear=True, for_good=True, **options)


class Updates:
    """The updates of one scaler: its counters and limits, and the memory that they are made in.

    Args:
        counters: those of the scaler.
        checks: the scaler's, for the rows of its flags.
    """

    def __init__(self, counters: Counters, checks: Checks) -> None:
        self.counters, self.checks = counters, checks
        self.limits: Limits = NO_LIMITS
        self.rule: Rule | None = None  # None: torch's
        self.lagging = LaggingCounters()
        self.policies: dict[torch.device, DevicePolicy] = {}
        self.updater: Updater | None = None  # of the scale that was updated last
        self.put_off = PutOff()
        counters.settle = self.settle

    def by_flags(
        self,
        scale: Tensor,
        tracker: Tensor,
        checked: Sequence[Any],
        numbers: Numbers,
        *,
        captured: bool = False,
        keep: bool = False,
    ) -> None:
        """Update the scale by the flags of the `checked` steps; a kernel also clears those that are the scaler's own.

        Args:
            scale, tracker: torch's; written.
            checked: steps with flags, or dicts of torch's.
            numbers: growth factor, backoff factor, growth interval.
            captured: whether the update is recorded into a graph.
            keep: clear no flag, as some are still to be used.
        """
        updater = self.updater
        if updater is None or not updater.serves(scale, tracker, self.counters.values):
            updater = self._make_updater(scale, tracker)
        if updater.on_host:
            found_inf, exposed = False, self.checks.steps.exposed
            for step in checked:
                if exposed or step.outcome is not False:  # else the host has read them
                    for flag in step["found_inf_per_device"].values():
                        found_inf |= flag.item() != 0.0  # NaN is set, too
            update_on_host_(scale, updater.tracker, found_inf, numbers, self.limits, updater.counted)
            return
        self._on_device(updater, checked, numbers, captured, keep)

    def _make_updater(self, scale: Tensor, tracker: Tensor) -> Updater:
        _check_numbers(scale, tracker)
        self.settle()
        self.put_off.forget()
        self.updater = Updater(scale, tracker, self)
        return self.updater

    def _on_device(
        self, updater: Updater, checked: Sequence[Any], numbers: Numbers, captured: bool, keep: bool
    ) -> None:
        """Update the scale on its device, or put that off."""
        put_off = self.put_off
        may_put_off = not (put_off.is_over or captured or self.rule or self.checks.steps.exposed)
        if may_put_off and put_off.takes(updater, checked, numbers, self.limits):
            return
        self._catch_up(captured)
        if keep or not updater.by_kernel or not self._by_kernel(updater, checked, numbers, captured):
            self._by_any_flag(updater, checked, numbers)
        if may_put_off:
            put_off.after_launch(updater, checked, numbers, self.limits)

    def settle(self, *, for_good: bool = False) -> None:
        """Tell the device of the updates that were put off, as somebody is about to use the tracker or the counters.

        While a graph is captured it is not told, as each replay would tell it again.

        Args:
            for_good: put off no more of them.
        """
        updater, put_off = self.updater, self.put_off
        needs_order = put_off.is_ahead() or put_off.stream is not None
        if updater is not None and needs_order and not is_captured(updater.scale):
            put_off.tell(updater)
        if for_good:
            put_off.is_over = True

    def _catch_up(self, captured: bool) -> None:
        """Have the update that comes now follow all before it."""
        if not captured:
            self.settle()
            self.put_off.stream = None
            return
        if self.put_off.is_ahead():
            raise RuntimeError(
                "an update cannot be captured in a graph before the GPU knows of all updates so far: "
                "call scaler.stats() before the capture"
            )
        self.put_off.is_over = True  # replays will update, too

    def _by_kernel(self, updater: Updater, checked: Sequence[Any], numbers: Numbers, captured: bool) -> bool:
        """Update in one launch, which also saves and clears the flags, if all are the scaler's own; return whether."""
        rows, flags, mask = updater.rows, [], 0
        for step in checked:
            flag = _own_flag(step)
            if flag is None or flag.rows is not rows:
                return False
            flags.append(flag)
            mask |= 1 << flag.row
        if updater.policy.held != (numbers, self.limits):
            updater.policy.hold(numbers, self.limits)
        for flag in flags:
            if flag.reader is not None and not captured:  # a fused step may read it
                updater.wait_for(flag.reader)
        updater.launch(updater.scale, updater.growth_tracker, mask)
        increment_version((updater.scale,))  # as torch's op: a loss scaled before it cannot be differentiated after it
        for flag in flags:
            flag.is_saved, flag.is_zero = True, not (captured or flag in rows.of_graphs)
        return True

    def _by_any_flag(self, updater: Updater, checked: Sequence[Any], numbers: Numbers) -> None:
        """Update where no kernel does it, or not all flags are the scaler's own."""
        flag, rule = _saved_any_flag(checked, updater.device), self.rule
        scale, tracker = updater.scale, updater.growth_tracker
        row = None if rule is None else rule.row_of(checked, updater.device)
        if not updater.by_kernel:
            update_by_ops_(scale, tracker, flag, numbers, self.limits, updater.counters, rule, row)
            return
        updater.policy.hold(numbers, self.limits)
        options = {} if rule is None else rule.launch_options(row)
        tensors = flag, flag, updater.policy.memory, updater.counters
        kernels().update_scale.bind_update(*tensors, clear=False, **options)(scale, tracker, 1)
        increment_version((scale,))

    def by_value(self, scale: Tensor, new_scale: Any, checked: Sequence[Any], device_type: str) -> float:
        """Set the scale and return it; this counts as an update if gradients were checked."""
        if isinstance(new_scale, Tensor) and (
            new_scale.device.type != device_type or new_scale.numel() != 1 or new_scale.requires_grad
        ):
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                "torch.FloatTensor with requires_grad=False."
            )
        if isinstance(new_scale, bool):  # torch refuses it, too
            raise TypeError(f"new_scale must be a number, got {new_scale}")
        number, (low, high, *_) = policy.check_number("scale", new_scale, "new_scale"), self.limits
        if not low <= policy.as_fp32(number) <= high:
            raise ValueError(f"new_scale must be in [min_scale, max_scale], [{low}, {high}], got {new_scale!r}")
        self._catch_up(is_captured(scale))
        if checked:  # as an update that changes neither scale nor tracker
            counters, found_inf = self.counters.on(scale.device), _saved_any_flag(checked, scale.device)
            counters.copy_(_counted(counters, found_inf != 0, scale, scale, keeps_strikes=True))
        scale.fill_(number)
        self.lagging = LaggingCounters()  # skips before it no longer count
        return float(number)

    def too_many_skips(self, scale: Tensor) -> list[int] | None:
        """Return the counters of `LAG` updates ago if they show more skips in a row than the limit; else None."""
        limit = self.limits.max_consecutive_skips
        seen = self.lagging.push(self.counters.on(scale.device))
        return seen if seen is not None and limit is not None and seen[STREAK] > limit else None

    def write_numbers(self, numbers: Numbers) -> None:
        """Write the rule's numbers to the memory that graphs read at each replay."""
        for policy_ in self.policies.values():
            policy_.hold(numbers, self.limits)


def _own_flag(step: Any) -> Flag | None:
    """Return a step's flag if it is the scaler's own; other code may have written flags, or put in its own mappings."""
    return step.own_flag() if type(step) is OptimizerStep else None


def _saved_any_flag(checked: Sequence[Any], device: torch.device) -> Tensor:
    """Save the flags that graphs write, and return whether any of the steps' flags is set, fp32 `()` on `device`."""
    for step in checked:
        if (flag := _own_flag(step)) is not None:
            flag.save()
    return any_flag((flag for step in checked for flag in step["found_inf_per_device"].values()), device)


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
    rule: Rule | None = None,
    row: Tensor | None = None,
) -> None:
    """Update on any device without a host wait, perhaps by another rule; if memory runs out, nothing has changed."""
    bad = found_inf.reshape(()) != 0
    moved = scale if rule is None else rule.moved(scale, bad)
    after = moved.clone()
    growth, backoff, interval = numbers
    # torch's op grows only at tracker + 1 == interval: with this cap a tracker beyond it grows, too (difference 3).
    tracker = growth_tracker.clamp(max=min(interval, MAX_TRACKER) - 1)
    reachable = interval if interval <= MAX_TRACKER else 0  # CUDA's kernel would take it modulo 2^32
    torch._amp_update_scale_(after, tracker, found_inf, growth, backoff, reachable)
    if limits.hysteresis > 1:
        spared = bad & (counters[abi.STRIKES] + 1 < limits.hysteresis)
        after = torch.where(spared, moved, after)
    after = _clamped(after, limits)
    if rule is not None and row is not None:
        fits = rule.scale_after(after.reshape(()), scale.reshape(()), row, bad)
        after = torch.where(bad, after, _clamped(fits.to(after.dtype), limits))
    counted = _counted(counters, bad, scale, after, keeps_strikes=tracker.reshape(()) != 0)
    for tensor, value in ((scale, after), (growth_tracker, tracker), (counters, counted)):
        tensor.copy_(value)


def _counted(counters: Tensor, bad: Tensor, scale: Tensor, after: Tensor, *, keeps_strikes: Tensor | bool) -> Tensor:
    """Return the counters after an update that moves the scale; strikes are kept at least until the scale may grow."""
    updates, skipped, streak, growths, backoffs, last_skip, strikes, *others = counters.unbind()
    updates = updates + 1
    return torch.stack([
        updates,
        skipped + bad,
        (streak + 1) * bad,
        growths + (after > scale).reshape(()),
        backoffs + (after < scale).reshape(()),
        torch.where(bad, updates, last_skip),
        (strikes + bad) * (bad | keeps_strikes),
        *others,
    ])  # fmt: skip


def _clamped(scale: Tensor, limits: Limits) -> Tensor:
    low, high = limits.min_scale, limits.max_scale
    return scale.nan_to_num(nan=low, posinf=high).clamp(low, high)

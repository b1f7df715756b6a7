"""The update of scale, growth tracker and counters, by one program of one warp; it can clear the flags, too."""

import functools
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import launcher

# Between these the inverse of the scale is finite, and not 0.
MIN_SCALE = 2.0**-126
MAX_SCALE = torch.finfo(torch.float32).max
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_MAX_TRACKER = tl.constexpr(2**31 - 1)

# One lane for each flag.
MAX_FLAGS = tl.constexpr(32)
# Of a verdict's status: flag, failure, and two numbers that compare the ranks' scales.
_COLUMNS = tl.constexpr(4)

# The order of the policy's numbers, and of the counters.
_GROWTH, _BACKOFF, _INTERVAL, _MIN, _MAX, _HYSTERESIS, _CONSECUTIVE = map(tl.constexpr, range(7))
_UPDATES, _SKIPPED, _STREAK, _GROWTHS, _BACKOFFS, _LAST_SKIP, _STRIKES = map(tl.constexpr, range(7))
N_COUNTERS = 7


Waiting = Callable[[torch.device], AbstractContextManager[Any]]


class DevicePolicy:
    """The parameters of an update in device memory, where graphs read the current ones at each replay.

    Args:
        waiting: entered, with the device, around each wait for it.

    Attributes:
        numbers: int64 [7] on the device, in the order of `hold`'s arguments: the bits of an fp64, or an int. Scalar
            arguments of a kernel would be fp32, in which 1.1 is another number.
    """

    @torch.inference_mode(False)  # later updates write it outside that mode
    def __init__(self, device: torch.device, waiting: Waiting = nullcontext) -> None:
        self.numbers = torch.zeros(7, dtype=torch.int64, device=device)
        self._held: tuple[Any, ...] = ()
        self._waiting = waiting

    def hold(
        self,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> Tensor:
        """Set `numbers` and return them; nothing is copied if they are the same."""
        asked = growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis, consecutive_hysteresis
        if asked != self._held:
            self._held = ()  # an interrupted copy may have arrived or not
            with self._waiting(self.numbers.device):
                self._send(struct.unpack("7q", struct.pack("2dq2d2q", *asked)))
            self._held = asked
        return self.numbers

    def _send(self, bits: tuple[int, ...]) -> None:
        if self.numbers.is_cuda:  # updates, and replays, may be queued on any stream: they go by the old ones
            torch.cuda.synchronize(self.numbers.device)
        self.numbers.copy_(torch.tensor(bits, dtype=torch.int64, device="cpu"))


@triton.jit
def _fp64(policy_ptr, place: tl.constexpr):
    return tl.load(policy_ptr + place).to(tl.float64, bitcast=True)


@triton.jit
def _count(counters_ptr, found, scale, new_scale):
    """Count this update, except for strikes, on which the scale depends."""
    updates = tl.load(counters_ptr + _UPDATES) + 1
    tl.store(counters_ptr + _UPDATES, updates)
    streak = tl.load(counters_ptr + _STREAK)
    tl.store(counters_ptr + _STREAK, tl.where(found != 0, streak + 1, 0))
    if found != 0:
        tl.store(counters_ptr + _SKIPPED, tl.load(counters_ptr + _SKIPPED) + 1)
        tl.store(counters_ptr + _LAST_SKIP, updates)
    if new_scale > scale:
        tl.store(counters_ptr + _GROWTHS, tl.load(counters_ptr + _GROWTHS) + 1)
    if new_scale < scale:
        tl.store(counters_ptr + _BACKOFFS, tl.load(counters_ptr + _BACKOFFS) + 1)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["scale_ptr", "growth_tracker_ptr", "flags_ptr", "policy_ptr", "counters_ptr"],
)
def _update_scale_kernel(
    scale_ptr,
    growth_tracker_ptr,
    flags_ptr,
    policy_ptr,
    counters_ptr,
    rows: tl.int64,
    CLEAR: tl.constexpr,
):
    row = tl.arange(0, MAX_FLAGS)
    chosen = ((rows >> row) & 1) != 0
    flags = tl.load(flags_ptr + _COLUMNS * row, mask=chosen, other=0.0)
    found = tl.max((flags != 0.0).to(tl.int32), 0)  # NaN != 0
    scale = tl.load(scale_ptr)
    new_scale = scale
    new_tracker = tl.zeros((), tl.int64)
    strikes = tl.load(counters_ptr + _STRIKES)
    if found != 0:
        strikes += 1
        if strikes >= tl.load(policy_ptr + _HYSTERESIS):
            new_scale = (scale.to(tl.float64) * _fp64(policy_ptr, _BACKOFF)).to(tl.float32)
    else:
        successful = tl.load(growth_tracker_ptr).to(tl.int64) + 1
        due = successful >= tl.load(policy_ptr + _INTERVAL)
        if due:
            grown = (scale.to(tl.float64) * _fp64(policy_ptr, _GROWTH)).to(tl.float32)
            new_scale = tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)  # false of NaN
        else:
            new_tracker = tl.minimum(successful, _MAX_TRACKER)
        strikes = tl.where(due | (tl.load(policy_ptr + _CONSECUTIVE) != 0), 0, strikes)
    # Also brings whatever was written into the scale by hand within the bounds, NaN too.
    low, high = _fp64(policy_ptr, _MIN).to(tl.float32), _fp64(policy_ptr, _MAX).to(tl.float32)
    new_scale = tl.minimum(tl.where(new_scale > low, new_scale, low), high)
    tl.store(scale_ptr, new_scale)
    tl.store(growth_tracker_ptr, new_tracker.to(tl.int32))
    tl.store(counters_ptr + _STRIKES, strikes)
    _count(counters_ptr, found, scale, new_scale)
    if CLEAR:
        nothing = tl.zeros([MAX_FLAGS], tl.float32)
        tl.store(flags_ptr + _COLUMNS * row, nothing, mask=chosen)
        tl.store(flags_ptr + _COLUMNS * row + 1, nothing, mask=chosen)
        tl.store(flags_ptr + _COLUMNS * MAX_FLAGS + row, flags, mask=chosen)


def launch_update_rows(
    scale: Tensor, growth_tracker: Tensor, flags: Tensor, policy: Tensor, counters: Tensor, rows: int, *, clear: bool
) -> None:
    """Back the scale off after bad steps; grow it after `growth_interval` good ones in a row.

        bad = any(flags[row, 0] != 0 for row in rows)
        if bad:
            strikes, growth_tracker = strikes + 1, 0
            scale = scale * backoff_factor if strikes >= hysteresis else scale
        elif growth_tracker + 1 >= growth_interval:
            scale, growth_tracker = scale * growth_factor if that is finite else scale, 0
            strikes = 0
        else:
            growth_tracker += 1
            strikes = 0 if consecutive_hysteresis else strikes
        scale = clamp(scale, min_scale, max_scale)       # NaN becomes min_scale
        updates += 1
        if bad: skipped += 1; last_skip = updates
        streak = streak + 1 if bad else 0
        growths, backoffs = growths + (scale is larger), backoffs + (scale is smaller)
        if clear: last[rows], flags[rows] = flags[rows, 0], 0

    Products are taken in fp64 and rounded once to fp32, as torch does.

    Args:
        scale: fp32, one element, any shape, mutated.
        growth_tracker: int32, one element, on the scale's device, mutated; it stops at 2**31 - 1.
        flags: fp32 [n, 4], n <= 32, on the scale's device; NaN counts as bad. Column 0 is read.
        policy: what `DevicePolicy.hold` returned for the scale's device.
        counters: int64 [7] on the scale's device, mutated: updates, skipped, streak, growths, backoffs, last_skip and
            strikes.
        rows: bit mask of the rows of `flags` that count.
        clear: zero columns 0 and 1 of those rows afterwards, and keep column 0 in fp32 [32], `last`, that follows
            `flags` [32, 4] in memory.
    """
    _launch_on(scale.device, clear)(1, scale, growth_tracker, flags, policy, counters, rows)


def launch_update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """`launch_update_rows` for one flag, read only, and plain numbers, without limits; nothing is counted.

    Args:
        found_inf: fp32, one element, on the scale's device.
    """
    policy = _policy_on(scale.device, (growth_factor, backoff_factor, growth_interval))
    launch_update_rows(scale, growth_tracker, found_inf, policy, _scratch_on(scale.device), 1, clear=False)


@functools.cache
def _launch_on(device: torch.device, clear: bool) -> launcher.Launch:
    return launcher.Launch(_update_scale_kernel, device, num_warps=1, CLEAR=clear)


@functools.cache  # for ever: a graph may read it at each replay
def _policy_on(device: torch.device, numbers: tuple[Any, ...]) -> Tensor:
    launcher.refuse_first_in_capture(device)
    policy = DevicePolicy(device).hold(*numbers)
    torch.get_device_module(device).synchronize(device)  # the next call may be on another stream
    return policy


@functools.cache
def _scratch_on(device: torch.device) -> Tensor:
    return torch.zeros(N_COUNTERS, dtype=torch.int64, device=device)

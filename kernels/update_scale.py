"""The update of scale, growth tracker and counters, by one program of one warp; it can clear the flags, too."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.launch import Launch

_FLAG, _FAILED, _STATUS, _ROWS = map(tl.constexpr, (abi.FLAG, abi.FAILED, abi.STATUS, abi.ROWS))
_GROWTH_FACTOR, _BACKOFF_FACTOR, _GROWTH_INTERVAL, _MIN, _MAX, _HYSTERESIS = map(tl.constexpr, range(abi.POLICY))
_UPDATES, _SKIPPED, _STREAK, _GROWTHS, _BACKOFFS, _LAST_SKIP, _STRIKES = map(tl.constexpr, range(abi.SPIKES))
_MAX_SCALE, _MAX_TRACKER = tl.constexpr(abi.MAX_SCALE), tl.constexpr(abi.MAX_TRACKER)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "scale_ptr",
        "growth_tracker_ptr",
        "flags_ptr",
        "last_flags_ptr",
        "policy_ptr",
        "counters_ptr",
    ],
)
def _update_scale_kernel(
    scale_ptr,
    growth_tracker_ptr,
    flags_ptr,
    last_flags_ptr,
    policy_ptr,
    counters_ptr,
    rows: tl.int64,
    CLEAR: tl.constexpr,
):
    row = tl.arange(0, _ROWS)
    chosen = ((rows >> row) & 1) != 0
    flags = tl.load(flags_ptr + _STATUS * row + _FLAG, mask=chosen, other=0.0)
    found = tl.max((flags != 0.0).to(tl.int32), 0)  # NaN != 0
    scale = tl.load(scale_ptr)
    new_scale = scale
    new_tracker = tl.zeros((), tl.int64)
    strikes = tl.load(counters_ptr + _STRIKES)
    if found != 0:
        strikes += 1
        if strikes >= tl.load(policy_ptr + _HYSTERESIS):
            new_scale = (scale.to(tl.float64) * tl.load(policy_ptr + _BACKOFF_FACTOR)).to(tl.float32)
    else:
        successful = tl.load(growth_tracker_ptr).to(tl.int64) + 1
        due = successful >= tl.load(policy_ptr + _GROWTH_INTERVAL)
        if due:
            grown = (scale.to(tl.float64) * tl.load(policy_ptr + _GROWTH_FACTOR)).to(tl.float32)
            new_scale = tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)  # false of NaN
        else:
            new_tracker = tl.minimum(successful, _MAX_TRACKER)
        strikes = tl.where(due, 0, strikes)
    # Also brings whatever was written into the scale by hand within the bounds, NaN too.
    low, high = tl.load(policy_ptr + _MIN).to(tl.float32), tl.load(policy_ptr + _MAX).to(tl.float32)
    new_scale = tl.minimum(tl.where(new_scale > low, new_scale, low), high)
    tl.store(scale_ptr, new_scale)
    tl.store(growth_tracker_ptr, new_tracker.to(tl.int32))
    tl.store(counters_ptr + _STRIKES, strikes)
    _count(counters_ptr, found, scale, new_scale)
    if CLEAR:
        nothing = tl.zeros([_ROWS], tl.float32)
        tl.store(flags_ptr + _STATUS * row + _FLAG, nothing, mask=chosen)
        tl.store(flags_ptr + _STATUS * row + _FAILED, nothing, mask=chosen)
        tl.store(last_flags_ptr + row, flags, mask=chosen)


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


def launch_update(
    scale: Tensor,
    growth_tracker: Tensor,
    flags: Tensor,
    last_flags: Tensor,
    policy: Tensor,
    counters: Tensor,
    rows: int,
    *,
    clear: bool,
) -> None:
    """Back the scale off after bad steps; grow it after `growth_interval` good ones in a row.

        bad = any(flags[row, FLAG] != 0 for row in rows)
        if bad:
            strikes, growth_tracker = strikes + 1, 0
            scale = scale * backoff_factor if strikes >= hysteresis else scale
        elif growth_tracker + 1 >= growth_interval:
            scale, growth_tracker = scale * growth_factor if that is finite else scale, 0
            strikes = 0
        else:
            growth_tracker += 1
        scale = clamp(scale, min_scale, max_scale)       # NaN becomes min_scale
        updates += 1
        if bad: skipped += 1; last_skip = updates
        streak = streak + 1 if bad else 0
        growths, backoffs = growths + (scale is larger), backoffs + (scale is smaller)
        if clear: last_flags[rows], flags[rows, FLAG], flags[rows, FAILED] = flags[rows, FLAG], 0, 0

    Products are taken in fp64 and rounded once to fp32, as torch does.

    Args:
        scale: fp32, one element, any shape, mutated.
        growth_tracker: int32, one element, on the scale's device, mutated; it stops at 2**31 - 1.
        flags: fp32 [n, STATUS], n <= ROWS, on the scale's device; mutated if `clear`. NaN counts as bad. Where only
            row 0 counts, a tensor of one element will do.
        last_flags: fp32 [ROWS], on the scale's device, mutated if `clear`; else any tensor, which is not touched.
        policy: fp64 [POLICY], on the scale's device, read only: in the order of `abi`.
        counters: int64 [COUNTERS], on the scale's device, mutated.
        rows: bit mask of the rows of `flags` that count.
        clear: zero the flags of those rows afterwards, and keep them in `last_flags`.
    """
    _launch_on(scale.device, clear)(1, scale, growth_tracker, flags, last_flags, policy, counters, rows)


@functools.cache
def _launch_on(device: torch.device, clear: bool) -> Launch:
    return Launch(_update_scale_kernel, device, num_warps=1, CLEAR=clear)

"""The update of scale, growth tracker and counters, by one program of one warp; it can clear the flags, too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.launch import Launch

_FLAG, _FAILED, _STATUS, _ROWS = map(tl.constexpr, (abi.FLAG, abi.FAILURE, abi.STATUS, abi.ROWS))
_GROWTH_FACTOR, _BACKOFF_FACTOR, _GROWTH_INTERVAL, _MIN, _MAX, _HYSTERESIS = map(tl.constexpr, range(abi.POLICY))
_UPDATES, _SKIPPED, _STREAK, _GROWTHS, _BACKOFFS, _LAST_SKIP, _STRIKES = map(tl.constexpr, range(abi.SPIKES))
_LARGEST, _MEASURED_AT, _MEASURED_ROW = map(tl.constexpr, (abi.LARGEST, abi.MEASURED_AT, abi.MEASURED_ROW))
_EXPONENTS, _CAP, _HEADROOM_HEADER = map(tl.constexpr, (abi.EXPONENTS, abi.CAP, abi.HEADROOM_HEADER))
_FP16_EXPONENT = tl.constexpr(abi.FP16_EXPONENT)
_MAX_SCALE, _MAX_TRACKER = tl.constexpr(abi.MAX_SCALE), tl.constexpr(abi.MAX_TRACKER)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=range(8))  # all pointers
def _update_scale_kernel(
    flags_ptr,
    last_flags_ptr,
    policy_ptr,
    counters_ptr,
    measured_ptr,
    headroom_ptr,
    scale_ptr,
    growth_tracker_ptr,
    rows: tl.int64,
    CLEAR: tl.constexpr,
    HEADROOM: tl.constexpr,  # the block that holds the ring of WINDOW exponents; 0: torch's rule alone
    WINDOW: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.arange(0, _ROWS)
    chosen = ((rows >> row) & 1) != 0
    flags = tl.load(flags_ptr + _STATUS * row + _FLAG, mask=chosen, other=0.0)
    found = tl.max((flags != 0.0).to(tl.int32), 0)  # NaN != 0
    scale = tl.load(scale_ptr)
    ruled = scale  # what growth and backoff move: the scale, or its cap
    if HEADROOM > 0:
        ruled = tl.where(found != 0, scale, tl.load(headroom_ptr + _CAP).to(tl.float32))
    new_scale = ruled
    new_tracker = tl.zeros((), tl.int64)
    strikes = tl.load(counters_ptr + _STRIKES)
    if found != 0:
        strikes += 1
        if strikes >= tl.load(policy_ptr + _HYSTERESIS):
            new_scale = (ruled.to(tl.float64) * tl.load(policy_ptr + _BACKOFF_FACTOR)).to(tl.float32)
    else:
        successful = tl.load(growth_tracker_ptr).to(tl.int64) + 1
        due = successful >= tl.load(policy_ptr + _GROWTH_INTERVAL)
        if due:
            grown = (ruled.to(tl.float64) * tl.load(policy_ptr + _GROWTH_FACTOR)).to(tl.float32)
            new_scale = tl.where(tl.abs(grown) <= _MAX_SCALE, grown, ruled)  # false of NaN
        else:
            new_tracker = tl.minimum(successful, _MAX_TRACKER)
        strikes = tl.where(due, 0, strikes)
    low, high = tl.load(policy_ptr + _MIN).to(tl.float32), tl.load(policy_ptr + _MAX).to(tl.float32)
    new_scale = _within(new_scale, low, high)
    if HEADROOM > 0:
        tl.store(headroom_ptr + _CAP, new_scale.to(tl.float64))
        if found == 0:
            new_scale = _by_headroom(scale, new_scale, measured_ptr, headroom_ptr, chosen, HEADROOM, WINDOW, BITS)
            new_scale = _within(new_scale, low, high)
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
def _within(scale, low, high):
    """The scale within its bounds, even if NaN or whatever else was written into it by hand."""
    return tl.minimum(tl.where(scale > low, scale, low), high)


@triton.jit
def _by_headroom(
    scale, cap, measured_ptr, headroom_ptr, chosen, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, BITS: tl.constexpr
):
    """The scale that leaves BITS powers of 2 above the largest gradient of the last good updates, at most the cap."""
    place = measured_ptr + _MEASURED_ROW * tl.arange(0, _ROWS)
    largest = tl.load(place + _LARGEST, mask=chosen, other=0.0)
    unscaled = tl.max(largest / tl.load(place + _MEASURED_AT, mask=chosen, other=1.0), 0)
    exponent = ((unscaled.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    count = tl.load(headroom_ptr + _EXPONENTS).to(tl.int64)
    slot, enters = count % WINDOW, unscaled > 0
    if enters:
        tl.store(headroom_ptr + _HEADROOM_HEADER + slot, exponent.to(tl.float64))
        tl.store(headroom_ptr + _EXPONENTS, (count + 1).to(tl.float64))
    # The newest is not read, as other lanes may not see what was just stored.
    lane = tl.arange(0, BLOCK_SIZE)
    known = (lane < tl.minimum(count, WINDOW)) & (lane != tl.where(enters, slot, -1))
    top = tl.max(tl.load(headroom_ptr + _HEADROOM_HEADER + lane, mask=known, other=-4096.0), 0).to(tl.int64)
    top = tl.where(enters, tl.maximum(top, exponent), top)
    power = tl.minimum(tl.maximum(-(BITS + top) + _FP16_EXPONENT, -1022), 1023)
    target = ((power + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(enters | (count > 0), tl.minimum(target, cap.to(tl.float64)).to(tl.float32), scale)


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


def bind_update(
    flags: Tensor,
    last_flags: Tensor,
    policy: Tensor,
    counters: Tensor,
    *,
    clear: bool,
    for_good: bool = False,
    measured: Tensor | None = None,
    headroom: Tensor | None = None,
    bits: int = 0,
) -> Callable[[Tensor, Tensor, int], None]:
    """Return a function of the scale, its growth tracker and `rows`, which launches an update.

        bad = any(flags[row, FLAG] != 0 for row in rows)
        unscaled = max(measured[row, LARGEST] / measured[row, MEASURED_AT] for row in rows)   # with `headroom`
        scale, growth_tracker, strikes, headroom = by the rules of `core/update.py` and `measuring/headroom.py`
        updates += 1
        if bad: skipped += 1; last_skip = updates
        streak = streak + 1 if bad else 0
        growths, backoffs = growths + (scale is larger), backoffs + (scale is smaller)
        if clear: last_flags[rows], flags[rows, FLAG], flags[rows, FAILURE] = flags[rows, FLAG], 0, 0

    Its arguments are the scale, fp32, one element, any shape; the growth tracker, int32, one element, which stops at
    2**31 - 1; both on one device, mutated; and a bit mask of the rows of `flags` that count.

    Args:
        flags: fp32 [n, STATUS], n <= ROWS, on the scale's device; mutated if `clear`. NaN counts as bad. Where only
            row 0 counts, a tensor of one element will do.
        last_flags: fp32 [ROWS], on the scale's device, mutated if `clear`; else any tensor, which is not touched.
        policy: fp64 [POLICY], on the scale's device, read only: in the order of `abi`.
        counters: int64 [COUNTERS], on the scale's device, mutated.
        clear: zero the flags of the rows that count afterwards, and keep them in `last_flags`.
        for_good: for many updates, which ask the tensors for their addresses once; the first of them is slower.
        measured: fp64 [n, MEASURED_ROW], on the scale's device, read only; needed with `headroom`.
        headroom: fp64 [HEADROOM_HEADER + n], on the scale's device, mutated, see `abi`; None for torch's rule alone.
        bits: powers of 2 that are left free.
    """
    window = 0 if headroom is None else len(headroom) - abi.HEADROOM_HEADER
    measured, headroom = policy if measured is None else measured, policy if headroom is None else headroom
    tensors = flags, last_flags, policy, counters, measured, headroom
    if for_good:
        return functools.partial(_launch_on.__wrapped__(flags.device, clear, window, bits, fixed=tensors), 1)
    return functools.partial(_launch_on(flags.device, clear, window, bits), 1, *tensors)


@triton.jit(do_not_specialize=["tracker", "updates"], do_not_specialize_on_alignment=range(2))
def _write_counts_kernel(growth_tracker_ptr, counters_ptr, tracker: tl.int64, updates: tl.int64):
    tl.store(growth_tracker_ptr, tracker.to(tl.int32))
    tl.store(counters_ptr + _UPDATES, updates)


def launch_counts(growth_tracker: Tensor, counters: Tensor, tracker: int, updates: int) -> None:
    """Write what the host has counted: `growth_tracker[:] = tracker; counters[UPDATES] = updates`.

    A launch is whole or not at all, whatever interrupts the host or intercepts torch's ops, and may be repeated.

    Args:
        growth_tracker: int32, one element, mutated.
        counters: int64 [COUNTERS], on the same device, mutated.
        tracker, updates: the numbers, in [0, 2**31) and [0, 2**63).
    """
    _counts_on(counters.device)(1, growth_tracker, counters, tracker, updates)


@functools.cache
def _counts_on(device: torch.device) -> Launch:
    return Launch(_write_counts_kernel, device, num_warps=1)


@functools.cache
def _launch_on(device: torch.device, clear: bool, window: int, bits: int, fixed: Sequence[Tensor] = ()) -> Launch:
    constants: dict[str, Any] = {"CLEAR": clear, "HEADROOM": 0, "WINDOW": window, "BITS": bits}
    if window:
        constants["HEADROOM"] = triton.next_power_of_2(window)
    return Launch(_update_scale_kernel, device, fixed=fixed, num_warps=1, **constants)

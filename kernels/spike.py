"""The decision whether a norm is a spike: mean and deviation of the norms before it, by one program.

Sums are taken in a fixed order, neighbours first, and without fused multiply-adds: `guard/spikes.py` computes the same
bits with torch's ops.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.clip import write_status
from scaler_triton.kernels.launch import Launch

_SQUARES, _OVERFLOWS = tl.constexpr(abi.SQUARES), tl.constexpr(abi.OVERFLOWS)
_COUNT, _LAST, _IS_SPIKE, _SPIKE_NORM, _SPIKE_LIMIT, _SPIKE_GENERATION, _SIGMA = map(tl.constexpr, range(abi.SIGMA + 1))
_HEADER = tl.constexpr(abi.HEADER)
_FLAG, _SKIPPED, _SPIKES = map(tl.constexpr, (abi.FLAG, abi.SKIPPED, abi.SPIKES))


@triton.jit(
    do_not_specialize=["window", "ranks", "first"],
    do_not_specialize_on_alignment=["totals_ptr", "status_ptr", "window_ptr", "counters_ptr"],
)
def _judge_kernel(
    totals_ptr,
    status_ptr,
    window_ptr,
    counters_ptr,
    window: tl.int64,
    ranks: tl.int64,
    first: tl.int64,
    BLOCK_SIZE: tl.constexpr,
):
    count = tl.load(window_ptr + _COUNT).to(tl.int64)
    before, was_spike = tl.load(window_ptr + _LAST), tl.load(window_ptr + _IS_SPIKE)
    enters = (first != 0) & (before - before == 0)  # false of NaN and Inf
    slot = count % window
    count += enters.to(tl.int64)

    # Oldest first; the newest is still to be stored.
    n = tl.minimum(count, window)
    place = tl.arange(0, BLOCK_SIZE)
    old = place < n - enters.to(tl.int64)
    norms = tl.load(window_ptr + _HEADER + (count - n + place) % window, mask=old, other=0.0)
    norms = tl.where((place == n - 1) & enters, before, norms)
    mean = _sum(norms, BLOCK_SIZE) / n.to(tl.float64)
    apart = tl.where(place < n, norms - mean, 0.0)
    deviation = tl.sqrt(_sum(apart * apart, BLOCK_SIZE) / (n - 1).to(tl.float64))
    thousandth = tl.full((), 1e-3, tl.float64)  # a literal would be fp32
    limit = mean + tl.load(window_ptr + _SIGMA) * tl.maximum(deviation, thousandth * mean)

    norm = tl.sqrt(tl.load(totals_ptr + _SQUARES))
    is_spike = (n >= tl.maximum(2, window // 2)) & (norm > limit) & (norm - norm == 0)
    last = tl.where(is_spike & (limit > 0), limit, norm)
    spikes = tl.load(counters_ptr + _SPIKES) + is_spike.to(tl.int64)
    if first == 0:  # the same step is judged again
        spikes -= was_spike.to(tl.int64)
    overflows, skipped = tl.load(totals_ptr + _OVERFLOWS), tl.load(counters_ptr + _SKIPPED)

    tl.debug_barrier()  # every warp loads these few numbers and one stores them, after all have loaded
    if enters:
        tl.store(window_ptr + _HEADER + slot, before)
        tl.store(window_ptr + _COUNT, count.to(tl.float64))
    tl.store(window_ptr + _LAST, last)
    tl.store(window_ptr + _IS_SPIKE, is_spike.to(tl.float64))
    tl.store(counters_ptr + _SPIKES, spikes)
    if is_spike:
        tl.store(window_ptr + _SPIKE_NORM, norm)
        tl.store(window_ptr + _SPIKE_LIMIT, limit)
        tl.store(window_ptr + _SPIKE_GENERATION, skipped.to(tl.float64))
    if is_spike | (norm - norm != 0):
        overflows = tl.maximum(overflows, 1.0)
        tl.store(totals_ptr + _OVERFLOWS, overflows)
        tl.store(status_ptr + _FLAG, 1.0)
    write_status(totals_ptr, overflows, status_ptr, ranks)


@triton.jit
def _sum(x, BLOCK_SIZE: tl.constexpr):
    """The sum of a block: of neighbours, then of neighbours among these sums, and so on."""
    if BLOCK_SIZE == 1:
        return tl.sum(x)
    else:
        return _sum(tl.sum(tl.reshape(x, [BLOCK_SIZE // 2, 2]), 1), BLOCK_SIZE // 2)


def launch_judge(
    totals: Tensor, status: Tensor, window: Tensor, counters: Tensor, length: int, ranks: int, *, first: bool
) -> None:
    """Decide whether a norm is a spike among the last finite ones, and skip the step if it is, or is not finite.

        if first and isfinite(window[LAST]): append(h, window[LAST])              # h: the ring, of `length` norms
        norm = sqrt(totals[SQUARES])
        spike, limit = the rule that `StepGuard` states, of norm and h
        window[LAST] = limit if spike and limit > 0 else norm
        if spike or not isfinite(norm): totals[OVERFLOWS] = max(totals[OVERFLOWS], 1); status[FLAG] = 1
        if ranks: status = the same as `launch_clip` writes

    Args:
        totals: fp64 [TOTALS], the ranks' sums; mutated.
        status: fp32 [STATUS], on the same device, as everything here; mutated.
        window: fp64 [HEADER + length], see `abi`; mutated.
        counters: int64 [COUNTERS]; SPIKES is mutated.
        length: in [2, MAX_WINDOW].
        ranks: the number of ranks in the sums, 0 for this one alone.
        first: False if the norm judged last was of the same step, and is replaced.
    """
    _launch_on(window.device, triton.next_power_of_2(length))(
        1, totals, status, window, counters, length, ranks, int(first)
    )


@functools.cache
def _launch_on(device: torch.device, block_size: int) -> Launch:
    warps = warps_of(block_size)
    return Launch(_judge_kernel, device, num_warps=warps, enable_fp_fusion=False, BLOCK_SIZE=block_size)


def warps_of(block_size: int) -> int:
    """Return how many warps of 32 lanes hold a window: a lane has up to 8 norms."""
    return max(1, min(16, block_size // 256))

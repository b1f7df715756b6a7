"""The update of scale and counters in plain torch, and in Python where both are on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from scaler_triton.limits import NO_LIMITS, Limits
from scaler_triton.policy import MAX_TRACKER
from scaler_triton.stats import BACKOFFS, GROWTHS, LAST_SKIP, SKIPPED, STREAK, STRIKES, UPDATES, Counters

# Doubles from here on round to infinity in fp32.
_ROUNDS_TO_INF = 2.0**128 - 2.0**103


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    limits: Limits = NO_LIMITS,
    counters: Counters | None = None,
) -> None:
    """Back the scale off after an overflow, let it grow after `growth_interval` good steps.

        if found_inf: strikes += 1; tracker = 0; scale *= backoff_factor if strikes >= hysteresis else 1
        elif tracker + 1 < growth_interval: tracker += 1
        else: scale = scale * growth_factor if that is finite else scale; tracker = strikes = 0
        scale = clamp(scale, min_scale, max_scale)   # NaN becomes min_scale

    Equivalent: `torch._amp_update_scale_`, but for >= and the limits. Hysteresis is Megatron's `DynamicGradScaler`
    (megatron/core/optimizer/grad_scaler.py); with `consecutive_hysteresis` every good step clears the strikes, as
    DeepSpeed's option of that name and apex's `update_scale_hysteresis` do.

    Args:
        scale: fp32, one element; written.
        growth_tracker: int32, one element, same device; written.
        found_inf: fp32, one element, same device; anything but 0 is an overflow.
        counters: count this update; None: nothing is counted, nor overflows for hysteresis.
    """
    counters = Counters() if counters is None else counters
    numbers = growth_factor, backoff_factor, growth_interval
    if scale.is_cpu and type(scale) is Tensor:  # fake tensors cannot be read
        _update_on_host_(scale, growth_tracker, found_inf.item(), numbers, limits, counters.on_host())
    else:
        update_on_device_(scale, growth_tracker, found_inf, numbers, limits, counters.on(scale.device))


def update_on_device_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    numbers: tuple[float, float, int],
    limits: Limits,
    counters: Tensor,
) -> None:
    """`update_scale_` without a host wait, on any device; if memory runs out, nothing has changed."""
    bad, after = found_inf.reshape(()) != 0, scale.clone()
    # torch grows at tracker + 1 == interval: capped, the tracker cannot be beyond.
    tracker = growth_tracker.clamp(max=min(numbers[2], MAX_TRACKER) - 1)
    growth, backoff, interval = numbers
    reachable = interval if interval <= MAX_TRACKER else 0  # CUDA's kernel would take it modulo 2^32
    torch._amp_update_scale_(after, tracker, found_inf, growth, backoff, reachable)
    if limits.hysteresis > 1:
        spared = bad & (counters[STRIKES] + 1 < limits.hysteresis)
        after = torch.where(spared, scale, after)
    after.nan_to_num_(nan=limits.min_scale, posinf=limits.max_scale).clamp_(limits.min_scale, limits.max_scale)
    refilled = torch.ones_like(bad) if limits.consecutive_hysteresis else tracker.reshape(()) == 0
    counted = _counted(counters, bad, refilled, (after > scale).reshape(()), (after < scale).reshape(()))
    for held, value in ((scale, after), (growth_tracker, tracker), (counters, counted)):
        held.copy_(value)


def count_(scale: Tensor, found_inf: Tensor, limits: Limits, counters: Counters) -> None:
    """Count an update that sets the scale to a number, as one that changes neither scale nor tracker; no host wait.

    Args:
        scale: where the updates are counted; left as it is.
        found_inf: fp32, one element, same device; anything but 0 is an overflow.
        counters: written.
    """
    one, tracker = torch.ones_like(scale, dtype=torch.float32), torch.zeros_like(scale, dtype=torch.int32)
    unbounded = limits._replace(min_scale=NO_LIMITS.min_scale, max_scale=NO_LIMITS.max_scale)
    update_scale_(one, tracker, found_inf, 1.0, 1.0, MAX_TRACKER, unbounded, counters)


def _counted(counters: Tensor, bad: Tensor, refilled: Tensor, larger: Tensor, smaller: Tensor) -> Tensor:
    """Return the counters after one more update; all flags are bool, ()."""
    updates, skipped, streak, growths, backoffs, last_skip, strikes = counters.unbind()
    updates = updates + 1
    streak, last_skip = (streak + 1) * bad, torch.where(bad, updates, last_skip)
    strikes = (strikes + bad) * (bad | ~refilled)
    return torch.stack([updates, skipped + bad, streak, growths + larger, backoffs + smaller, last_skip, strikes])


def _update_on_host_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: float,
    numbers: tuple[float, float, int],
    limits: Limits,
    counters: list[int],
) -> None:
    """The same in Python's doubles, in which torch's op multiplies, too; quicker than ops on one number."""
    growth_factor, backoff_factor, interval = numbers
    before, successful = scale.item(), int(growth_tracker.item()) + 1
    value, tracker = before, 0
    _count_flag(counters, found_inf)
    if found_inf:
        if counters[STRIKES] >= limits.hysteresis:
            value = before * backoff_factor
    else:
        if successful < interval:
            tracker = min(successful, MAX_TRACKER)
        elif abs(before * growth_factor) < _ROUNDS_TO_INF:  # false of NaN
            value = before * growth_factor
        if limits.consecutive_hysteresis or not tracker:
            counters[STRIKES] = 0
    value = min(value, limits.max_scale) if value > limits.min_scale else limits.min_scale  # that for NaN
    if value != before:
        scale.fill_(value)
        _count_change(counters, before, scale.item())
    growth_tracker.fill_(tracker)


def _count_flag(counters: list[int], found_inf: float) -> None:
    counters[UPDATES] += 1
    if not found_inf:
        counters[STREAK] = 0
        return
    counters[SKIPPED] += 1
    counters[STREAK] += 1
    counters[STRIKES] += 1
    counters[LAST_SKIP] = counters[UPDATES]


def _count_change(counters: list[int], before: float, after: float) -> None:
    if after > before:
        counters[GROWTHS] += 1
    elif after < before:  # neither for NaN, nor if the product rounds back
        counters[BACKOFFS] += 1

"""The ops in plain torch: the path of every device without kernels of ours, and the oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scaler_triton.limits import NO_LIMITS, Limits
from scaler_triton.neighbours import Neighbours
from scaler_triton.policy import MAX_TRACKER
from scaler_triton.stats import BACKOFFS, GROWTHS, LAST_SKIP, SKIPPED, STREAK, STRIKES, UPDATES, Counters

# From this size on a tensor on the CPU is checked by its sum, which only reads. Smaller ones are left to torch's op: it
# takes them all in one call, and to write back the same bits to the cache is two to four times quicker than any sum.
_LARGE_BYTES = 1 << 17
# From here on a double becomes an infinite fp32.
_ROUNDS_TO_INF = 2.0**128 - 2.0**103


def unscale_(
    tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, neighbours: Neighbours | None = None
) -> None:
    """Multiply every gradient by `inv_scale` and set `found_inf` to 1 if one held NaN or Inf before.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, for tensors of one device and dtype, also for
    bf16 where that op has none.

    Args:
        tensors: fp16, bf16, fp32 or fp64, any shape and layout torch's op takes; written.
        inv_scale: fp32, one element, on the same device.
        found_inf: fp32, one element, on the same device; written only to become 1.
        neighbours: what is known of this list from earlier steps.
    """
    if not tensors:
        return
    if tensors[0].dtype is torch.bfloat16 and not tensors[0].is_cpu:
        _unscale_bf16_(tensors, inv_scale, found_inf)
    elif tensors[0].dtype is torch.float64 and not tensors[0].is_cpu:
        _check_fp64(tensors, found_inf)
        torch._foreach_mul_(list(tensors), inv_scale.double().reshape(()))
    else:
        merged = (neighbours or Neighbours()).merged(tensors)
        torch._amp_foreach_non_finite_check_and_unscale_(merged, found_inf, inv_scale)  # type: ignore[arg-type]


def check_nonfinite(tensors: Sequence[Tensor], found_inf: Tensor, neighbours: Neighbours | None = None) -> None:
    """Set `found_inf` to 1 if a gradient holds NaN or Inf; gradients keep their bits.

    Args: as `unscale_`.
    """
    if not tensors:
        return
    if not tensors[0].is_cpu:
        if tensors[0].dtype is torch.float64:
            _check_fp64(tensors, found_inf)
        else:
            unscale_(tensors, torch.ones_like(found_inf), found_inf, neighbours)
        return
    small = []
    for tensor in (neighbours or Neighbours()).merged(tensors):
        if tensor.nbytes < _LARGE_BYTES:
            small.append(tensor)
        elif _nonfinite_alone(tensor):
            found_inf.fill_(1.0)
    if small:
        torch._amp_foreach_non_finite_check_and_unscale_(small, found_inf, torch.ones_like(found_inf))


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
        counters: count this update; None: nothing is counted, and hysteresis has no memory.
    """
    counters = Counters() if counters is None else counters
    numbers = growth_factor, backoff_factor, growth_interval
    if scale.is_cpu and type(scale) is Tensor:  # nobody can read torch's fake ones
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
    """`update_scale_` without a host wait, on any device; where memory runs out nothing has changed."""
    bad, after = found_inf.reshape(()) != 0, scale.clone()
    # torch grows at tracker + 1 == interval: capped below it, the tracker cannot have passed.
    tracker = growth_tracker.clamp(max=min(numbers[2], MAX_TRACKER) - 1)
    torch._amp_update_scale_(after, tracker, found_inf, *numbers)
    if limits.hysteresis > 1:
        spared = bad & (counters[STRIKES] + 1 < limits.hysteresis)
        after = torch.where(spared, scale, after)
    after.nan_to_num_(nan=limits.min_scale, posinf=limits.max_scale).clamp_(limits.min_scale, limits.max_scale)
    refilled = torch.ones_like(bad) if limits.consecutive_hysteresis else tracker.reshape(()) == 0
    counted = _counted(counters, bad, refilled, (after > scale).reshape(()), (after < scale).reshape(()))
    for held, value in ((scale, after), (growth_tracker, tracker), (counters, counted)):
        held.copy_(value)


def count_(scale: Tensor, found_inf: Tensor, limits: Limits, counters: Counters) -> None:
    """Count an update that sets the scale to a number; no host wait.

    Args:
        scale: where the updates are counted; left as it is.
        found_inf: fp32, one element, same device; anything but 0 is an overflow.
        counters: written.
    """
    if scale.is_cpu and type(scale) is Tensor:
        numbers, bad = counters.on_host(), found_inf.item()
        _count_flag(numbers, bad)
        if limits.consecutive_hysteresis and not bad:
            numbers[STRIKES] = 0
    else:
        held, flag = counters.on(scale.device), found_inf.reshape(()) != 0
        no = torch.zeros_like(flag)
        held.copy_(_counted(held, flag, ~no if limits.consecutive_hysteresis else no, no, no))


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
    """Do the same in Python's doubles, which is what torch's op multiplies in; an op on one number costs more."""
    growth_factor, backoff_factor, interval = numbers
    low, high, hysteresis, consecutive = limits
    before, successful = scale.item(), int(growth_tracker.item()) + 1
    value, tracker = before, 0
    _count_flag(counters, found_inf)
    if found_inf:
        if counters[STRIKES] >= hysteresis:
            value = before * backoff_factor
    else:
        if successful < interval:
            tracker = min(successful, MAX_TRACKER)
        elif abs(before * growth_factor) < _ROUNDS_TO_INF:  # false of NaN
            value = before * growth_factor
        if consecutive or not tracker:
            counters[STRIKES] = 0
    value = min(value, high) if value > low else low
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
    elif after < before:  # neither is true of NaN, nor of a product that rounds back
        counters[BACKOFFS] += 1


def _unscale_bf16_(tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    # inv_scale as a bf16 operand would be rounded: multiply in fp32, round once.
    for tensor in tensors:
        wide = tensor.float()
        found_inf.copy_(torch.maximum(found_inf, (~wide.isfinite().all()).to(found_inf.dtype)))
        tensor.copy_(wide.mul_(inv_scale.reshape(())))  # a scale of shape (1,) would not go into a scalar


def _check_fp64(tensors: Sequence[Tensor], found_inf: Tensor) -> None:
    # torch's own op on a GPU looks at them as fp32, where large ones are infinite.
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
    found_inf.copy_(torch.maximum(found_inf, (~finite).to(found_inf.dtype)))


def _nonfinite_alone(tensor: Tensor) -> bool:
    # A finite sum proves every term finite; one that overflowed, as fp16 may, proves nothing.
    if math.isfinite(tensor.sum().item()):
        return False
    low, high = tensor.aminmax()  # both propagate NaN
    return not bool((low.isfinite() & high.isfinite()).item())

"""The scale after a step, in one program of one warp: nothing waits on the host, and no flag is left set."""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import launcher

# Between these the inverse of the scale is finite and not 0.
_MIN_SCALE = tl.constexpr(2.0**-126)
_MAX_SCALE = tl.constexpr(torch.finfo(torch.float32).max)
_MAX_TRACKER = tl.constexpr(2**31 - 1)


# One lane of the only program for each flag.
MAX_FLAGS = tl.constexpr(32)


class DevicePolicy:
    """growth_factor, backoff_factor and growth_interval on a device, where a replayed graph reads what they are then.

    Attributes:
        numbers: int64 [3] on the device: the bits of two fp64, and the interval. As scalar arguments they would reach
            the kernel as fp32, and 1.1 is not the same number there.
    """

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(3, dtype=torch.int64, device=device)
        self._held: tuple[float, float, int] | None = None

    def hold(self, growth_factor: float, backoff_factor: float, growth_interval: int) -> Tensor:
        """Return `numbers`, which hold these now; nothing is copied if they did before."""
        wanted = (growth_factor, backoff_factor, growth_interval)
        if wanted != self._held:
            bits = [*np.array(wanted[:2], dtype=np.float64).view(np.int64).tolist(), growth_interval]
            self.numbers.copy_(torch.tensor(bits, dtype=torch.int64, device="cpu"))
            self._held = wanted
        return self.numbers


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["scale_ptr", "growth_tracker_ptr", "flags_ptr", "policy_ptr"],
)
def _update_scale_kernel(
    scale_ptr,
    growth_tracker_ptr,
    flags_ptr,
    policy_ptr,
    rows: tl.int64,
    CLEAR: tl.constexpr,
):
    row = tl.arange(0, MAX_FLAGS)
    chosen = ((rows >> row) & 1) != 0
    flags = tl.load(flags_ptr + 2 * row, mask=chosen, other=0.0)
    found = tl.max((flags != 0.0).to(tl.int32), 0)  # NaN != 0
    scale = tl.load(scale_ptr)
    new_scale = scale
    new_tracker = tl.zeros((), tl.int64)
    if found != 0:
        backoff_factor = tl.load(policy_ptr + 1).to(tl.float64, bitcast=True)
        new_scale = (scale.to(tl.float64) * backoff_factor).to(tl.float32)
    else:
        successful = tl.load(growth_tracker_ptr).to(tl.int64) + 1
        if successful >= tl.load(policy_ptr + 2):
            growth_factor = tl.load(policy_ptr).to(tl.float64, bitcast=True)
            grown = (scale.to(tl.float64) * growth_factor).to(tl.float32)
            new_scale = tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)  # false of NaN
        else:
            new_tracker = tl.minimum(successful, _MAX_TRACKER)
    # Whatever was written into the scale from outside, NaN too, ends within the bounds.
    tl.store(scale_ptr, tl.minimum(tl.where(new_scale > _MIN_SCALE, new_scale, _MIN_SCALE), _MAX_SCALE))
    tl.store(growth_tracker_ptr, new_tracker.to(tl.int32))
    if CLEAR:
        nothing = tl.zeros([MAX_FLAGS], tl.float32)
        tl.store(flags_ptr + 2 * row, nothing, mask=chosen)
        tl.store(flags_ptr + 2 * row + 1, nothing, mask=chosen)


def launch_update_rows(
    scale: Tensor, growth_tracker: Tensor, flags: Tensor, policy: Tensor, rows: int, *, clear: bool
) -> None:
    """Back the scale off after a bad step; grow it after `growth_interval` good ones in a row.

        if any(flags[row, 0] != 0 for row in rows):
            scale, growth_tracker = scale * backoff_factor, 0
        elif growth_tracker + 1 >= growth_interval:
            scale, growth_tracker = scale * growth_factor if that is finite else scale, 0
        else:
            growth_tracker += 1
        scale = clamp(scale, 2**-126, fp32 max)       # NaN becomes 2**-126
        if clear: flags[rows] = 0

    Products are taken in fp64 and rounded once to fp32, as torch does.

    Args:
        scale: fp32, one element, any shape, mutated.
        growth_tracker: int32, one element, on the scale's device, mutated; it stops at 2**31 - 1.
        flags: fp32 [n, 2], n <= 32, on the scale's device; NaN counts as bad. Column 0 is read.
        policy: what `DevicePolicy.hold` returned for the scale's device.
        rows: which of the flags count, one bit each.
        clear: zero both columns of those rows afterwards.
    """
    _launch_on(scale.device, clear)(1, scale, growth_tracker, flags, policy, rows)


def launch_update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """`launch_update_rows` for one flag, read only, and plain numbers.

    Args:
        found_inf: fp32, one element, on the scale's device.
    """
    policy = _policy_on(scale.device, (growth_factor, backoff_factor, growth_interval))
    launch_update_rows(scale, growth_tracker, found_inf, policy, 1, clear=False)


@functools.cache
def _launch_on(device: torch.device, clear: bool) -> launcher.Launch:
    return launcher.Launch(_update_scale_kernel, device, num_warps=1, CLEAR=clear)


@functools.lru_cache(maxsize=16)
def _policy_on(device: torch.device, numbers: tuple[float, float, int]) -> Tensor:
    return DevicePolicy(device).hold(*numbers)

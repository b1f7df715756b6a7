"""The scale after a step, in one program: 12 bytes read, 8 written, nothing waits on the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import launcher

# Between these the inverse of the scale is finite and not 0.
_MIN_SCALE = tl.constexpr(2.0**-126)
_MAX_SCALE = tl.constexpr(torch.finfo(torch.float32).max)
_MAX_TRACKER = tl.constexpr(2**31 - 1)


# An unannotated Python float would reach the compiled kernel as fp32, and 1.1 is not the same number there.
@triton.jit(
    do_not_specialize=["growth_interval"],
    do_not_specialize_on_alignment=["scale_ptr", "growth_tracker_ptr", "found_inf_ptr"],
)
def _update_scale_kernel(
    scale_ptr,
    growth_tracker_ptr,
    found_inf_ptr,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
):
    scale = tl.load(scale_ptr)
    new_scale = scale
    new_tracker = tl.zeros((), tl.int64)
    if tl.load(found_inf_ptr) != 0.0:  # true of NaN
        new_scale = (scale.to(tl.float64) * backoff_factor).to(tl.float32)
    else:
        successful = tl.load(growth_tracker_ptr).to(tl.int64) + 1
        if successful >= growth_interval:
            grown = (scale.to(tl.float64) * growth_factor).to(tl.float32)
            new_scale = tl.where(tl.abs(grown) <= _MAX_SCALE, grown, scale)  # false of NaN
        else:
            new_tracker = tl.minimum(successful, _MAX_TRACKER)
    # Whatever was written into the scale from outside, NaN too, ends within the bounds.
    tl.store(scale_ptr, tl.minimum(tl.where(new_scale > _MIN_SCALE, new_scale, _MIN_SCALE), _MAX_SCALE))
    tl.store(growth_tracker_ptr, new_tracker.to(tl.int32))


def launch_update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Back the scale off after a bad step; grow it after `growth_interval` good ones in a row.

        if found_inf != 0:
            scale, growth_tracker = scale * backoff_factor, 0
        elif growth_tracker + 1 >= growth_interval:
            scale, growth_tracker = scale * growth_factor if that is finite else scale, 0
        else:
            growth_tracker += 1
        scale = clamp(scale, 2**-126, fp32 max)       # NaN becomes 2**-126

    Products are taken in fp64 and rounded once to fp32, as torch does.

    Args:
        scale: fp32, one element, any shape, mutated.
        growth_tracker: int32, one element, on the scale's device, mutated; it stops at 2**31 - 1.
        found_inf: fp32, one element, on the scale's device, read only; NaN counts as bad.
    """
    assert scale.dtype == found_inf.dtype == torch.float32
    assert growth_tracker.dtype == torch.int32
    launcher.launch(
        _update_scale_kernel,
        1,
        scale.device,
        scale,
        growth_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
        num_warps=1,
    )

"""Clocks for a GPU whose L2 cache holds nothing of use when they start."""

import time
from collections.abc import Callable
from typing import Any

import torch

HEAD_START = 20_000_000  # cycles the GPU idles first, some 10 ms: the host has launched everything by then


class ColdClock:
    """Seconds of a call on the GPU, which starts with a cold L2 cache.

    Args:
        device_only: time the device's work alone: it begins when the host has launched all of it. Otherwise what a
            user waits, from the call to the end of its work.
    """

    def __init__(self, *, device_only: bool) -> None:
        self._device_only = device_only
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 1 << 26
        self._junk = torch.zeros(l2_bytes, dtype=torch.int32, device="cuda")  # four times the cache
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, run: Callable[[], Any]) -> float:
        """Return the seconds that `run` takes."""
        self._junk.sum()  # read, not written: a pass that only reads would have to write dirty lines back
        return self._device_seconds(run) if self._device_only else self._wall_seconds(run)

    def _device_seconds(self, run: Callable[[], Any]) -> float:
        begin, end = self._marks
        torch.cuda._sleep(HEAD_START)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def _wall_seconds(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin) * 1e-9


def torch_serves(dtype: torch.dtype) -> bool:
    """Tell whether torch's own op takes gradients of this dtype on the GPU."""
    gradient, flag, inverse = torch.ones(4, dtype=dtype, device="cuda"), *torch.ones(2, 1, device="cuda")
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)
    except RuntimeError:
        return False
    return True

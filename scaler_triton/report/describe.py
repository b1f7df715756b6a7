"""What `repr` says of a scaler or a guard: where it is, its numbers, its skips.

It never waits for the device and calls no other rank. On CUDA it looks for what has arrived on the host for a
millisecond, and says so where newer numbers are still on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import backend_so_far, is_captured
from scaler_triton.core.memory import HostCopy
from scaler_triton.stats import ScalerStats
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.update import Counters
    from scaler_triton.parts import Parts

LOOK = 1e-3  # seconds
_BEHIND = "newer numbers are on their way"


def describe(ours: Parts, device: str, scale: Any, init_scale: float) -> str:
    """Return such as "cuda, triton; scale 65536; 120 updates, 2 skipped, the last at 39".

    Args:
        ours: the scaler's.
        device: the type of the scale's device.
        scale, init_scale: the scale, and what it is said to be as long as that is None, or not known on the host.
    """
    end = time.monotonic() + LOOK
    known, is_new = ours.described(scale, init_scale, lambda copy, source: _look(copy, source, end))
    counters = ours.counters
    is_new &= isinstance(counters.values, list) or _look(counters.copy, counters.values, end, counters.settle)
    backend = backend_so_far(device, ours.checks.requested)
    return "; ".join([f"{device}, {backend}", *known, _counted(counters), *([] if is_new else [_BEHIND])])


def _look(copy: HostCopy, source: Any, end: float, settle: Callable[[], None] = lambda: None) -> bool:
    """Read what has arrived on the host until the time `end`, of what `settle` brings up to date; is it of now?"""
    # In torch's fake mode a copy would be fake, and stay the one that `metrics` reads.
    if type(torch.empty(0, device="cpu")) is not Tensor or is_captured(source):
        return False
    with suppress(Exception):  # whoever asks for a repr may be about to say what is wrong
        settle()
        for _ in range(2):  # the first copy may have been started long ago
            copy.newest(source)
            while not copy.has_arrived():
                if time.monotonic() > end:
                    return False
        copy.newest(source)
        return True
    return False


def _counted(counters: Counters) -> str:
    values = counters.values
    stats = ScalerStats.of(values if isinstance(values, list) else counters.copy.latest)
    if not stats.updates:
        return "no update yet"
    skips = f"{stats.skipped} skipped, the last at {stats.last_skip}" if stats.skipped else "none skipped"
    return f"{count_of(stats.updates, 'update')}, {skips}"

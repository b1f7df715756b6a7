"""What `repr` says of a scaler or a guard: where it is, its numbers, its skips.

It never waits for the device and calls no other rank. On CUDA it looks for what has arrived on the host for a
millisecond, and says so where newer numbers are still on their way.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.dispatch import backend_so_far, is_captured
from scaler_triton.flag import HostCopy
from scaler_triton.text import count_of
from scaler_triton.update import ScalerStats

if TYPE_CHECKING:
    from scaler_triton.check import Ours
    from scaler_triton.grad_scaler import GradScaler

LOOK = 1e-3  # seconds
_BEHIND = "newer numbers are on their way"


def describe(scaler: GradScaler) -> str:
    """Return such as "GradScaler(cuda, triton; scale 65536; 120 updates, 2 skipped, the last at 39)"."""
    name, held = type(scaler).__name__, vars(scaler)
    if "_enabled" not in held:
        return f"{name}(no __init__ has run)"
    if not held["_enabled"]:
        return f"{name}({held['_device']}, disabled)"
    ours, scale = scaler._ours, held.get("_scale")
    parts, end = (
        [f"{held['_device']}, {backend_so_far(held['_device'], ours.steps.requested)}"],
        time.monotonic() + LOOK,
    )
    is_new = True
    if ours.guard is None:
        is_new = scale is None or _look(ours.scale_copy, scale, end)
        known = ours.scale_copy.latest
        number = held.get("_init_scale") if known is None or scale is None else known
        parts.append(f"scale {_shown(number[0] if isinstance(number, list) else number)}")
    elif not ours.by_norm:
        parts.append("no spike_sigma")
    else:
        for window in ours.guard.windows():
            is_new &= _look(window.copy, window.memory, end)
            parts.append(window.described())
        if len(parts) == 1:
            parts.append("no norm yet")
    is_new &= isinstance(ours.counters.values, list) or _look(ours.counters.copy, ours.counters.values, end)
    parts.append(_counted(ours))
    return f"{name}({'; '.join([*parts, *([] if is_new else [_BEHIND])])})"


def _look(copy: HostCopy, source: Any, end: float) -> bool:
    """Read what has arrived on the host until the time `end`; return whether it is of now."""
    # In torch's fake mode a copy would be fake, and stay the one that `metrics` reads.
    if type(torch.empty(0, device="cpu")) is not Tensor or is_captured(source):
        return False
    with suppress(Exception):  # whoever asks for a repr may be about to say what is wrong
        for _ in range(2):  # the first copy may have been started long ago
            copy.newest(source)
            while not copy.has_arrived():
                if time.monotonic() > end:
                    return False
        copy.newest(source)
        return True
    return False


def _counted(ours: Ours) -> str:
    values = ours.counters.values
    stats = ScalerStats.of(values if isinstance(values, list) else ours.counters.copy.latest)
    if not stats.updates:
        return "no update yet"
    skips = f"{stats.skipped} skipped, the last at {stats.last_skip}" if stats.skipped else "none skipped"
    return f"{count_of(stats.updates, 'update')}, {skips}"


def _shown(number: Any) -> str:
    return repr(float(number)).removesuffix(".0") if isinstance(number, int | float) else "unknown"

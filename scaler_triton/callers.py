"""The `stacklevel` of warnings, which should name the last line outside this package."""

from __future__ import annotations

import sys


def stacklevel() -> int:
    """Return the `stacklevel` with which a warning by the caller names the line that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "scaler_triton":
        level, frame = level + 1, frame.f_back
    return level

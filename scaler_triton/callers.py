"""Whose line a warning should name: the last one outside this package."""

from __future__ import annotations

import sys


def stacklevel() -> int:
    """Return the `stacklevel` with which a warning that the caller gives names the line that called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "scaler_triton":
        level, frame = level + 1, frame.f_back
    return level

"""Warnings, each with a code that docs/troubleshooting.md explains."""

from __future__ import annotations

import warnings

from scaler_triton.core.dispatch import stacklevel


class ScalerWarning(UserWarning):
    """What a scaler has noticed and cannot mend; the text begins with a code, such as "[ST03]"."""


def warn_once(warned: set[str], code: str, text: str) -> None:
    """Warn, unless one of this code, or of this text if there are several, was `warned` of before.

    Args:
        warned: the scaler's codes and texts so far; written.
        code: such as "ST03".
        text: what was seen, why it trains wrongly, and what to write instead.
    """
    if code not in warned:
        warned.add(code)
        warnings.warn(f"[{code}] {text}", ScalerWarning, stacklevel=stacklevel())

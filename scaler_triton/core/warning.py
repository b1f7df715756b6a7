"""Warnings, each with a code that docs/troubleshooting.md explains."""

from __future__ import annotations

import warnings

from scaler_triton.core.dispatch import stacklevel


class ScalerWarning(UserWarning):
    """What a scaler has noticed and cannot mend; the text begins with a code, such as "[STnn]"."""


def warn(code: str, text: str) -> None:
    """Warn, naming the innermost line that is neither the package's nor torch's.

    Args:
        code: of four letters and digits.
        text: what was seen, why it trains wrongly, and what to write instead.
    """
    warnings.warn(f"[{code}] {text}", ScalerWarning, stacklevel=stacklevel("scaler_triton", "torch"))


def warn_once(warned: set[str], code: str, text: str) -> None:
    """Warn, unless that code was `warned` of before by this scaler."""
    if code not in warned:
        warned.add(code)
        warn(code, text)

"""What the commands share: how they find what is missing, and how they say that something is wrong."""

import importlib.util
import sys
from collections.abc import Iterable


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return those of the top-level modules that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def complain(message: str, status: int = 2) -> int:
    """Print what is wrong and return the exit status: 2 for wrong usage, 1 for a failure."""
    print(f"scaler_triton: {message}", file=sys.stderr)
    return status

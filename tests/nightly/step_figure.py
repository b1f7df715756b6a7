"""What the figure of a step shows."""

import runpy
from pathlib import Path
from typing import Any

import pytest


def drawn(lane: str) -> list[Any]:
    """Return the works of docs/draw_step.py in its lane "TORCH" or "OURS"."""
    pytest.importorskip("matplotlib")
    works: list[Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs/draw_step.py"))[lane]
    return works

"""What ranks save, for the tests of `python -m scaler_triton audit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Command = Callable[..., tuple[int, str]]  # runs `audit` on the test's folder, with these words


def scaler_state(scale: Any = 4.0, tracker: Any = 1) -> dict[str, Any]:
    rest = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    return {"scale": scale, **rest, "_growth_tracker": tracker}


def save(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / name)

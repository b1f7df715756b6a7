"""What Megatron-Core's scaler does, for the tests that compare with it."""

from __future__ import annotations

from typing import Any

import torch

from scaler_triton.migration import from_megatron


class Megatron:
    """The rule and the state of megatron/core/optimizer/grad_scaler.py, told anew: a count that runs down to zero."""

    def __init__(self, scale: float, interval: int, hysteresis: int, min_scale: float) -> None:
        self.scale, self.interval, self.hysteresis, self.min_scale = scale, interval, hysteresis, min_scale
        self.good, self.left = 0, hysteresis

    def update(self, bad: bool) -> float:
        self.good = 0 if bad else self.good + 1
        if bad:
            self.left -= 1
            self.scale = max(self.scale / 2, self.min_scale) if self.left <= 0 else self.scale
        elif self.good == self.interval:
            self.good, self.left, self.scale = 0, self.hysteresis, self.scale * 2
        return self.scale

    def state(self) -> dict[str, Any]:
        scale = torch.tensor([self.scale])
        return {"scale": scale, "growth_tracker": self.good, "hysteresis_tracker": self.left}

    def ours(self) -> dict[str, Any]:
        numbers = {"growth_interval": self.interval, "hysteresis": self.hysteresis, "min_scale": self.min_scale}
        return from_megatron(self.state(), **numbers)

    def in_step(self) -> bool:
        """Whether ours will grow at the same update."""
        return True

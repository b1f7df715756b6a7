"""1 / scale for ops that multiply by it; on the CPU by Python's division, as an op on one number costs several."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# From here on the inverse is finite, and a cast rounds it to fp32 as the op does.
_LOW = 2.0**-126


def inverse(scale: Tensor) -> Tensor:
    """Return float(1 / double(scale)): for fp32 the correctly rounded reciprocal, which one division gives."""
    return scale.reciprocal()


class Inverse:
    """The inverse of a scale, in the same tensor from step to step."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, np.ndarray] | None = None

    def of(self, scale: Tensor) -> Tensor:
        """Return float(1 / double(scale)), to be used before the next call.

        Args:
            scale: fp32, one element.

        Returns: fp32, one element, on the scale's device.
        """
        if not scale.is_cpu or type(scale) is not Tensor:  # nobody can read torch's fake ones
            return inverse(scale)
        value = scale.item()
        if value < _LOW:
            return inverse(scale)
        if self._kept is None:
            self._kept = _number()
        tensor, memory = self._kept
        memory[()] = 1.0 / value
        return tensor


@torch.inference_mode(False)
def _number() -> tuple[Tensor, np.ndarray]:
    memory = np.empty((), dtype=np.float32)
    return torch.from_numpy(memory), memory

"""1 / scale for ops that multiply by it; on the CPU computed in Python, which is quicker than a torch op."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scaler_triton.host_memory import host_memory


def inverse(scale: Tensor) -> Tensor:
    """Return float(1 / double(scale)), which for fp32 equals the correctly rounded fp32 reciprocal."""
    return scale.reciprocal()


class Inverse:
    """Computes the inverse of a scale into one tensor, reused from step to step."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, memoryview[float]] | None = None

    def of(self, scale: Tensor) -> Tensor:
        """Return float(1 / double(scale)); the next call overwrites it.

        Args:
            scale: fp32, one element.

        Returns: fp32, one element, on the scale's device.
        """
        if not scale.is_cpu or type(scale) is not Tensor:  # fake tensors cannot be read
            return inverse(scale)
        value = scale.item()
        if value == 0.0:
            return inverse(scale)  # Python would raise
        if self._kept is None:
            self._kept = _number()
        tensor, memory = self._kept
        memory[()] = 1.0 / value
        return tensor


@torch.inference_mode(False)
def _number() -> tuple[Tensor, memoryview[float]]:
    number = torch.from_numpy(np.empty((), dtype=np.float32))  # no op of torch's, which may run out of memory
    return number, host_memory(number)

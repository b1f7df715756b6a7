"""Cases over a GPU's parameters beside offloaded ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cases import Fault, Habits, Report, new_optimizer, new_scaler, train


def two_devices(rank: int, name: str, faults: Sequence[Fault], *, apart: bool, how: str) -> Report:
    """A parameter on the GPU and one offloaded to the host; `apart`: even ranks hold only the first, odd the second."""
    scaler = new_scaler("sharded", device="cuda")
    params = [torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cuda", "cpu")]
    if apart:
        params = [params[rank % 2]]
    optimizer = new_optimizer(name, [{"params": [param]} for param in params])

    def backward(step: int) -> None:
        factor = scaler.scale(torch.ones((), device="cuda")).item()
        for param in params:
            param.grad = torch.full_like(param, 2.0 ** (step - 3) * factor)

    habits = Habits(unscale=how == "unscale_", max_norm=1.0 if how == "clip" else None)
    return train(rank, scaler, [optimizer], backward, faults, habits=habits)

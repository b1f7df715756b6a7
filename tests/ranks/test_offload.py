"""Gradients on a GPU beside gradients offloaded to the host: still one flag and one collective."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ranks.cases import Fault, Habits, Report, assert_agreed, new_optimizer, new_scaler, train

pytestmark = [pytest.mark.distributed, pytest.mark.gpu]

HOW = pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
NAMES = pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])


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


@HOW
@NAMES
@pytest.mark.parametrize("apart", [False, True], ids=["both", "apart"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_on_either_device_skips_everywhere(two, name, bad, apart, how):
    """It is on the GPU or on the host: of the bad rank if they hold one of the two each."""
    fault = Fault(1, bad) if apart else Fault(1, 1, param=bad)
    assert_agreed(two.run(two_devices, name, [fault], apart=apart, how=how), [1])

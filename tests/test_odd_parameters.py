"""Optimizers whose parameters are none, without a shape yet, or on no device that can be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import flags, parameters, started

from scaler_triton import GradScaler, ShardedGradScaler


@pytest.mark.parametrize("fused", [False, True])
def test_a_sharded_optimizer_without_parameters_follows(fused: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(ShardedGradScaler, "_agreement", lambda self, plan: None)
    optimizer = torch.optim.SGD([{"params": []}], lr=1.0, fused=fused)
    scaler = started(ShardedGradScaler, "cpu", init_scale=4.0, growth_interval=1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_parameters_without_a_shape_yet_wait_their_turn() -> None:
    lazy = torch.nn.LazyLinear(3)
    optimizer = torch.optim.SGD([*lazy.parameters(), *parameters([torch.tensor([8.0])], "cpu")], lr=1.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    assert optimizer.param_groups[0]["params"][-1].grad.item() == 2.0


@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
def test_parameters_that_are_nowhere_yet_have_no_flag_that_cannot_be_read(method: str) -> None:
    nowhere = torch.nn.Parameter(torch.zeros(3, device="meta"))
    for first in (True, False):
        there = parameters([torch.tensor([8.0])], "cpu")
        optimizer = torch.optim.SGD([nowhere, *there] if first else [*there, nowhere], lr=1.0)
        for cls in (GradScaler, torch.amp.GradScaler):
            scaler = started(cls, "cpu", init_scale=4.0)
            getattr(scaler, method)(optimizer)
            assert flags(scaler, optimizer) == [0.0]

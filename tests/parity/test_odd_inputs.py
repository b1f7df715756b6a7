"""Scales, trackers and parameters of an odd kind: torch's class and ours take or refuse the same."""

from __future__ import annotations

import pytest
import torch
from helpers import flags, parameters, places, sgd, started
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton import GradScaler, ShardedGradScaler

BOTH = [torch.amp.GradScaler, GradScaler]
PLACES = pytest.mark.parametrize("place", places(), ids=str)


@pytest.mark.parametrize("cls", BOTH)
def test_parameters_without_a_shape_yet_wait_their_turn(cls: type) -> None:
    lazy, there = torch.nn.LazyLinear(3), parameters([torch.tensor([8.0])], "cpu")
    started(cls, "cpu", init_scale=4.0).unscale_(torch.optim.SGD([*lazy.parameters(), *there], lr=1.0))
    assert there[0].grad is not None
    assert there[0].grad.item() == 2.0


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
@pytest.mark.parametrize("first", [True, False])
def test_parameters_that_are_nowhere_yet_have_no_flag_that_cannot_be_read(cls: type, method: str, first: bool) -> None:
    nowhere, there = torch.nn.Parameter(torch.zeros(3, device="meta")), parameters([torch.tensor([8.0])], "cpu")
    optimizer = torch.optim.SGD([nowhere, *there] if first else [*there, nowhere], lr=1.0)
    scaler = started(cls, "cpu", init_scale=4.0)
    getattr(scaler, method)(optimizer)
    assert flags(scaler, optimizer) == [0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_sharded_optimizer_without_parameters_follows(fused: bool, two_ranks: None) -> None:
    optimizer = torch.optim.SGD([{"params": []}], lr=1.0, fused=fused)
    scaler = started(ShardedGradScaler, "cpu", init_scale=4.0, growth_interval=1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("cls", BOTH)
def test_a_fused_run_on_fake_tensors_reads_none(cls: type) -> None:
    """As tools do that measure a run's memory without running it."""
    with FakeTensorMode():
        optimizer, scaler = sgd([torch.ones(2)], fused=True), started(cls, "cpu")
        for unscale in (True, False):
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

"""Scales, trackers and parameters of an odd kind: torch's class and ours take or refuse the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Place, flags, parameters, places, sgd, started, values
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton import GradScaler, ShardedGradScaler

BOTH = [torch.amp.GradScaler, GradScaler]
PLACES = pytest.mark.parametrize("place", places(), ids=str)


def assert_refused_alike(place: Place, name: str, change: Callable[[Any], Any]) -> None:
    """Step, replace the scale or the tracker, and update: both classes raise the same, and nothing has changed."""
    raised = []
    for cls in BOTH:
        optimizer = sgd([torch.ones(2)], place.device)
        scaler = started(cls, place.device, **({"backend": place.backend} if cls is GradScaler else {}))
        scaler.step(optimizer)
        kept = getattr(scaler, name)
        setattr(scaler, name, change(kept))
        with pytest.raises(RuntimeError) as error:
            scaler.update()
        raised.append([str(error.value), getattr(scaler, name).tolist()])
        setattr(scaler, name, kept)
        raised[-1] += [scaler.get_scale(), scaler._growth_tracker.item(), values(optimizer)]
    assert raised[0] == raised[1]


@PLACES
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_a_scale_of_a_dtype_that_cannot_hold_every_scale(place: Place, dtype: torch.dtype) -> None:
    """An integer backs off to 0, and then weights are NaN."""
    assert_refused_alike(place, "_scale", lambda scale: torch.tensor(512, dtype=dtype, device=scale.device))


@PLACES
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_tracker_of_another_dtype(place: Place, dtype: torch.dtype) -> None:
    assert_refused_alike(place, "_growth_tracker", lambda tracker: tracker.to(dtype) + 3)


@PLACES
@pytest.mark.parametrize("numel", [0, 2])
@pytest.mark.parametrize("name", ["_growth_tracker", "_scale"])
def test_not_one_number(place: Place, name: str, numel: int) -> None:
    """A kernel would read and write whatever lies at their address."""
    assert_refused_alike(place, name, lambda kept: kept.expand(numel).clone())


@PLACES
def test_a_tracker_elsewhere_is_refused(place: Place) -> None:
    """On a GPU by torch, too, whatever it is on; a kernel there would read the CPU's memory."""
    scaler = started(GradScaler, place.device, backend=place.backend)
    scaler._growth_tracker = torch.zeros((), dtype=torch.int32, device="meta" if place.device == "cpu" else "cpu")
    scaler.step(sgd([torch.ones(2)], place.device))
    with pytest.raises(RuntimeError, match=r"growth_tracker must be on \S+, as the scale is, got (meta|cpu)"):
        scaler.update()
    assert scaler.get_scale() == 2.0**16


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

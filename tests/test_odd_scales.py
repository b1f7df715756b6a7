"""A scale or growth tracker that a user replaced by one of another dtype: torch's class and ours refuse the same."""

from __future__ import annotations

import pytest
import torch
from helpers import Place, places, sgd, started

from scaler_triton import GradScaler

BOTH = [torch.amp.GradScaler, GradScaler]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
@pytest.mark.parametrize("place", places(), ids=str)
def test_a_scale_of_a_dtype_that_cannot_hold_every_scale_is_refused_as_by_torch(
    place: Place, dtype: torch.dtype
) -> None:
    """An integer backs off to 0, and then weights are NaN."""
    raised = []
    for cls in BOTH:
        parameter = torch.nn.Parameter(torch.ones(2, device=place.device))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = cls(place.device, **({"backend": place.backend} if cls is GradScaler else {}))
        scaler.scale(parameter.sum())
        scaler._scale = torch.tensor(512, dtype=dtype, device=place.device)
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError) as error:
            scaler.update()
        raised.append((str(error.value), scaler.get_scale(), parameter.tolist()))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("place", places(), ids=str)
def test_a_tracker_of_another_dtype_is_refused_as_by_torch(place: Place, dtype: torch.dtype) -> None:
    raised = []
    for cls in BOTH:
        optimizer = sgd([torch.ones(2)], place.device)
        scaler = started(cls, place.device, **({"backend": place.backend} if cls is GradScaler else {}))
        scaler._growth_tracker = torch.tensor(3, dtype=dtype, device=place.device)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError) as error:
            scaler.update()
        raised.append((str(error.value), scaler.get_scale(), scaler._growth_tracker.item()))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("numel", [0, 2])
@pytest.mark.parametrize("name", ["_growth_tracker", "_scale"])
@pytest.mark.parametrize("place", places(), ids=str)
def test_not_one_number_is_refused_as_by_torch(place: Place, name: str, numel: int) -> None:
    """A kernel would read and write whatever lies at their address."""
    raised = []
    for cls in BOTH:
        optimizer = sgd([torch.ones(2)], place.device)
        scaler = started(cls, place.device, **({"backend": place.backend} if cls is GradScaler else {}))
        scaler.step(optimizer)
        kept = getattr(scaler, name)
        setattr(scaler, name, kept.expand(numel).clone())
        with pytest.raises(RuntimeError) as error:
            scaler.update()
        setattr(scaler, name, kept)
        raised.append((str(error.value), scaler.get_scale(), scaler._growth_tracker.item()))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_tracker_elsewhere_is_refused(place: Place) -> None:
    """On a GPU by torch, too, whatever it is on; a kernel there would read the CPU's memory."""
    optimizer = sgd([torch.ones(2)], place.device)
    scaler = started(GradScaler, place.device, backend=place.backend)
    scaler._growth_tracker = torch.zeros((), dtype=torch.int32, device="meta" if place.device == "cpu" else "cpu")
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"growth_tracker must be on \S+, as the scale is, got (meta|cpu)"):
        scaler.update()
    assert scaler.get_scale() == 2.0**16

"""Steps under inference mode, within transforms, with another default device, and on fake tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Place, places, sgd, started
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from scaler_triton import GradScaler


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("defer", [False, True])
def test_clipping_fake_gradients_reads_none(defer: bool, backend: str) -> None:
    with FakeTensorMode():
        optimizer = sgd([torch.ones(2)], fused=True)
        scaler = started(GradScaler, "cpu", backend=backend)
        for _ in range(2):
            norm = scaler.clip_grad_norm_(optimizer, 1.0, defer=defer)
            scaler.step(optimizer)
            scaler.update()
    assert isinstance(norm, FakeTensor)


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_a_fused_run_on_fake_tensors_reads_none(cls: type) -> None:
    """As tools do that measure a run's memory without running it."""
    with FakeTensorMode():
        optimizer = sgd([torch.ones(2)], fused=True)
        scaler = started(cls, "cpu")
        for unscale in (True, False):
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_loss_is_first_scaled_within_a_transform(place: Place) -> None:
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    parameter = torch.nn.Parameter(torch.ones(1, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.func.grad(lambda value: scaler.scale(value.square().sum()))(parameter.detach())
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.0


def test_without_torchs_way_out_of_a_transform_a_scaler_starts_all_the_same(monkeypatch: Any) -> None:
    from torch._functorch import pyfunctorch

    monkeypatch.delattr(pyfunctorch, "temporarily_clear_interpreter_stack")
    assert started(GradScaler, "cpu", init_scale=4.0).get_scale() == 4.0


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_loss_is_first_scaled_under_inference_mode(place: Place) -> None:
    """As one of a validation before the first step."""
    scaler = GradScaler(place.device, init_scale=4.0, growth_interval=1, backend=place.backend)
    with torch.inference_mode():
        scaler.scale(torch.ones((), device=place.device))
    parameter = torch.nn.Parameter(torch.ones(1, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler.scale(parameter.square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.item(), scaler.get_scale()) == (0.0, 8.0)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_runs_under_another_default_device_and_under_inference_mode(fused: bool, clip: bool) -> None:
    optimizer = sgd([torch.tensor([8.0])], fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with torch.device("meta"):
        if clip:
            assert scaler.clip_grad_norm_(optimizer, 100.0).item() == 2.0
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == -1.0
    with torch.inference_mode():
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_a_first_step_under_inference_mode_leaves_nothing_that_later_ones_cannot_write(
    place: Place, fused: bool, clip: bool
) -> None:
    optimizer = sgd([torch.tensor([3.0, 4.0]), torch.tensor([0.0])], place.device, fused=fused)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend, max_consecutive_skips=3)
    (first, second) = optimizer.param_groups[0]["params"]
    for under in (True, False, True):
        first.grad = torch.tensor([12.0, 16.0], device=place.device)
        second.grad = torch.full((1,), 4.0 if under else math.inf, device=place.device)
        with torch.inference_mode(under):
            if clip:
                scaler.clip_grad_norm_(optimizer, 100.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.was_skipped(optimizer) is not under
        scaler.update(4.0)
    assert first.tolist() == [-3.0, -4.0]
    assert scaler.stats().skipped == 1

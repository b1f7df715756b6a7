"""Steps under inference mode, in transforms, on another default device and on fake tensors; copies of a scaler."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import types
from typing import Any

import pytest
import torch
from helpers import Place, places, sgd, started
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from scaler_triton import GradScaler, ShardedGradScaler


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_clipping_fake_gradients_reads_none(backend: str) -> None:
    with FakeTensorMode():
        optimizer = sgd([torch.ones(2)], fused=True)
        scaler = started(GradScaler, "cpu", backend=backend)
        for _ in range(2):
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert isinstance(norm, FakeTensor)


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_loss_is_first_scaled_within_a_transform(place: Place) -> None:
    scaler = GradScaler(place.device, init_scale=4.0, backend=place.backend)
    parameter = torch.nn.Parameter(torch.ones(1, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.func.grad(lambda value: scaler.scale(value.square().sum()))(parameter.detach())
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.0


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


# Copies go on where the scaler stood, and leave it as it was.


CLONES = [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("clone", CLONES, ids=["copy", "deepcopy", "pickle"])
def test_copies_continue_where_the_original_stood(cls: type, clone: Any) -> None:
    scaler = started(cls, "cpu", init_scale=64.0)
    scaler._growth_tracker.fill_(5)
    copied = clone(scaler)
    assert copied.state_dict() == scaler.state_dict()
    assert type(copied) is cls
    copied._lazy_init_scale_growth_tracker("cpu")
    copied._scale.fill_(1.0)
    assert scaler.get_scale() == 64.0


def test_a_scaler_that_holds_itself_is_copied_with_what_it_holds() -> None:
    """As where one of its methods was wrapped by hand."""
    scaler = GradScaler("cpu")
    scaler.update = types.MethodType(GradScaler.update, scaler)  # type: ignore[method-assign]
    copied: Any = copy.deepcopy(scaler)
    assert copied.update.__self__ is copied is not scaler


class Locked(GradScaler):
    """A user's, with something that cannot be copied and is left out by hand."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=64.0)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock out."""
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make another lock."""
        super().__setstate__(state)
        self.lock = threading.Lock()


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_a_copy_is_made_of_what_a_subclass_says_is_its_state(clone: Any) -> None:
    scaler = Locked()
    copied = clone(scaler)
    assert copied.get_scale() == 64.0
    assert copied.lock is not scaler.lock


def test_a_disabled_scaler_can_be_copied_whatever_it_was_asked() -> None:
    scaler = GradScaler("cpu", enabled=False)
    scaler._found_inf_per_device(sgd([torch.ones(2)]))
    assert not any(clone(scaler).is_enabled() for clone in CLONES)


@pytest.mark.parametrize("clone", CLONES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_within_a_step_raises_as_torch_and_after_the_update_it_does_not(clone: Any) -> None:
    """Although the step was not taken; the copy knows of no optimizer."""
    optimizer, scaler = sgd([torch.tensor([8.0])]), started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        clone(scaler)
    scaler.update()
    copied = clone(scaler)
    copied.scale(torch.ones(()))
    copied.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.item() == 8.0 / 4.0 / 4.0

"""Wrong calls and wrong arguments: torch's own errors where it has one, else one that names the argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import parameters, sgd, started
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ShardedGradScaler, ops

CALLS: dict[str, Callable[[Any, Any], None]] = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_scaler_used_before_scale(cls: type, name: str) -> None:
    optimizer = sgd([torch.tensor([4.0])])
    scaler = cls("cpu")
    for _ in range(2):
        with pytest.raises(AssertionError, match=f"Attempted {name} but _scale is None"):
            CALLS[name](scaler, optimizer)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].item() < 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_wrong_order_has_torchs_words(cls: type, fused: bool) -> None:
    optimizer = sgd([torch.tensor([4.0])], fused=fused)
    scaler = started(cls, "cpu")
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update\.$"):
        scaler.update()
    scaler.unscale_(optimizer)
    text = r"^unscale_\(\) has already been called on this optimizer since the last update\(\)\.$"
    with pytest.raises(RuntimeError, match=text):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\)\.$"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called since the last update\(\)\.$"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch disables itself without CUDA only")
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, torch.amp.GradScaler])
def test_without_cuda_the_default_disables_itself_with_torchs_warning(cls: type) -> None:
    text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
    with pytest.warns(UserWarning, match=f"^{text}$") as warned:
        scaler = cls()
    assert [each.filename for each in warned] == [__file__]
    assert not scaler.is_enabled()


def test_disabled_takes_anything_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = GradScaler(enabled=False, init_scale=-1.0)
    scaler.load_state_dict({})
    assert scaler.state_dict() == {}


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"scale": torch.ones(2)}, ValueError, "scale must be one torch.float32 element, got shape"),
        ({"growth_tracker": torch.zeros(())}, ValueError, "growth_tracker must be one torch.int32 element"),
        ({"found_inf": torch.zeros((), device="meta")}, ValueError, "found_inf must be on the scale's device"),
        ({"growth_factor": 0.0}, ValueError, "growth_factor must be"),
        ({"found_inf": 0.0}, TypeError, "found_inf must be a Tensor, got float"),
    ],
)
def test_update_op_names_the_wrong_argument(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    good: dict[str, Any] = {
        "scale": torch.ones(()),
        "growth_tracker": torch.zeros((), dtype=torch.int32),
        "found_inf": torch.zeros(()),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1,
    }
    with pytest.raises(error, match=text):
        ops.update_scale_(**{**good, **kwargs})
    ops.update_scale_(**good)
    assert good["scale"].item() == 2.0


def test_parameters_that_are_no_tensors_raise_as_torch() -> None:
    class Odd:
        param_groups = [{"params": [3]}]  # noqa: RUF012

        def step(self) -> None: ...

    for cls in (GradScaler, torch.amp.GradScaler):
        with pytest.raises(AssertionError, match="^expected param to be torch.Tensor, got int$"):
            started(cls, "cpu").step(Odd())
    assert parameters([], "cpu") == []


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_left_as_in_torch_fp16_gradients_are_refused_unless_the_step_unscales(cls: type) -> None:
    optimizer = sgd([torch.full((3,), 8.0, dtype=torch.float16)], fused=True)
    scaler = cls("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [-0.5] * 3


def test_left_as_in_torch_only_the_sharded_scaler_refuses_a_meta_loss(two_ranks: Any) -> None:
    loss = torch.ones((), device="meta")
    assert GradScaler("cpu").scale(loss).is_meta
    with pytest.raises(AssertionError):
        ShardedGradScaler("cpu").scale(loss)

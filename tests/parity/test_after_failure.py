"""After a failure the stage is true, and the same call again gives the right parameters; and what is left as in torch.

Both are sections of docs/differences.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Place, places, sgd, values
from test_differences import BOTH, DIVIDED, KINDS, SCALE, anew, only, optimizer_of, started_at
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ShardedGradScaler

PLACES = pytest.mark.parametrize("place", places(), ids=str)


def raising(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("in the optimizer")


@PLACES
@KINDS
@pytest.mark.parametrize("own", [None, 2.0])
@pytest.mark.parametrize("explicit", [False, True])
def test_failed_steps_are_called_again(explicit: bool, own: float | None, fused: bool, place: Place) -> None:
    """A factor of the user's, too, is for the step that is taken."""
    optimizer, scaler = optimizer_of(fused, place=place), started_at(GradScaler, place)
    if own is not None and fused:
        optimizer.grad_scale = torch.tensor(own, device=place.device)  # type: ignore[attr-defined]
    if explicit:
        scaler.unscale_(optimizer)
    hook = optimizer.register_step_pre_hook(raising)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    hook.remove()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert not hasattr(optimizer, "found_inf")
    assert hasattr(optimizer, "grad_scale") == (own is not None and fused)
    scaler.step(optimizer)
    scaler.update()
    factor = own if own is not None and fused else 1.0
    assert values(optimizer) == [0.0 if fused and not explicit else -1.0 / factor]
    assert scaler.get_scale() == SCALE  # nothing overflowed: on other ranks the optimizer may not have raised
    assert not hasattr(optimizer, "grad_scale")
    anew(only(optimizer))
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0 if fused and not explicit else -1.0 - 1.0 / factor]


def test_failed_checks_without_a_scale_leave_no_trace() -> None:
    scaler, optimizer = GradScaler("cpu"), optimizer_of()
    for _ in range(2):
        with pytest.raises(AssertionError, match="Attempted _check_inf_per_device but _scale is None"):
            scaler._check_inf_per_device(optimizer)
        scaler.__getstate__()  # refused in the middle of a step


# Left as in torch.


@pytest.mark.parametrize("cls", BOTH)
def test_left_as_in_torch_fp16_gradients_are_refused_unless_the_step_unscales(cls: type) -> None:
    optimizer, scaler = sgd([torch.full((3,), 8.0, dtype=torch.float16)], fused=True), started_at(cls)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == DIVIDED


def test_left_as_in_torch_only_the_sharded_scaler_refuses_a_meta_loss(two_ranks: Any) -> None:
    loss = torch.ones((), device="meta")
    assert GradScaler("cpu").scale(loss).is_meta
    with pytest.raises(AssertionError):
        ShardedGradScaler("cpu").scale(loss)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch disables itself without CUDA only")
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, torch.amp.GradScaler])
def test_left_as_in_torch_without_cuda_the_default_disables_itself(cls: type) -> None:
    text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
    with pytest.warns(UserWarning, match=f"^{text}$") as warned:
        scaler = cls()
    assert [each.filename for each in warned] == [__file__]
    assert not scaler.is_enabled()


def test_left_as_in_torch_a_disabled_scaler_takes_anything_in_silence() -> None:
    scaler = GradScaler(enabled=False, init_scale=-1.0)
    scaler.load_state_dict({})
    assert scaler.state_dict() == {}

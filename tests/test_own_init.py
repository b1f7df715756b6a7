"""Subclasses whose `__init__` sets what torch's class has, and does not call it; OTX's for XPUs is one."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers import Place, places
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.dispatch import ENV_VARIABLE

STEPS = 6
BAD = (2, 4)


def own_init(base: Any) -> Any:
    """Return a subclass of `base`."""

    class Own(base):
        def __init__(self, device: str) -> None:
            self._enabled, self._device = True, device
            self._init_scale, self._scale = 8.0, None
            self._growth_factor, self._backoff_factor, self._growth_interval = 2.0, 0.5, 2
            self._init_growth_tracker, self._growth_tracker = 0, None
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Own


class Restoring(GradScaler):
    """Pickles what the class says, and puts it back by itself."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def trained(scaler: Any, device: str, fused: bool) -> list[Any]:
    """Train through overflows; the parameter, scale and tracker after each step."""
    parameter, seen = torch.nn.Parameter(torch.ones(3, device=device)), []
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * (torch.inf if step in BAD else 1.0)).backward()
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((parameter.tolist(), scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", places(), ids=str)
def test_it_trains_as_one_of_torchs(place: Place, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_VARIABLE, place.backend)
    ours = own_init(GradScaler)(place.device)
    assert trained(ours, place.device, fused) == trained(
        own_init(torch.amp.GradScaler)(place.device), place.device, fused
    )
    assert ours.stats().skipped == len(BAD)


@pytest.mark.parametrize("base", [GradScaler, ShardedGradScaler])
def test_all_else_works_too(base: Any) -> None:
    scaler = own_init(base)("cpu")
    for each in (scaler, copy.deepcopy(scaler), copy.copy(scaler)):
        each.set_growth_factor(3.0)
        each.load_state_dict(each.state_dict() | {"scale": 32.0})
        assert (each.get_scale(), each.get_growth_factor(), each.get_max_scale()) == (32.0, 3.0, torch.finfo().max)
    assert scaler.stats().updates == 0


def test_one_that_puts_its_state_back_by_itself_goes_on() -> None:
    scaler = Restoring("cpu", init_scale=8.0, growth_interval=2)
    before = trained(scaler, "cpu", fused=False)
    restored = pickle.loads(pickle.dumps(scaler))
    assert restored.get_scale() == before[-1][1]
    assert trained(restored, "cpu", fused=False) == trained(copy.deepcopy(scaler), "cpu", fused=False)


def test_a_backend_that_there_is_not_is_an_error_only_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_VARIABLE, "cuda")
    assert own_init(GradScaler)("cpu")._backend == "auto"
    assert GradScaler("cpu", backend="torch")._backend == "torch"
    with pytest.raises(ValueError, match=f"{ENV_VARIABLE} must be one of"):
        GradScaler("cpu")

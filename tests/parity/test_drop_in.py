"""What callers may rely on who know torch's classes: names, argument orders, states, and optimizers in wrappers."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from helpers import sgd, started, values
from test_foreign_code import Chained, Container, Wrapper
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler

PAIRS = [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["plain", "sharded"])
each = pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])


# Names and arguments.


@both
def test_is_a_torch_scaler_of_the_same_qualified_name(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert ours.__qualname__ == theirs.__qualname__  # Composer's checkpoints are keyed by it


@both
def test_has_torchs_names_and_one_private_name_more(ours: type, theirs: type) -> None:
    mine, other = ours("cpu"), theirs("cpu")
    assert {name for name in dir(other) if not name.startswith("__")} <= set(dir(mine))
    more = {name for name in set(vars(mine)) - set(vars(other)) if name.startswith("_")}
    assert more <= {"_ours"}


@both
@pytest.mark.parametrize("enabled", [False, True])
def test_programs_that_ask_whether_there_is_a_scale_get_torchs_answer(ours: type, theirs: type, enabled: bool) -> None:
    """As `scaler._scale.item() if hasattr(scaler, "_scale") else None`, on a machine without a GPU."""
    for name in ("_scale", "_growth_tracker"):
        assert [hasattr(cls("cpu", enabled=enabled), name) for cls in (theirs, ours)] == [enabled, enabled]


@each
def test_updates_write_into_the_same_scale_and_tracker(cls: type, two_ranks: Any) -> None:
    """Who holds one of them sees every update; torch's ShardedGradScaler replaces its tracker on the CPU."""
    scaler, optimizer = cls("cpu", 8.0), sgd([torch.ones(3)])
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._scale, scaler._growth_tracker
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert tracker.item() == 3


def test_accelerate_initialises_lazily_with_a_string_and_twice() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 3.0})
    for tracker in (3, 4):
        for _ in range(2):
            scaler._lazy_init_scale_growth_tracker("cpu")
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, tracker)
        scaler._growth_tracker += 1


STATES = [{}, {"init_scale": 128.0, "growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.25}]
FIELDS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


@both
@pytest.mark.parametrize("kwargs", STATES)
@pytest.mark.parametrize("started_first", [False, True])
def test_checkpoints_go_both_ways(ours: type, theirs: type, kwargs: dict[str, Any], started_first: bool) -> None:
    make = started if started_first else lambda cls, device, **kw: cls(device, **kw)
    for source, target in ((ours, theirs), (theirs, ours)):
        saved, loaded = make(source, "cpu", **kwargs), make(target, "cpu")
        loaded.load_state_dict(saved.state_dict())
        assert loaded.state_dict() == saved.state_dict()
        assert list(saved.state_dict()) == FIELDS


# Subclasses that do not call our `__init__`, and one that restores itself.


class Restoring(GradScaler):
    """Pickles what the class says, and puts it back by itself."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_a_subclass_that_puts_its_state_back_by_itself_goes_on() -> None:
    scaler = started(Restoring, "cpu", init_scale=8.0, growth_interval=1)
    restored = pickle.loads(pickle.dumps(scaler))
    restored.scale(torch.ones(()))
    for value, scale in ((1.0, 16.0), (math.inf, 8.0)):
        restored.step(sgd([torch.full((2,), value)]))
        restored.update()
        assert restored.get_scale() == scale


# Wrappers: difference 15. In each, a gradient of 8 at scale 4 that is divided once is a step by 2 / 2.


def step_once(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("value", [8.0, math.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_that_keeps_its_groups_shares_the_state_after_a_resume(fused: bool, value: float) -> None:
    """Loading puts new groups into the inner optimizer, with the lists of parameters of those before."""
    inner = sgd([torch.tensor([value])], fused=fused)
    wrapper: Any = Wrapper(inner)
    wrapper.param_groups = inner.param_groups
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.param_groups[0] is not inner.param_groups[0]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(wrapper)
    assert scaler.was_skipped(wrapper) == scaler.was_skipped(inner) == (value == math.inf)
    scaler.update()
    assert values(inner) == [0.0 if value == math.inf else -1.0]


class Slotted:
    """A wrapper that nothing can be set on, nor refer to weakly."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("wrap", [Wrapper, Slotted])
@pytest.mark.parametrize("value", [8.0, math.inf])
def test_a_fused_optimizer_in_a_wrapper_gets_scale_and_flag(wrap: Any, value: float) -> None:
    optimizer, scaler = sgd([torch.tensor([value])], fused=True), started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(wrap(optimizer))
    assert values(optimizer) == [0.0 if value == math.inf else -1.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("container", [Container, Chained])
def test_a_wrapper_around_a_container_shares_its_state(container: type[Container]) -> None:
    """The same groups may come in a new list each time."""
    inner = container([sgd([torch.tensor([8.0])]), sgd([torch.tensor([4.0])])])
    wrapper, scaler = Wrapper(inner), started(GradScaler, "cpu", init_scale=4.0)
    scaler.clip_grad_norm_(wrapper, 1e9)
    step_once(scaler, inner)
    assert [group["params"][0].item() for group in inner.param_groups] == [-1.0, -0.5]  # divided once
    assert not scaler.was_skipped(wrapper)


# What a fused optimizer carries during its step.


@pytest.mark.parametrize("explicit", [False, True])
def test_a_class_attribute_named_grad_scale_is_no_hindrance(explicit: bool) -> None:
    class Declares(torch.optim.SGD):
        grad_scale = None

    optimizer, scaler = sgd([torch.tensor([8.0])]), started(GradScaler, "cpu", init_scale=4.0)
    fused = Declares(optimizer.param_groups[0]["params"], lr=0.5, fused=True)
    if explicit:
        scaler.unscale_(fused)
    scaler.step(fused)
    assert values(fused) == [-1.0]

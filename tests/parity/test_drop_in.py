"""What callers may rely on who know torch's classes: names, argument orders, states, and optimizers in wrappers."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from helpers import grads, sgd, started, values
from test_foreign_code import Chained, Container, Lookahead, Wrapper, own_init
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.dispatch import ENV_VARIABLE

PAIRS = [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["plain", "sharded"])
each = pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])


# Names and arguments.


@both
def test_arguments_have_torchs_names_order_and_defaults(ours: type, theirs: type) -> None:
    def parameters(cls: type, kind: Any) -> dict[str, Any]:
        return {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.kind is kind}

    mine, other = (parameters(cls, inspect.Parameter.POSITIONAL_OR_KEYWORD) for cls in (ours, theirs))
    assert list(mine) == list(other)
    other.pop("process_group", None)  # torch's default is whatever the group was at import
    assert {name: mine[name] for name in other} == other
    extras = {"backend", "min_scale", "max_scale", "hysteresis", "max_consecutive_skips"}
    extras |= {"process_group"} - set(mine)
    assert parameters(ours, inspect.Parameter.KEYWORD_ONLY) == dict.fromkeys(extras) | {"hysteresis": 1}


@both
@pytest.mark.parametrize(("args", "kwargs"), [((), {"foo": 1}), ((1,) * 9, {})])
def test_wrong_arguments_are_those_of_a_class_that_users_know(ours: type, theirs: type, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError) as error:
        ours("cpu", *args, **kwargs)
    assert str(error.value).startswith(f"{theirs.__name__}.__init__() ")


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


def test_the_sharded_class_is_a_grad_scaler_as_torchs_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set or replaced on the one reaches the other, and a mixin of both is sharded."""
    assert GradScaler in ShardedGradScaler.__mro__

    class Verbose(GradScaler):
        pass

    class Both(Verbose, ShardedGradScaler):
        pass

    scaler = started(Both, "cpu")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        scaler.step(sgd([torch.ones(2)]))
    monkeypatch.setattr(GradScaler, "get_scale", lambda self: -1.0)
    assert ShardedGradScaler("cpu").get_scale() == -1.0


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


@each
def test_a_subclass_with_an_init_of_its_own_has_all_of_ours(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = own_init(cls)("cpu")
    for one in (scaler, copy.deepcopy(scaler), copy.copy(scaler)):
        one.set_growth_factor(3.0)
        one.load_state_dict(one.state_dict() | {"scale": 32.0})
        assert (one.get_scale(), one.get_growth_factor(), one.limits.max_scale) == (32.0, 3.0, torch.finfo().max)
    assert scaler.stats().updates == 0
    monkeypatch.setenv(ENV_VARIABLE, "cuda")  # no backend: an error only where one is asked for
    own_init(GradScaler)("cpu").scale(torch.ones(()))
    GradScaler("cpu", backend="torch")
    with pytest.raises(ValueError, match=f"{ENV_VARIABLE} must be one of"):
        GradScaler("cpu")


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


@pytest.mark.parametrize("wrap", [Slotted, lambda optimizer: Container([optimizer])], ids=["wrapper", "container"])
def test_an_optimizer_in_something_without_weak_references_is_not_kept_alive(wrap: Any) -> None:
    scaler, references = started(GradScaler, "cpu", init_scale=4.0), []
    for _ in range(5):
        optimizer = sgd([torch.tensor([8.0])])
        wrapper = wrap(optimizer)
        step_once(scaler, wrapper)
        assert not scaler.was_skipped(wrapper)
        references.append(weakref.ref(optimizer))
        del optimizer, wrapper
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 1


@pytest.mark.parametrize("container", [Container, Chained])
def test_a_wrapper_around_a_container_shares_its_state(container: type[Container]) -> None:
    """The same groups may come in a new list each time."""
    inner = container([sgd([torch.tensor([8.0])]), sgd([torch.tensor([4.0])])])
    wrapper, scaler = Wrapper(inner), started(GradScaler, "cpu", init_scale=4.0)
    scaler.clip_grad_norm_(wrapper, 1e9)
    step_once(scaler, inner)
    assert [group["params"][0].item() for group in inner.param_groups] == [-1.0, -0.5]  # divided once
    assert not scaler.was_skipped(wrapper)


def test_a_look_for_a_wrappers_state_does_not_end_that_of_the_optimizer_inside() -> None:
    """As where a framework unscales the optimizer inside, and its user looks at the one that he knows."""
    optimizer, scaler = sgd([torch.tensor([8.0])]), started(GradScaler, "cpu", init_scale=4.0)
    wrapper = Lookahead(optimizer)
    scaler.unscale_(optimizer)
    assert not scaler._per_optimizer_states[id(wrapper)]["found_inf_per_device"]  # this look makes one
    scaler.step(wrapper)
    assert values(optimizer) == [-1.0]


@pytest.mark.parametrize("stepped", [0, 1])
def test_wrappers_that_hold_each_other_are_optimizers_of_their_own(stepped: int) -> None:
    inner: Any = sgd([torch.tensor([8.0])])
    pair = (inner, Wrapper(inner))
    inner.optimizer = pair[1]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(pair[stepped])
    step_once(scaler, pair[stepped])
    assert values(inner) == [-1.0]


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


@pytest.mark.parametrize("explicit", [False, True])
def test_an_optimizer_that_takes_the_scale_but_not_the_flag_keeps_neither(explicit: bool) -> None:
    """The scale would be taken for a factor of the user's by the next step, which would divide twice."""

    class Refuses(torch.optim.SGD):
        refuses = True

        def __setattr__(self, name: str, value: object) -> None:
            if name == "found_inf" and self.refuses:
                raise TypeError("found_inf must be a bool")
            super().__setattr__(name, value)

    optimizer, scaler = sgd([torch.tensor([8.0])]), started(GradScaler, "cpu", init_scale=4.0)
    refusing = Refuses(optimizer.param_groups[0]["params"], lr=0.5, fused=True)
    if explicit:
        scaler.unscale_(refusing)
    with pytest.raises(TypeError, match="found_inf must be a bool"):
        scaler.step(refusing)
    refusing.refuses = False
    scaler.step(refusing)
    assert values(refusing) in ([0.0], [-1.0])
    assert not hasattr(refusing, "grad_scale")


@pytest.mark.parametrize("fused", [False, True])
def test_flags_taken_out_summed_and_put_back_are_the_flag(fused: bool) -> None:
    """torch's class hands the sum on, and fused kernels skip at exactly 1."""
    optimizer, scaler = sgd([torch.tensor([math.inf])], fused=fused), started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    (device,) = found
    flag = found.pop(device)
    flag += flag.clone()  # as a SUM over two ranks
    found[device] = flag
    step_once(scaler, optimizer)
    assert (values(optimizer), scaler.get_scale()) == ([0.0], 2.0)
    assert grads(optimizer) == [math.inf]

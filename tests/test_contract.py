"""What frameworks touch: argument orders, private methods and attributes, wrappers, states."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import math
import pickle
import threading
import types
from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers import Place, flags, parameters, places, sgd, started
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler, lending

PAIRS = [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["plain", "sharded"])


def positional(cls: type) -> dict[str, Any]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in kinds}


@both
def test_arguments_have_torchs_names_order_and_defaults(ours: type, theirs: type) -> None:
    mine, other = positional(ours), positional(theirs)
    assert list(mine) == list(other)
    other.pop("process_group", None)  # torch's default is whatever the group was at import
    assert {name: mine[name] for name in other} == other
    extras = [p for p in inspect.signature(ours).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    off = {"hysteresis": 1, "consecutive_hysteresis": False, "check_unscaled": False}
    assert all(p.default is off.get(p.name) for p in extras)


@both
def test_is_a_torch_scaler_of_the_same_qualified_name(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert ours.__qualname__ == theirs.__qualname__


@both
def test_has_every_name_that_torchs_instance_has(ours: type, theirs: type) -> None:
    mine, other = ours("cpu"), theirs("cpu")
    assert {name for name in dir(other) if not name.startswith("__")} <= set(dir(mine))


def test_accelerate_initialises_lazily_with_a_string_and_twice() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 3.0})
    for _ in range(2):
        scaler._lazy_init_scale_growth_tracker("cpu")
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 3)
    scaler._growth_tracker += 1
    scaler._lazy_init_scale_growth_tracker("cpu")
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 4)


def test_accelerate_passes_none_as_positional_closure() -> None:
    optimizer = sgd([torch.ones(2)])
    scaler = started(GradScaler, "cpu")
    scaler.step(optimizer, None)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].tolist() != [0.0, 0.0]


def test_composer_assigns_fresh_states_after_running_out_of_memory() -> None:
    optimizer = sgd([torch.tensor([math.inf])])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([4.0])
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == -0.5
    assert scaler.get_scale() == 4.0


def test_states_hold_torchs_own_stages_and_flags_of_others_count() -> None:
    optimizer = sgd([torch.ones(2)])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"] is torch.cuda.amp.grad_scaler.OptState.UNSCALED
    state["found_inf_per_device"] = {torch.device("cpu"): torch.full((1,), 2.0)}  # as apex's optimizers write it
    assert scaler.step(optimizer) is None
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.0, 0.0]
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_a_flag_filled_by_hand_skips_the_step() -> None:
    optimizer = sgd([torch.ones(2)])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2.0


def test_replaced_unscale_grads_is_called_with_four_arguments_and_a_real_inverse() -> None:
    """As sd-scripts replaces it on the instance, to allow fp16."""
    optimizer = sgd([torch.full((2,), 6.0).half()])
    scaler = started(GradScaler, "cpu", init_scale=2.0)
    original = scaler._unscale_grads_
    seen = []

    def replaced(optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool) -> Any:
        seen.append((inv_scale.item(), found_inf.item(), allow_fp16))
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = replaced
    scaler.unscale_(optimizer)
    assert seen == [(0.5, 0.0, False)]
    assert optimizer.param_groups[0]["params"][0].grad.tolist() == [3.0, 3.0]


def test_overridden_unscale_grads_serves_the_check_of_fused_optimizers_too() -> None:
    calls = []

    class Own(GradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            calls.append(args[0].item())
            return super()._unscale_grads_(optimizer, *args)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([4.0])
    scaler = started(Own, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    assert calls == [1.0]
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


class OldStyle(torch.optim.SGD):
    """Asks the scaler itself, once a parameter group, as apex's and Transformer Engine's optimizers do."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        scale = grad_scaler._get_scale_async()
        for group in self.param_groups:
            found = grad_scaler._check_inf_per_device(self)[group["params"][0].device]
            for parameter in group["params"]:
                if not found.item() and parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad / scale


@pytest.mark.parametrize("bad", [False, True])
def test_old_style_optimizers_are_passed_the_scaler_and_checked_once(bad: bool, monkeypatch: Any) -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = OldStyle([{"params": [first]}, {"params": [second]}], lr=1.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    checks: list[Any] = []
    check = scaler._check_grads
    monkeypatch.setattr(scaler, "_check_grads", lambda *args: checks.append(args) or check(*args))
    for step in range(2):
        first.grad, second.grad = torch.tensor([4.0]), torch.tensor([math.inf if bad else 8.0])
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(optimizer)
        assert len(checks) == step + 1
        scaler.update()
    assert scaler.get_scale() == (1.0 if bad else 4.0)
    assert [first.item(), second.item()] == ([0.0, 0.0] if bad else [-2.0, -4.0])


class Wrapper:
    """As frameworks wrap an optimizer: its own step, everything else the inner one's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_and_the_optimizer_inside_share_one_state(fused: bool) -> None:
    """Difference 15 from torch."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([8.0])
    inner = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(inner)
    scaler.step(Wrapper(inner))
    scaler.update()
    assert parameter.item() == -2.0


def test_a_wrapper_around_nothing_but_itself_is_an_optimizer() -> None:
    optimizer: Any = sgd([torch.tensor([8.0])])
    optimizer.optimizer = optimizer
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


@pytest.mark.parametrize("stepped", [0, 1])
def test_wrappers_that_hold_each_other_are_optimizers_of_their_own(stepped: int) -> None:
    inner: Any = sgd([torch.tensor([8.0])])
    pair = (inner, Wrapper(inner))
    inner.optimizer = pair[1]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(pair[stepped])
    scaler.step(pair[stepped])
    scaler.update()
    assert inner.param_groups[0]["params"][0].item() == -1.0


def test_a_fused_optimizer_in_a_wrapper_gets_scale_and_flag() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([8.0])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(Wrapper(torch.optim.SGD([parameter], lr=1.0, fused=True)))
    assert parameter.item() == -2.0


class Slotted:
    """A wrapper that nothing can be set on."""

    __slots__ = ("__weakref__", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("bad", [False, True])
def test_a_fused_optimizer_in_a_wrapper_without_attributes_gets_scale_and_flag(bad: bool) -> None:
    optimizer = sgd([torch.tensor([math.inf if bad else 8.0])], fused=True)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(Slotted(optimizer))
    assert parameter.item() == (0.0 if bad else -1.0)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


class Container:
    """Several optimizers stepped as one, without weak references to itself."""

    __slots__ = ("optimizers",)

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Chained(Container):
    """The same, whose groups can only be iterated over."""

    __slots__ = ()

    @property
    def param_groups(self) -> Any:
        return itertools.chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)


@pytest.mark.parametrize("container", [Container, Chained])
@pytest.mark.parametrize("bad", [False, True])
def test_a_container_of_optimizers_steps_as_one(container: type[Container], bad: bool) -> None:
    optimizers = [sgd([torch.tensor([8.0])]), sgd([torch.tensor([math.inf if bad else 4.0])])]
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(container(optimizers))
    scaler.update()
    values = [o.param_groups[0]["params"][0].item() for o in optimizers]
    assert values == ([0.0, 0.0] if bad else [-1.0, -0.5])


def test_users_own_grad_scale_is_multiplied_in() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([32.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    assert parameter.item() == -4.0
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_users_own_grad_scale_is_used_up_by_a_first_step_that_is_skipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([math.inf])
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    assert parameter.item() == 0.0
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("own", [False, True])
def test_a_fused_optimizer_with_parameters_on_the_cpu_gets_copies_that_were_waited_for(own: bool) -> None:
    """Difference 21: torch's would copy both to the CPU itself, without waiting, and read at once."""
    optimizer = sgd([torch.ones(2)], fused=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a GPU's tensors without a GPU
        scale, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        optimizer.grad_scale = torch.ones((), device="cuda") if own else None
        with lending.lent((optimizer,), scale, found_inf, on_host=True):
            assert (optimizer.grad_scale.device.type, optimizer.found_inf.device.type) == ("cpu", "cpu")
        with lending.lent((optimizer,), scale, found_inf):
            assert (optimizer.grad_scale, optimizer.found_inf) == (scale, found_inf)
        with lending.lent((optimizer,), None, found_inf, on_host=True):
            assert optimizer.grad_scale is None


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


def test_two_optimizers_skip_each_for_itself_and_back_off_together() -> None:
    good, bad = sgd([torch.tensor([4.0])]), sgd([torch.tensor([math.nan])])
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(good)
    scaler.step(bad)
    scaler.update()
    assert good.param_groups[0]["params"][0].item() == -0.5
    assert bad.param_groups[0]["params"][0].item() == 0.0
    assert scaler.get_scale() == 2.0


def test_scale_is_the_truth_whoever_writes_it_in_whatever_shape() -> None:
    for shape in ((), (1,)):
        scaler = started(GradScaler, "cpu", init_scale=4.0, growth_interval=1)
        scaler._scale = torch.full(shape, 16.0)
        optimizer = sgd([torch.tensor([16.0])])
        scaler.unscale_(optimizer)
        assert optimizer.param_groups[0]["params"][0].grad.item() == 1.0
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 32.0
        scaler._scale.fill_(2.0)
        fused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, fused=True)
        fused.param_groups[0]["params"][0].grad = torch.tensor([4.0])
        scaler.step(fused)
        assert fused.param_groups[0]["params"][0].item() == -2.0


STATES = [{}, {"init_scale": 128.0, "growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.25}]


@both
@pytest.mark.parametrize("kwargs", STATES)
@pytest.mark.parametrize("started_first", [False, True])
def test_checkpoints_go_both_ways(ours: type, theirs: type, kwargs: dict[str, Any], started_first: bool) -> None:
    make = started if started_first else lambda cls, device, **kw: cls(device, **kw)
    for source, target in ((ours, theirs), (theirs, ours)):
        saved = make(source, "cpu", **kwargs)
        loaded = make(target, "cpu")
        loaded.load_state_dict(saved.state_dict())
        assert loaded.state_dict() == saved.state_dict()
        assert list(saved.state_dict()) == [
            "scale",
            "growth_factor",
            "backoff_factor",
            "growth_interval",
            "_growth_tracker",
        ]


@both
@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_continue_where_the_original_stood(ours: type, theirs: type, clone: Any) -> None:
    scaler = started(ours, "cpu", init_scale=64.0)
    scaler._growth_tracker.fill_(5)
    copied = clone(scaler)
    assert copied.state_dict() == scaler.state_dict()
    assert type(copied) is ours
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
    for copied in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), copy.copy(scaler)):
        assert not copied.is_enabled()


def test_pickled_between_unscale_and_update_raises_as_torch() -> None:
    optimizer = sgd([torch.ones(2)])
    scaler = started(GradScaler, "cpu")
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)


def test_a_new_optimizer_at_an_old_id_starts_ready_and_the_old_flag_counts() -> None:
    """Difference 11 from torch, which says that it was unscaled already."""
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    optimizer = sgd([torch.tensor([math.inf])])
    seen: set[int] = set()
    while id(optimizer) not in seen and len(seen) < 1000:  # until an id comes again
        seen.add(id(optimizer))
        scaler.unscale_(optimizer)
        assert flags(scaler, optimizer) == [1.0]
        del optimizer
        gc.collect(0)
        optimizer = sgd([torch.tensor([math.inf])])
    assert id(optimizer) in seen
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([4.0])
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [0.0]
    states = scaler._per_optimizer_states
    assert states[id(optimizer)]["stage"] is OptState.UNSCALED
    for other in seen - {id(optimizer)}:
        states.pop(other)
    scaler.update()  # the flag of the dead one at this id is left to be heard
    assert scaler.get_scale() == 2.0


def test_a_check_asked_for_early_does_not_stand_for_the_steps_own() -> None:
    optimizer = sgd([torch.tensor([4.0])], fused=True)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [0.0]
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([math.inf])
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == 0.0
    assert scaler.get_scale() == 2.0


def test_flags_put_into_the_dict_by_item_are_heard() -> None:
    for cls in (GradScaler, torch.amp.GradScaler):
        optimizer = sgd([torch.tensor([4.0])])
        scaler = started(cls, "cpu", init_scale=4.0)
        scaler.unscale_(optimizer)
        scaler._found_inf_per_device(optimizer)[torch.device("cpu")] = torch.ones(())
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.param_groups[0]["params"][0].item() == 0.0
        assert scaler.get_scale() == 2.0


def test_a_wrapper_that_takes_scale_and_flag_itself_gets_them() -> None:
    class Looking(Wrapper):
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= (1 - self.found_inf) * parameter.grad / self.grad_scale

    for cls in (GradScaler, torch.amp.GradScaler):
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([8.0])
        wrapper = Looking(torch.optim.SGD([parameter], lr=1.0, fused=True))
        started(cls, "cpu", init_scale=4.0).step(wrapper)
        assert parameter.item() == -2.0
        assert not {"grad_scale", "found_inf"} & set(vars(wrapper))


def test_a_class_attribute_named_grad_scale_is_no_hindrance() -> None:
    class Declares(torch.optim.SGD):
        grad_scale = None

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Declares([parameter], lr=1.0, fused=True)
    for explicit in (False, True):
        parameter.grad = torch.tensor([8.0])
        scaler = started(GradScaler, "cpu", init_scale=4.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert parameter.item() == -4.0


def test_containers_without_weak_references_leave_no_plans_behind() -> None:
    scaler = started(GradScaler, "cpu")
    for _ in range(5):
        scaler.step(Container([sgd([torch.ones(2)])]))
        scaler.update()
    assert len(scaler._plans) == 0


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


@pytest.mark.parametrize("fused", [False, True])
def test_a_sharded_optimizer_without_parameters_follows(fused: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(ShardedGradScaler, "_agreement", lambda self, plan: None)
    optimizer = torch.optim.SGD([{"params": []}], lr=1.0, fused=fused)
    scaler = started(ShardedGradScaler, "cpu", init_scale=4.0, growth_interval=1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_parameters_without_a_shape_yet_wait_their_turn() -> None:
    lazy = torch.nn.LazyLinear(3)
    optimizer = torch.optim.SGD([*lazy.parameters(), *parameters([torch.tensor([8.0])], "cpu")], lr=1.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.unscale_(optimizer)
    assert optimizer.param_groups[0]["params"][-1].grad.item() == 2.0


@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
def test_parameters_that_are_nowhere_yet_have_no_flag_that_cannot_be_read(method: str) -> None:
    nowhere = torch.nn.Parameter(torch.zeros(3, device="meta"))
    for first in (True, False):
        there = parameters([torch.tensor([8.0])], "cpu")
        optimizer = torch.optim.SGD([nowhere, *there] if first else [*there, nowhere], lr=1.0)
        for cls in (GradScaler, torch.amp.GradScaler):
            scaler = started(cls, "cpu", init_scale=4.0)
            getattr(scaler, method)(optimizer)
            assert flags(scaler, optimizer) == [0.0]


def test_exports() -> None:
    assert scaler_triton.__all__ == sorted(scaler_triton.__all__, key=str)
    for name in scaler_triton.__all__:
        assert getattr(scaler_triton, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scaler_triton.nothing  # noqa: B018

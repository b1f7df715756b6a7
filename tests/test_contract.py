"""What frameworks touch: argument orders, private methods and attributes, states and checkpoints."""

from __future__ import annotations

import gc
import inspect
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Place, flags, places, sgd, started
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler

PAIRS = [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["plain", "sharded"])


def positional(cls: type) -> dict[str, Any]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in kinds}


@pytest.mark.parametrize("ours", [GradScaler, ShardedGradScaler])
def test_updates_write_into_the_same_scale_and_tracker(ours: type, two_ranks: Any) -> None:
    """Who holds one of them sees every update; torch's ShardedGradScaler replaces its tracker on the CPU."""
    scaler, optimizer = ours("cpu", 8.0), sgd([torch.ones(3)])
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._scale, scaler._growth_tracker
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert tracker.item() == 3


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
@pytest.mark.parametrize(("args", "kwargs"), [((), {"foo": 1}), ((1,) * 9, {})])
def test_wrong_arguments_are_those_of_a_class_that_users_know(ours: type, theirs: type, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError) as error:
        ours("cpu", *args, **kwargs)
    assert str(error.value).startswith(f"{theirs.__name__}.__init__() ")


@both
def test_is_a_torch_scaler_of_the_same_qualified_name(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert ours.__qualname__ == theirs.__qualname__


@both
def test_has_every_name_that_torchs_instance_has(ours: type, theirs: type) -> None:
    mine, other = ours("cpu"), theirs("cpu")
    assert {name for name in dir(other) if not name.startswith("__")} <= set(dir(mine))


@both
@pytest.mark.parametrize("enabled", [False, True])
def test_programs_that_ask_whether_there_is_a_scale_are_told_what_torch_tells(
    ours: type, theirs: type, enabled: bool
) -> None:
    """As `scaler._scale.item() if hasattr(scaler, "_scale") else None`, on a machine without a GPU."""
    for name in ("_scale", "_growth_tracker"):
        asked = [hasattr(cls("cpu", enabled=enabled), name) for cls in (theirs, ours)]
        assert asked == [enabled, enabled]


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


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_flag_that_somebody_passes_is_not_written(place: Place) -> None:
    """One for several optimizers, say, whose flags are told apart."""
    bad, good = (torch.nn.Parameter(torch.ones(2, device=place.device)) for _ in range(2))
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    bad.grad, good.grad = torch.full_like(bad, math.inf), torch.full_like(good, 4.0)
    inverse, flag = torch.full((), 0.25, device=place.device), torch.zeros((), device=place.device)
    found = [scaler._unscale_grads_(torch.optim.SGD([each]), inverse, flag, False) for each in (bad, good)]
    assert [value.item() for flags in found for value in flags.values()] == [1.0, 0.0]
    assert flag.item() == 0.0
    assert good.grad.tolist() == [1.0, 1.0]


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


def methods_called(base: type, fused: bool) -> list[str]:
    """Return the methods that two steps call through `self`, in order, by a subclass that overrides all of torch's."""
    called: list[str] = []

    def overriding(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return method

    names = [name for name, value in vars(torch.amp.GradScaler).items() if callable(value) and name[:2] != "__"]
    scaler = type("Overriding", (base,), {name: overriding(name) for name in names})("cpu", init_scale=8.0)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    for _ in range(2):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return called


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_subclass_is_asked_as_often_and_in_the_same_order_as_torchs(fused: bool) -> None:
    called = methods_called(GradScaler, fused)
    assert called == methods_called(torch.amp.GradScaler, fused)
    assert {"_unscale_grads_", "_check_inf_per_device" if fused else "_maybe_opt_step"} <= {*called}


def test_exports() -> None:
    assert scaler_triton.__all__ == sorted(scaler_triton.__all__, key=str)
    for name in scaler_triton.__all__:
        assert getattr(scaler_triton, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scaler_triton.nothing  # noqa: B018

"""`patch_torch`: torch's names mean our classes while it lasts, and nothing of it is left afterwards."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import types
import warnings
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch_scalers import (
    NAMES,
    OURS,
    TorchCpu,
    TorchCuda,
    TorchPlain,
    TorchSharded,
    built,
    no_device,
    quietly,
    scaler_names,
)

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler, patch_torch, unpatch_torch
from scaler_triton.grad_scaler import ScalerMixin
from scaler_triton.patching import stand_in

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Nothing of a patch outlives its test, not even of one that failed."""
    before = scaler_names()
    # The classes that this and other test modules have taken would be named; test_takers_are_named looks at that.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch's gradient scalers were taken", category=UserWarning)
        yield
        after = scaler_names()
        unpatch_torch()
    assert after == before == scaler_names(), "the test left torch patched"
    assert (stand_in.originals, stand_in.strict) == ({}, False)


@pytest.fixture
def patched(restored: None) -> Iterator[None]:
    """Torch is patched during the test."""
    with patch_torch():
        yield


def is_patched() -> bool:
    return torch.amp.GradScaler is GradScaler


def test_every_name_of_torch_means_ours_until_it_is_unpatched() -> None:
    before = scaler_names()
    assert {name: cls for name, (cls, _) in NAMES.items()}.items() <= before.items()
    patch_torch()
    assert scaler_names() == {name: OURS[cls] for name, cls in before.items()}
    unpatch_torch()
    assert scaler_names() == before


def test_a_module_of_torch_that_is_imported_meanwhile_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    late = types.ModuleType("torch.late")
    monkeypatch.setitem(sys.modules, "torch.late", late)
    with patch_torch():
        late.GradScaler = torch.amp.GradScaler
    assert late.GradScaler is TorchPlain
    del late.GradScaler


def test_what_somebody_else_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    monkeypatch.setattr(torch.cpu.amp, "GradScaler", TorchCpu)
    with patch_torch():
        torch.cpu.amp.GradScaler = Other
    assert torch.cpu.amp.GradScaler is Other
    monkeypatch.undo()


# The classes without a device.


@pytest.mark.parametrize("theirs", [TorchCuda, TorchCpu], ids=["cuda", "cpu"])
def test_the_older_classes_have_torchs_signature(theirs: Any) -> None:
    assert inspect.signature(OURS[theirs], eval_str=True) == inspect.signature(theirs, eval_str=True)


def warning_of(build: Callable[[], Any]) -> list[tuple[Any, ...]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return [(str(w.message), w.category, w.filename, w.lineno) for w in caught if w.category is FutureWarning]


@pytest.mark.parametrize("theirs", [TorchCuda, TorchCpu], ids=["cuda", "cpu"])
def test_the_older_classes_give_torchs_warning_for_the_callers_line(theirs: Any) -> None:
    found = [warning_of(lambda: cls(enabled=False)) for cls in (theirs, OURS[theirs])]  # noqa: B023
    assert len(found[0]) == 1
    assert found[0] == found[1]


def test_the_older_classes_pass_their_arguments_on(patched: None) -> None:
    numbers = (4.0, 3.0, 0.25, 7)
    ours, theirs = quietly(torch.cpu.amp.GradScaler, *numbers), quietly(TorchCpu, *numbers)
    assert isinstance(ours, GradScaler)
    assert ours.state_dict() == theirs.state_dict()
    assert (ours._device, quietly(torch.cuda.amp.GradScaler, enabled=False)._device) == ("cpu", "cuda")
    assert not quietly(torch.cpu.amp.GradScaler, *numbers, False).is_enabled()


# Who is an instance of what.


def test_scalers_made_before_are_instances_of_the_new_classes() -> None:
    before = {cls: built(cls) for cls in OURS}
    with patch_torch():
        for cls, scaler in before.items():
            assert isinstance(scaler, OURS[cls])
            assert issubclass(cls, OURS[cls])
            assert isinstance(scaler, torch.amp.GradScaler)
        assert not isinstance(before[TorchPlain], torch.cpu.amp.GradScaler)
        assert not isinstance(before[TorchPlain], ShardedGradScaler)
        assert not isinstance(3, torch.amp.GradScaler)
    for cls, scaler in before.items():
        assert isinstance(scaler, cls)
        assert not isinstance(scaler, OURS[cls])
        assert not issubclass(cls, OURS[cls])


def test_new_scalers_are_instances_of_old_and_new_classes(patched: None) -> None:
    for ours in OURS.values():
        scaler = built(ours)
        assert isinstance(scaler, ours)
        assert isinstance(scaler, torch.amp.GradScaler)  # the sharded one, too, as with torch's classes
        assert isinstance(scaler, TorchPlain)
    assert isinstance(ShardedGradScaler("cpu"), TorchSharded)
    assert not isinstance(GradScaler("cpu"), ShardedGradScaler)


def test_what_is_ours_can_still_be_told_apart() -> None:
    theirs = TorchPlain("cpu")
    with patch_torch():
        assert isinstance(theirs, GradScaler)
        assert not isinstance(theirs, ScalerMixin)
    assert not isinstance(theirs, ScalerMixin)
    assert isinstance(GradScaler("cpu"), ScalerMixin)


def test_isinstance_is_unchanged_without_a_patch() -> None:
    assert not isinstance(TorchPlain("cpu"), GradScaler)
    assert not isinstance(ShardedGradScaler("cpu"), GradScaler)
    assert isinstance(GradScaler("cpu"), TorchPlain)


# What frameworks do with the class.


@pytest.mark.parametrize("name", NAMES)
def test_a_framework_may_derive_from_any_of_the_names(name: str, patched: None) -> None:
    base = NAMES[name][1]

    class MyScaler(base, ABC):
        def __init__(self, floor: float) -> None:
            super().__init__(**no_device(base), init_scale=8.0)
            self.floor = floor

    scaler = quietly(MyScaler, 2.0)
    assert isinstance(scaler, ScalerMixin)
    assert not isinstance(GradScaler("cpu"), MyScaler)
    assert not isinstance(TorchPlain("cpu"), MyScaler)
    if scaler._device == "cpu" and not isinstance(scaler, ShardedGradScaler):  # which asks for a process group
        assert skips_and_backs_off(scaler)


class Clipper(Protocol):
    """A protocol of somebody's."""

    def clip(self) -> int: ...


@pytest.mark.parametrize("other", [Stateful, Clipper, ABC, Generic[TypeVar("T")]], ids=str)
@pytest.mark.parametrize("base", [TorchPlain, GradScaler, ShardedGradScaler], ids=lambda cls: cls.__module__)
def test_a_class_may_derive_from_a_protocol_as_well(base: Any, other: Any) -> None:
    both = types.new_class("Both", (base, other), {}, lambda body: body.update(clip=lambda self: 3))
    scaler = both("cpu", init_scale=8.0)
    assert isinstance(scaler, (both, base))
    assert not isinstance(base("cpu"), both)
    assert scaler.state_dict()["scale"] == 8.0
    assert base is ShardedGradScaler or skips_and_backs_off(scaler)  # that one asks for a process group


def skips_and_backs_off(scaler: Any) -> bool:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    weight.grad[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return bool((weight == 1).all()) and scaler.get_scale() == 4.0


@pytest.mark.parametrize("patch", [nullcontext, patch_torch])
def test_what_is_replaced_on_torchs_class_reaches_ours_under_a_patch(
    patch: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Difference 22 from torch."""
    called = []
    with patch():
        before: Any = torch.amp.GradScaler.update

        def update(self: Any, *args: Any) -> Any:
            called.append(self)
            return before(self, *args)

        monkeypatch.setattr(torch.amp.GradScaler, "update", update)
        assert skips_and_backs_off(scaler_triton.GradScaler("cpu", init_scale=8.0))
        monkeypatch.undo()
    assert bool(called) == (patch is patch_torch)


def test_the_metaclass_of_a_subclass_is_derived_from_ours() -> None:
    """Difference 22 from torch."""

    class Other(type):
        pass

    class Derived(type(scaler_triton.GradScaler)):  # type: ignore[misc]
        pass

    Other("Subclass", (torch.amp.GradScaler,), {})
    with pytest.raises(TypeError, match="^metaclass conflict"):
        Other("Subclass", (scaler_triton.GradScaler,), {})
    assert Derived("Subclass", (scaler_triton.GradScaler,), {})("cpu", init_scale=8.0).get_scale() == 8.0


def test_a_scaler_built_by_torchs_name_is_ours_and_works(patched: None) -> None:
    assert skips_and_backs_off(torch.GradScaler("cpu", init_scale=8.0))
    assert skips_and_backs_off(quietly(torch.cpu.amp.GradScaler, init_scale=8.0))


def test_a_scaler_made_before_works_on(patched: None) -> None:
    assert skips_and_backs_off(TorchPlain("cpu", init_scale=8.0))


@pytest.mark.parametrize("cls", OURS.values(), ids=lambda cls: cls.__module__)
def test_names_stay_torchs(cls: type) -> None:
    """Composer keys its checkpoints by them."""
    theirs = next(torchs for torchs, ours in OURS.items() if ours is cls)
    assert (cls.__name__, cls.__qualname__) == (theirs.__name__, theirs.__qualname__)
    messages = []
    for each in (theirs, cls):
        with pytest.raises(TypeError) as raised:
            quietly(each, unknown=1)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


# Pickles and copies.


@pytest.mark.parametrize("cls", OURS.values(), ids=lambda cls: cls.__module__)
def test_pickles_of_ours_load_with_and_without_a_patch(cls: type) -> None:
    with patch_torch():
        scaler = quietly(cls, **no_device(cls), enabled=False)
        pickled = pickle.dumps(scaler)
        assert type(pickle.loads(pickled)) is type(copy.deepcopy(scaler)) is cls
    assert type(pickle.loads(pickled)) is cls


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__module__)
def test_scalers_made_before_are_pickled_and_copied_as_what_they_are(cls: type) -> None:
    scaler = built(cls)
    with patch_torch():
        pickled = pickle.dumps(scaler)
        copies = [pickle.loads(pickled), copy.copy(scaler), copy.deepcopy(scaler)]
    copies.append(pickle.loads(pickled))
    assert [type(made) for made in copies] == [cls] * 4
    assert [made.state_dict() for made in copies] == [scaler.state_dict()] * 4
    assert pickle.dumps(scaler) != pickled, "torch's own way to pickle is back"


def test_an_older_pickle_loads_as_ours(patched: None) -> None:
    unpatch_torch()
    scaler = TorchPlain("cpu", init_scale=8.0, growth_interval=5)
    scaler.scale(torch.ones(()))
    pickles = [pickle.dumps(each) for each in (scaler, quietly(TorchCpu, init_scale=8.0, growth_interval=5))]
    patch_torch()
    for loaded in map(pickle.loads, pickles):
        assert isinstance(loaded, ScalerMixin)
        assert loaded.state_dict() == scaler.state_dict()
        assert skips_and_backs_off(loaded)
    unpatch_torch()


def test_an_older_pickle_of_a_sharded_scaler_loads_as_ours() -> None:
    pickled = pickle.dumps(TorchSharded("cpu", init_scale=8.0))
    with patch_torch():
        loaded = pickle.loads(pickled)
    assert type(loaded) is ShardedGradScaler
    assert (loaded.get_scale(), loaded.process_group) == (8.0, None)
    assert loaded.scale(torch.ones(())) == 8.0


LOADS = """
import pickle, sys
print(*[type(scaler).__module__ for scaler in pickle.loads(bytes.fromhex(sys.stdin.read()))])
"""


def test_pickles_travel_to_processes_that_are_not_patched() -> None:
    before = TorchPlain("cpu")
    with patch_torch():
        pickled = pickle.dumps([before, torch.amp.GradScaler("cpu"), quietly(torch.cpu.amp.GradScaler)])
    command = [sys.executable, "-c", LOADS]
    out = subprocess.check_output(command, cwd=ROOT, input=pickled.hex(), text=True, timeout=120)
    assert out.split() == ["torch.amp.grad_scaler", "scaler_triton.grad_scaler", "scaler_triton.patching.cpu_amp"]


# How long it lasts.


def test_a_context_manager_restores_at_its_end_also_after_an_error() -> None:
    with pytest.raises(KeyError), patch_torch():
        raise KeyError(is_patched())
    assert not is_patched()


def test_contexts_nest_and_end_in_any_order() -> None:
    with patch_torch():
        with patch_torch():
            pass
        assert is_patched()
    assert not is_patched()
    first, second = patch_torch(), patch_torch()
    first.__exit__(None, None, None)
    assert is_patched()
    second.__exit__(None, None, None)
    assert not is_patched()


def test_a_context_inside_a_lasting_patch_leaves_it_in_force() -> None:
    patch_torch()
    with patch_torch():
        pass
    assert is_patched()
    unpatch_torch()


def test_a_context_may_be_entered_again() -> None:
    context = patch_torch()
    for _ in range(2):
        with context:
            assert is_patched()
        assert not is_patched()


def test_one_unpatch_ends_it_however_often_it_was_called() -> None:
    for _ in range(3):
        patch_torch()
    with patch_torch():
        unpatch_torch()
        assert not is_patched()
    assert not is_patched()
    unpatch_torch()


def test_strict_lasts_as_long_as_its_call() -> None:
    with patch_torch():
        with patch_torch(strict=True):
            assert stand_in.strict
            with patch_torch():
                assert stand_in.strict
        assert not stand_in.strict


def test_strict_is_a_bool() -> None:
    with pytest.raises(TypeError, match="strict must be True or False, got 'yes'"):
        patch_torch(strict="yes")  # type: ignore[arg-type]
    assert not is_patched()


def test_public_names() -> None:
    assert {"patch_torch", "unpatch_torch"} <= set(scaler_triton.__all__)
    assert [inspect.getdoc(name).splitlines()[0][-1] for name in (patch_torch, unpatch_torch)] == [".", "."]

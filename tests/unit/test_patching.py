"""`patch_torch`: torch's names mean our classes while it lasts, and nothing of it is left afterwards."""

import copy
import inspect
import pickle
import subprocess
import sys
import types
import warnings
from abc import ABC
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from scaler_triton import GradScaler, ShardedGradScaler, patch_torch, patching, unpatch_torch
from scaler_triton.core import ranks

ROOT = Path(__file__).parents[2]
TorchPlain, TorchCuda, TorchCpu = torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler
OURS: dict[type, type] = patching._OURS


def scaler_names() -> dict[str, type]:
    """What every name of torch that means a scaler class means, wherever it is."""
    found = {}
    for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "torch"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type in type(value).__mro__ and TorchPlain in value.__mro__:  # isinstance() would wake proxies
                found[f"{module.__name__}.{name}"] = value
    return found


def built(cls: Any, **options: Any) -> Any:
    """A scaler for the CPU, if its class takes a device, without the warnings of deprecated classes."""
    if "device" in inspect.signature(cls).parameters:
        options["device"] = "cpu"
    with warnings.catch_warnings(action="ignore"):
        return cls(**options)


def skips_and_backs_off(scaler: Any) -> bool:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    weight.grad[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return bool((weight == 1).all()) and scaler.get_scale() == 4.0


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Nothing of a patch outlives its test, not even of one that failed."""
    before = scaler_names()
    with warnings.catch_warnings():  # this module has taken torch's classes
        warnings.filterwarnings("ignore", message=r"\[ST14\]", category=UserWarning)
        yield
    after = scaler_names()
    unpatch_torch()
    assert after == before == scaler_names(), "the test left torch patched"
    assert ranks.strict is False


def test_every_name_of_torch_means_ours_while_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before, late = scaler_names(), types.ModuleType("torch.late")
    assert set(before.values()) == set(OURS)
    monkeypatch.setitem(sys.modules, "torch.late", late)
    monkeypatch.setattr(torch.cpu.amp, "GradScaler", TorchCpu)
    patch_torch()
    assert scaler_names() == {name: OURS[cls] for name, cls in before.items()}
    vars(late)["Scaler"], torch.cpu.amp.GradScaler = torch.amp.GradScaler, int
    unpatch_torch()
    assert (vars(late).pop("Scaler"), torch.cpu.amp.GradScaler) == (TorchPlain, int)  # int was not put there by us


@pytest.mark.parametrize(("cls", "device"), [(TorchCuda, "cuda"), (TorchCpu, "cpu")])
def test_the_deprecated_classes_are_called_and_warn_as_torchs(cls: Any, device: str) -> None:
    assert inspect.signature(OURS[cls], eval_str=True) == inspect.signature(cls, eval_str=True)
    found = []
    for each in (cls, OURS[cls]):
        with warnings.catch_warnings(record=True, action="always") as caught:
            scalers = each(4.0, 3.0, 0.25, 7), each(4.0, 3.0, 0.25, 7, False)
        assert [scaler._device for scaler in scalers] == [device] * 2
        assert not scalers[1].is_enabled()
        found.append(scalers[0].state_dict())
        found.append([(str(w.message), w.filename, w.lineno) for w in caught if w.category is FutureWarning])
    assert len(found[1]) == 2
    assert found[:2] == found[2:]


@pytest.mark.parametrize("theirs", OURS, ids=lambda cls: cls.__module__)
def test_classes_keep_torchs_names(theirs: Any) -> None:
    """Composer keys its checkpoints by them."""
    messages = []
    for cls in (theirs, OURS[theirs]):
        with pytest.raises(TypeError) as raised:
            built(cls, unknown=1)
        messages.append(str(raised.value))
    assert (OURS[theirs].__name__, OURS[theirs].__qualname__) == (theirs.__name__, theirs.__qualname__)
    assert messages[0] == messages[1]


def test_scalers_work_whenever_they_were_made_and_in_subclasses() -> None:
    before = TorchPlain("cpu", init_scale=8.0)
    with patch_torch():
        mine: Any = type("Mine", (torch.amp.GradScaler, ABC), {})
        for scaler in (before, torch.GradScaler("cpu", init_scale=8.0), mine("cpu", init_scale=8.0)):
            assert skips_and_backs_off(scaler)
        assert skips_and_backs_off(built(torch.cpu.amp.GradScaler, init_scale=8.0))
        assert not isinstance(torch.GradScaler("cpu"), mine)


@pytest.mark.parametrize("patch", [nullcontext, patch_torch])
def test_what_is_replaced_on_torchs_class_reaches_ours_under_a_patch(patch: Any, monkeypatch: Any) -> None:
    """Difference 22 from torch."""
    called, scaler = [], GradScaler("cpu", init_scale=8.0)
    with patch():
        before = torch.amp.GradScaler.update
        monkeypatch.setattr(torch.amp.GradScaler, "update", lambda self: (called.append(self), before(self)))
        assert skips_and_backs_off(scaler)
        monkeypatch.undo()
    assert bool(called) == (patch is patch_torch)


@pytest.mark.parametrize("cls", OURS.values(), ids=lambda cls: cls.__module__)
def test_pickles_of_ours_load_with_and_without_a_patch(cls: Any) -> None:
    with patch_torch():
        scaler = built(cls, enabled=False)
        loaded = [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)]
    loaded.append(pickle.loads(pickle.dumps(scaler)))
    plain = ShardedGradScaler if cls is ShardedGradScaler else GradScaler
    assert all(isinstance(each, plain) and each._device == scaler._device for each in loaded)


def test_contexts_nest_end_in_any_order_and_can_be_entered_again() -> None:
    with pytest.raises(KeyError), patch_torch():
        raise KeyError
    assert torch.amp.GradScaler is TorchPlain
    first, second = patch_torch(), patch_torch()
    first.__exit__(None, None, None)
    assert torch.amp.GradScaler is GradScaler
    second.__exit__(None, None, None)
    assert torch.amp.GradScaler is TorchPlain
    with first, patch_torch():
        patch_torch()
        unpatch_torch()
        assert torch.amp.GradScaler is TorchPlain


def test_strict_lasts_as_long_as_its_call() -> None:
    with patch_torch():
        with patch_torch(strict=True), patch_torch():
            assert ranks.strict
        assert not ranks.strict
    with pytest.raises(TypeError, match="strict must be True or False, got 'yes'"):
        patch_torch(strict="yes")  # type: ignore[arg-type]
    assert torch.amp.GradScaler is TorchPlain


TAKEN = """
import sys, types, warnings
from importlib.util import LazyLoader, find_spec, module_from_spec
import torch, scaler_triton.patching

def module(name):
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]

module("framework.amp").Scaler = torch.cuda.amp.GradScaler
module("framework.plugin").Base = type("Mine", (torch.amp.GradScaler,), {"__module__": "framework.plugin"})
module("framework.innocent").torch = torch
module("torchlike").GradScaler = torch.amp.GradScaler
spec = find_spec("this")  # prints when it is loaded
loader = LazyLoader(spec.loader)
sys.modules["this"] = lazy = module_from_spec(spec)
loader.exec_module(lazy)
warnings.simplefilter("error")
try:
    scaler_triton.patch_torch()
except UserWarning:
    print(torch.amp.GradScaler is sys.modules["torchlike"].GradScaler)
with warnings.catch_warnings(record=True, action="always") as caught:
    scaler_triton.patch_torch()
    scaler_triton.patch_torch()
print(*[f"{warning.filename} {warning.message}" for warning in caught])
"""


def test_importers_are_named_once_and_an_error_leaves_torch_as_it_was() -> None:
    printed = subprocess.check_output([sys.executable, "-c", TAKEN], cwd=ROOT, text=True, timeout=120)
    assert printed.splitlines() == [
        "True",
        "<string> [ST14] torch's gradient scalers were imported before patch_torch() by framework.amp, "
        "framework.plugin, torchlike, and stay there. Call patch_torch() before importing what imports them.",
    ]

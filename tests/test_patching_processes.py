"""`patch_torch` in processes of its own: who came before it, what is missing there, what else is in its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import STRICT

ROOT = Path(__file__).parents[1]


def isolated(code: str) -> str:
    """Run `code` in a process of its own, where every warning is an error; return what it printed."""
    command = [sys.executable, *STRICT, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


TAKEN = """
import dataclasses, functools, sys, types, warnings
from importlib.util import LazyLoader, find_spec, module_from_spec
import torch
from torch.cpu.amp import GradScaler
import scaler_triton.patching.patch  # FSDP is imported now: its import wakes lazy modules

def module(name):
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]

def unfinished():
    return lambda: later  # which has no value
    later = None

module("framework.amp").Scaler = torch.cuda.amp.GradScaler
module("framework.plugin").Base = type("Mine", (torch.amp.GradScaler,), {"__module__": "framework.plugin"})
module("framework.innocent").torch = torch
module("framework.table").SCALERS = {"cpu": torch.amp.GradScaler}
module("framework.listed").SCALERS = (torch.cpu.amp.GradScaler,)
module("framework.default").build = lambda device, cls=torch.amp.GradScaler: cls(device)
module("framework.keyword").build = lambda *, cls=torch.amp.GradScaler: cls("cpu")
module("framework.engine").Engine = type("Engine", (), {"__module__": "framework.engine", "cls": torch.amp.GradScaler})
module("framework.method").Engine = type(
    "Engine", (), {"__module__": "framework.method", "start": lambda self, cls=torch.amp.GradScaler: cls("cpu")}
)
module("framework.static").Engine = type(
    "Engine", (), {"__module__": "framework.static", "make": staticmethod(torch.amp.GradScaler)}
)
factory = dataclasses.field(default_factory=torch.amp.GradScaler)
module("framework.field").Setup = dataclasses.make_dataclass("Setup", [("scaler", object, factory)])
sys.modules["framework.field"].Setup.__module__ = "framework.field"
module("framework.partial").make = functools.partial(torch.amp.GradScaler, "cpu")
module("framework.nested").SCALERS = {"amp": {"cpu": torch.amp.GradScaler}}
module("framework.closure").make = (lambda cls: lambda: cls("cpu"))(torch.amp.GradScaler)
module("framework.unfinished").make = unfinished()
module("framework.borrower").Engine = sys.modules["framework.engine"].Engine
module("torchlike").GradScaler = torch.amp.GradScaler
spec = find_spec("this")  # prints when it is loaded
loader = LazyLoader(spec.loader)
sys.modules["this"] = lazy = module_from_spec(spec)
loader.exec_module(lazy)

taken = {name: dict(vars(sys.modules[name])) for name in ("framework.amp", "framework.plugin", "torchlike", "__main__")}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    scaler_triton.patch_torch()
    scaler_triton.patch_torch()
for warning in caught:
    print(warning.category.__name__, warning.filename, warning.message)
for name, names in taken.items():
    assert all(vars(sys.modules[name])[key] is value for key, value in names.items()), name
assert issubclass(GradScaler, torch.amp.GradScaler)
"""


def test_takers_are_named_once_and_keep_what_they_took() -> None:
    (line,) = isolated(TAKEN).splitlines()
    assert line == (
        "UserWarning <string> torch's gradient scalers were taken before patch_torch() by __main__, framework.amp, "
        "framework.closure, framework.default, framework.engine, framework.field, framework.keyword, framework.listed, "
        "framework.method, framework.nested, framework.partial, framework.plugin, framework.static, framework.table, "
        "torchlike, and stay there. Call patch_torch() before importing what takes them."
    )


REFUSED = """
import sys, types, torch, scaler_triton
sys.modules["early"] = types.ModuleType("early")
sys.modules["early"].GradScaler = torch.GradScaler
try:
    scaler_triton.patch_torch()
except UserWarning:
    print(torch.GradScaler is sys.modules["early"].GradScaler)
scaler_triton.unpatch_torch()
"""


def test_a_warning_that_is_an_error_leaves_torch_as_it_was() -> None:
    assert isolated(REFUSED).split() == ["True"]


PATCHED_FIRST = """
import sys, torch
from scaler_triton import patch_torch
with patch_torch():
    from torch.cuda.amp import GradScaler as cuda
    from torch.amp import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    print(cuda.__module__, GradScaler.__module__, ShardedGradScaler.__module__)
print(torch.amp.GradScaler.__module__)
"""


def test_who_patches_first_hears_nothing() -> None:
    ours = [
        "scaler_triton.patching.cuda_amp",
        "scaler_triton.grad_scaler",
        "scaler_triton.sharded",
        "torch.amp.grad_scaler",
    ]
    assert isolated(PATCHED_FIRST).split() == ours


WITHOUT_DISTRIBUTED = """
import sys, torch
torch.distributed.is_available = lambda: False
import scaler_triton
with scaler_triton.patch_torch():
    print(torch.amp.GradScaler.__module__, "torch.distributed.fsdp" in sys.modules)
"""


def test_a_torch_without_distributed_is_patched_as_far_as_it_goes() -> None:
    assert isolated(WITHOUT_DISTRIBUTED).split() == ["scaler_triton.grad_scaler", "False"]


BY_HAND = """
import torch, scaler_triton
old = torch.amp.GradScaler("cpu")
torch.amp.GradScaler = scaler_triton.GradScaler
with scaler_triton.patch_torch():
    print(isinstance(old, torch.amp.GradScaler), isinstance(3, torch.amp.GradScaler))
print(torch.amp.grad_scaler.GradScaler is type(old))
"""


def test_a_class_put_there_by_hand_before_does_no_harm() -> None:
    assert isolated(BY_HAND).split() == ["True", "False", "True"]


# torch's own test suite trains with a scaler that it builds by its name. It asks for a package that is not needed here.
TORCHS_TRAINING = """
import sys, types, unittest, warnings
import torch, torch.distributed as dist
import scaler_triton

scaler_triton.patch_torch()
calls = []
update = scaler_triton.ShardedGradScaler.update
scaler_triton.ShardedGradScaler.update = lambda scaler, *args: (calls.append(scaler.get_scale()), update(scaler, *args))

stub = types.ModuleType("expecttest")
stub.TestCase = unittest.TestCase
sys.modules.setdefault("expecttest", stub)
warnings.simplefilter("ignore")
try:
    from torch.testing._internal.common_fsdp import FSDPTest
except ImportError as error:
    sys.exit(print("skip", error))

class Model(torch.nn.Linear):
    module = property(lambda self: self)
    get_input = lambda self, device: (torch.ones(1, 2),)
    get_loss = lambda self, batch, output: output.sum()
    run_backward = lambda self, loss: loss.backward()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
settings = {"device": "cpu", "init_scale": 8.0, "growth_interval": 1}
train = FSDPTest._train_for_several_steps
train(unittest.TestCase(), Model(2, 1), 3, autocast=False, enable_sharded_grad_scaler=True,
      sharded_grad_scaler_kwargs=settings)
print(*calls)
"""


def test_torchs_own_training_code_builds_ours() -> None:
    printed = isolated(TORCHS_TRAINING).split()
    if printed[0] == "skip":
        pytest.skip(" ".join(printed[1:]))
    assert printed == ["8.0", "16.0", "32.0"]

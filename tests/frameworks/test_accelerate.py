"""Accelerate in one process: what the one line changes, what it refuses, what it says of skipped steps."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer as Original
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradScalerKwargs
from accelerate_cases import backward, linear, new_accelerator, use_torch

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.integrations import accelerate as integration
from scaler_triton.integrations.accelerate import _AcceleratedOptimizer, use_scaler_triton

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("first_accelerator")


# What it gives, and when.


def test_the_scaler_gets_accelerates_numbers():
    numbers = {"init_scale": 32.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**numbers)])
    scaler = use_scaler_triton(accelerator)
    assert type(scaler) is GradScaler
    assert accelerator.scaler is scaler
    assert scaler.state_dict() == GradScaler("cpu", **numbers).state_dict()


def test_the_scaler_gets_what_the_one_before_it_had():
    accelerator = new_accelerator()
    theirs = use_torch(accelerator)
    state = {"scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 9, "_growth_tracker": 5}
    theirs.load_state_dict(state)
    assert use_scaler_triton(accelerator).state_dict() == state


def test_settings_beat_accelerates_numbers():
    scaler = use_scaler_triton(new_accelerator(), init_scale=64.0, min_scale=2.0)
    assert scaler.get_scale() == 64.0
    assert scaler.get_min_scale() == 2.0
    assert scaler.get_growth_interval() == 2


@pytest.mark.parametrize(
    ("kind", "fsdp2", "cls"),
    [
        (DistributedType.NO, False, GradScaler),
        (DistributedType.MULTI_CPU, False, GradScaler),
        (DistributedType.FSDP, False, ShardedGradScaler),
        (DistributedType.FSDP, True, GradScaler),  # its DTensors tell who must agree
    ],
)
def test_the_class_that_each_sharding_needs(kind, fsdp2, cls):
    assert integration._scaler_class(SimpleNamespace(distributed_type=kind, is_fsdp2=fsdp2)) is cls


@pytest.mark.parametrize("trainer", [False, True])
def test_versions_are_looked_at(monkeypatch, trainer):
    accelerator = new_accelerator()
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    if trainer:
        monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with mock.patch.object(integration.versions, "check") as check:
        use_scaler_triton(accelerator)
    assert [call.args for call in check.call_args_list] == [("accelerate",), ("transformers",)][: 1 + trainer]


def test_called_again_it_changes_nothing():
    accelerator = new_accelerator()
    scaler = use_scaler_triton(accelerator, min_scale=2.0)
    assert use_scaler_triton(accelerator) is scaler
    _, optimizer = linear(accelerator)
    assert use_scaler_triton(accelerator) is scaler
    assert type(optimizer) is _AcceleratedOptimizer
    assert optimizer.scaler is scaler


def test_a_scaler_of_ours_stays_with_what_was_prepared():
    accelerator = new_accelerator()
    accelerator.scaler, accelerator.native_amp = GradScaler("cpu", init_scale=4.0), True  # as under patch_torch()
    scaler, (layer, optimizer) = accelerator.scaler, linear(accelerator)
    assert type(optimizer) is Original
    assert use_scaler_triton(accelerator) is scaler
    assert type(optimizer) is _AcceleratedOptimizer
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.parameters(), 1.0)) == 5.0


def test_a_model_that_was_prepared_with_autocast_is_no_reason_to_refuse():
    accelerator = new_accelerator()
    accelerator.native_amp = True  # as on a GPU
    accelerator.prepare(nn.Linear(2, 1))
    assert use_scaler_triton(accelerator) is accelerator.scaler
    assert type(accelerator.scaler) is GradScaler


def test_autocast_is_on_where_accelerate_leaves_it_out():
    accelerator, seen = new_accelerator(), []
    use_scaler_triton(accelerator)
    model = nn.Sequential(nn.Linear(2, 2))  # what the outermost module returns is made fp32
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    accelerator.prepare(model)(torch.ones(1, 2))
    assert seen == [torch.float16]


def test_other_accelerators_stay_as_they_are():
    use_scaler_triton(new_accelerator())
    other = new_accelerator()
    use_torch(other)
    layer, optimizer = linear(other)
    assert type(optimizer) is Original
    backward(other, layer)
    with mock.patch.object(GradScaler, "clip_grad_norm_", side_effect=AssertionError):
        assert float(other.clip_grad_norm_(layer.parameters(), 1.0)) == 5.0


def test_a_disabled_scaler_leaves_all_to_accelerate():
    handlers = [GradScalerKwargs(enabled=False)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    assert not use_scaler_triton(accelerator).is_enabled()
    layer, optimizer = linear(accelerator)
    backward(accelerator, layer)
    with mock.patch.object(GradScaler, "clip_grad_norm_", side_effect=AssertionError):
        assert float(accelerator.clip_grad_norm_(layer.parameters(), 1.0)) == 5.0
    optimizer.step()
    assert not optimizer.step_was_skipped


# What it refuses.


@pytest.mark.parametrize(("precision", "why"), [("no", ""), ("bf16", ": bf16 needs no scaler")])
def test_refuses_other_precisions(precision, why):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    with pytest.raises(ValueError, match=f"accelerator must have mixed_precision='fp16', got '{precision}'{why}$"):
        use_scaler_triton(accelerator)


def test_refuses_what_is_no_accelerator():
    with pytest.raises(TypeError, match=r"^accelerator must be an accelerate\.Accelerator, got Linear$"):
        use_scaler_triton(nn.Linear(1, 1))
    trainer = SimpleNamespace(accelerator=new_accelerator())
    with pytest.raises(TypeError, match=r", got SimpleNamespace; pass its \.accelerator$"):
        use_scaler_triton(trainer)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_refuses_what_scales_by_itself(kind):
    accelerator = new_accelerator()
    AcceleratorState._shared_state["distributed_type"] = DistributedType[kind]
    with pytest.raises(ValueError, match=f"distributed_type that uses torch's scaler, got {kind}"):
        use_scaler_triton(accelerator)


def test_refuses_what_was_prepared_and_changes_nothing():
    accelerator = new_accelerator()
    theirs = use_torch(accelerator)
    linear(accelerator)
    with pytest.raises(ValueError, match="accelerator must have prepared nothing yet, .*: SGD"):
        use_scaler_triton(accelerator)
    assert accelerator.scaler is theirs
    assert not {"clip_grad_norm_", "prepare_optimizer"} & vars(accelerator).keys()


def test_refuses_a_model_prepared_without_autocast():
    accelerator = new_accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="accelerator must have prepared nothing yet, .*: Linear"):
        use_scaler_triton(accelerator)


def test_refuses_settings_once_prepared():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    linear(accelerator)
    with pytest.raises(ValueError, match="accelerator must have prepared nothing yet"):
        use_scaler_triton(accelerator, min_scale=1.0)


def test_refuses_wrong_settings_and_changes_nothing():
    accelerator = new_accelerator()
    with pytest.raises(ValueError, match="min_scale"):
        use_scaler_triton(accelerator, min_scale=-1.0)
    assert accelerator.scaler is None
    assert not accelerator.native_amp


# An optimizer of another make.


class Offloading(torch.optim.Optimizer):
    """Has no `state` of its own but an optimizer inside, as torchao's CPUOffloadOptimizer, which skips `__init__`."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside
        self.state_dict, self.load_state_dict, self.step = inside.state_dict, inside.load_state_dict, inside.step

    param_groups = property(lambda self: self.inside.param_groups)  # type: ignore[assignment]


def test_an_optimizer_without_a_state_is_stepped():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer = nn.Linear(2, 1, bias=False)
    layer, optimizer = accelerator.prepare(layer, Offloading(torch.optim.SGD(layer.parameters(), lr=0.5)))
    before = layer.weight.detach().clone()
    backward(accelerator, layer)
    optimizer.step()
    assert torch.equal(layer.weight, before - 0.5 * torch.tensor([[3.0, 4.0]]))
    assert not optimizer.step_was_skipped


# What took torch's class before `patch_torch`.

TAKEN = """
import warnings
import accelerate, scaler_triton
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    scaler_triton.patch_torch()
print(*[warning.message for warning in caught])
"""


def test_accelerate_is_named_if_it_is_imported_before_torch_is_patched():
    printed = subprocess.check_output([sys.executable, "-c", TAKEN], cwd=ROOT, text=True, timeout=120)
    assert "taken before patch_torch() by accelerate.checkpointing, and stay there" in printed


MADE = """
import scaler_triton
scaler_triton.patch_torch()
from accelerate.utils import DistributedType
from accelerate.utils.modeling import get_grad_scaler
for kind, cls in {"FSDP": "ShardedGradScaler", "MULTI_GPU": "GradScaler", "NO": "GradScaler"}.items():
    made = get_grad_scaler(DistributedType[kind], init_scale=4.0)
    assert type(made) is getattr(scaler_triton, cls), (kind, type(made))
"""


def test_accelerate_makes_ours_after_torch_is_patched():
    subprocess.run([sys.executable, "-c", MADE], cwd=ROOT, timeout=120, check=True)


# Copies.


def trained() -> tuple[Accelerator, Any, Any]:
    """An accelerator, a layer and its optimizer after a good step and a skipped one."""
    accelerator = new_accelerator()
    use_scaler_triton(accelerator, min_scale=1.0)
    layer, optimizer = linear(accelerator, "AdamW", fused=True)
    for value in (1.0, float("inf")):
        backward(accelerator, layer, value=value)
        optimizer.step()
        assert optimizer.step_was_skipped == (value != 1.0)
        optimizer.zero_grad()
    return accelerator, layer, optimizer


def test_optimizers_can_be_pickled():
    *_, optimizer = trained()
    clone = pickle.loads(pickle.dumps(optimizer))
    assert type(clone) is _AcceleratedOptimizer
    assert clone.scaler.state_dict() == optimizer.scaler.state_dict()
    assert clone.step_was_skipped
    for parameter in clone.param_groups[0]["params"]:
        parameter.grad = clone.scaler.scale(torch.ones(())) * torch.ones_like(parameter)
    clone.step()
    assert not clone.step_was_skipped


def test_an_accelerator_can_be_pickled():
    clone = pickle.loads(pickle.dumps(trained()[0]))
    assert clone.clip_grad_norm_.args == clone.prepare_optimizer.args == (clone,)
    assert clone.scaler.stats().skipped == 1


# The package, and the page.


def test_the_package_does_not_import_accelerate():
    code = "import sys, scaler_triton; scaler_triton.GradScaler; assert 'accelerate' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=True)

"""What the plugins are made of: which of Lightning's classes, what is refused, what an import costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch

import scaler_triton
from scaler_triton import ShardedGradScaler
from scaler_triton.integrations import lightning, versions

pytestmark = [pytest.mark.filterwarnings(known) for known in cases.KNOWN_WARNINGS]


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["Trainer", "Fabric"])
def test_each_class_has_a_plugin_of_its_own(name: str, kind: str) -> None:
    space = cases.namespace(name)
    framework, plugins = getattr(space, kind), getattr(space, f"{kind.lower()}_plugins")
    mixed = lightning.mixed_precision(framework, cases.ours(), device="cpu")
    sharded = lightning.fsdp_precision(framework, ShardedGradScaler("cpu"))
    for made, cls in ((mixed, plugins.MixedPrecision), (sharded, plugins.FSDPPrecision)):
        assert isinstance(made, cls)
        assert type(made).__qualname__ == cls.__qualname__  # the key in checkpoints
        assert made.precision == "16-mixed"
    assert sharded.mixed_precision_config.reduce_dtype is torch.float16


def test_a_subclass_will_do(name: str) -> None:
    mine = type("Mine", (cases.namespace(name).Fabric,), {})
    made = lightning.mixed_precision(mine, cases.ours(), device="cpu")
    assert isinstance(made, cases.namespace(name).fabric_plugins.MixedPrecision)


@pytest.mark.parametrize(
    "what", [torch.nn.Module, type("Model", (), {"__module__": "lightning.pytorch.core"}), "Trainer", None]
)
def test_other_classes_are_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="framework must be Lightning's class Trainer or Fabric"):
        lightning.mixed_precision(what, cases.ours(), device="cpu")


def test_other_scalers_are_refused(name: str) -> None:
    trainer = cases.namespace(name).Trainer
    for make in (lightning.mixed_precision, lightning.fsdp_precision):
        with pytest.raises(TypeError, match="scaler must be a GradScaler or ShardedGradScaler of scaler_triton"):
            make(trainer, cases.theirs())


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_lightnings_own_fsdp_plugin_refuses_every_scaler(name: str, kind: str) -> None:
    """As docs/lightning.md says; where it no longer does, `fsdp_precision` may pass the scaler on."""
    plugins = getattr(cases.namespace(name), f"{kind}_plugins")
    with pytest.raises(ValueError, match="does not use a scaler"):
        plugins.FSDPPrecision("16-mixed", torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler("cpu"))


def test_a_scaler_is_made_if_none_is_given(name: str) -> None:
    made = lightning.mixed_precision(cases.namespace(name).Trainer, device="cpu")
    assert type(made.scaler) is scaler_triton.GradScaler
    assert made.scaler.state_dict() == torch.amp.GradScaler("cpu").state_dict()
    assert type(lightning.fsdp_precision(cases.namespace(name).Trainer).scaler) is ShardedGradScaler


def test_versions_that_were_not_tested_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda package: "1.0")
    monkeypatch.setattr(versions, "_warned", set())
    package = name.replace("_", "-")
    with pytest.warns(UserWarning, match=f"^{package} 1.0 is installed"):
        lightning.mixed_precision(cases.namespace(name).Trainer, cases.ours(), device="cpu")
    assert importlib.metadata.version(package)


def test_importing_costs_nothing() -> None:
    code = (
        "import sys, scaler_triton, scaler_triton.integrations.lightning\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('lightning', 'pytorch_lightning', 'lightning_fabric')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=120).strip() == "[]"


PATCHED = """
import importlib, sys, warnings
import scaler_triton
scaler_triton.patch_torch()
for name in sys.argv[1:]:
    plugins = importlib.import_module(name + ".plugins")
    assert type(plugins.MixedPrecision("16-mixed", "cpu").scaler) is scaler_triton.GradScaler
    with warnings.catch_warnings(action="ignore"):  # of a scaler for GPUs where there is none
        assert type(plugins.FSDPPrecision("16-mixed").scaler) is scaler_triton.ShardedGradScaler
"""


def test_after_patch_torch_lightnings_own_plugins_have_our_scalers() -> None:
    installed = [module for pair in cases.NAMESPACES.values() for module in pair if find_spec(module.split(".")[0])]
    if not installed:
        pytest.skip("needs Lightning")
    subprocess.run([sys.executable, "-c", PATCHED, *installed], cwd=ROOT, check=True, timeout=120)

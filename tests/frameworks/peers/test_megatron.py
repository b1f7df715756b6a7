"""Megatron-Core's own scaler beside ours: a run that changes over keeps its scale, step by step."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import started, update
from side_by_side import imported, trace

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.migration import from_megatron

theirs = imported("megatron.core.optimizer.grad_scaler")
optimizers = imported("megatron.core.optimizer.optimizer")
config = imported("megatron.core.optimizer.optimizer_config")


class OnCpu:
    """torch, for modules that ask for tensors on "cuda": they get them on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, device: str, **options: Any) -> torch.Tensor:
        assert device == "cuda"
        return torch.tensor(*args, **options)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (theirs, optimizers):
        monkeypatch.setattr(module, "torch", OnCpu())
    for cls in (GradScaler, ShardedGradScaler):
        monkeypatch.setattr(cls, "_is_sharded", False)  # nobody else is here to agree with


def drawn(draw: random.Random) -> dict[str, Any]:
    """Return what Megatron's scaler is built with."""
    return {
        "initial_scale": 2.0 ** draw.randint(3, 16),
        "min_scale": 2.0 ** draw.randint(0, 3),
        "growth_factor": draw.choice([2.0, 2.0, 1.5, 4.0]),
        "backoff_factor": draw.choice([0.5, 0.5, 0.75, 0.25]),
        "growth_interval": draw.randint(1, 6),
        "hysteresis": draw.randint(1, 4),
    }


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_a_run_goes_on_as_it_would_have(cls: type) -> None:
    """Whenever it changes over, for all of its steps."""
    seen = {"grew": 0, "backed off": 0, "held": 0, "at the bottom": 0}
    for seed in range(16):
        draw = random.Random(seed)
        built = drawn(draw)
        run, bads = theirs.DynamicGradScaler(**built), trace(draw)
        numbers = {name: value for name, value in built.items() if name != "initial_scale"}
        for step, bad in enumerate(bads):
            if step % 12 == 0:
                other, ours = copy.deepcopy(run), started(cls, "cpu")
                ours.load_state_dict(from_megatron(run.state_dict(), **numbers))
                for later, each in enumerate(bads[step:], step):
                    other.update(each)
                    assert update(ours, each) == other.scale.item(), (seed, built, step, later)
            before = run.scale.item()
            run.update(bad)
            seen["grew"] += run.scale.item() > before
            seen["backed off"] += run.scale.item() < before
            seen["held"] += bad and run.scale.item() == before > built["min_scale"]
            seen["at the bottom"] += bad and run.scale.item() == built["min_scale"]
    assert min(seen.values()) > 30, seen


def optimizer(scaler: Any) -> Any:
    """Return Megatron's optimizer around a frozen parameter: others must be on a GPU."""
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    inner = torch.optim.SGD([frozen], lr=0.1)
    return optimizers.Float16OptimizerWithFloat16Params(
        inner, config.OptimizerConfig(fp16=True), scaler, lambda *_: None
    )


def test_the_state_lies_where_the_page_says(tmp_path: Path) -> None:
    """And is read without trusting the file."""
    scaler = theirs.DynamicGradScaler(64.0, 8.0, 2.0, 0.5, 3, 2)
    for bad in (True, False):
        scaler.update(bad)
    one, chained = optimizer(scaler), optimizers.ChainedOptimizer([optimizer(scaler), optimizer(scaler)])
    torch.save({"optimizer": one.state_dict(), "chained": chained.state_dict()}, tmp_path / "model_optim_rng.pt")
    checkpoint = torch.load(tmp_path / "model_optim_rng.pt", weights_only=True)
    for state in (checkpoint["optimizer"]["grad_scaler"], checkpoint["chained"][0]["grad_scaler"]):
        ours = started(GradScaler, "cpu")
        ours.load_state_dict(from_megatron(state, growth_interval=3, hysteresis=2, min_scale=8.0))
        assert [update(ours, bad) for bad in (True, False, False, False, True, True)] == [32, 32, 32, 64, 64, 32]


def test_a_constant_scale_saves_nothing_and_has_a_counterpart() -> None:
    constant = theirs.ConstantGradScaler(128.0)
    assert optimizer(constant).state_dict()["grad_scaler"] == {}
    ours = started(GradScaler, "cpu", init_scale=128.0, growth_interval=1)
    ours.set_growth_factor(1.0)
    ours.set_backoff_factor(1.0)
    for bad in (False, True, True, False):
        constant.update(bad)
        assert update(ours, bad) == constant.scale.item() == 128.0

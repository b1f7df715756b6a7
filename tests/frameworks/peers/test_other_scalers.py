"""Megatron-Core's and DeepSpeed's own scalers beside ours: a run that changes over keeps its scale, step by step."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import started, update
from peer import imported, trace

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.integrations.migration import from_deepspeed, from_megatron

# torch, for modules that ask for tensors on "cuda": they get them on the CPU.
ON_CPU = SimpleNamespace(**vars(torch))
ON_CPU.tensor = lambda *args, device, **options: torch.tensor(*args, **options)


def drawn(draw: random.Random) -> dict[str, Any]:
    """Return scale, interval, minimum and hysteresis."""
    scale, minimum = 2.0 ** draw.randint(3, 16), 2.0 ** draw.randint(0, 3)
    return {"scale": scale, "min_scale": minimum, "interval": draw.randint(1, 6), "hysteresis": draw.randint(1, 4)}


class Megatron:
    """Megatron-Core's scaler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.theirs = imported("megatron.core.optimizer.grad_scaler")
        monkeypatch.setattr(self.theirs, "torch", ON_CPU)

    def new(self, scale: float, min_scale: float, interval: int, hysteresis: int) -> Any:
        self.numbers = {"min_scale": min_scale, "growth_interval": interval, "hysteresis": hysteresis}
        self.numbers |= {"growth_factor": 1.5, "backoff_factor": 0.25}
        return self.theirs.DynamicGradScaler(initial_scale=scale, **self.numbers)

    def state(self, run: Any) -> dict[str, Any]:
        return from_megatron(run.state_dict(), **self.numbers)

    def step(self, run: Any, bad: bool, like_ours: bool = True) -> float:
        run.update(bad)
        return float(run.scale.item())


class DeepSpeed:
    """DeepSpeed's scaler, which needs one good step more after an overflow: where it is to be as ours, it gets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.theirs = imported("deepspeed.runtime.fp16.loss_scaler")
        monkeypatch.setattr(self.theirs, "dist", SimpleNamespace(get_rank=lambda: 0))

    def new(self, scale: float, min_scale: float, interval: int, hysteresis: int) -> Any:
        numbers = {"init_scale": scale, "min_scale": min_scale, "scale_window": interval, "delayed_shift": hysteresis}
        more = {"consecutive_hysteresis": False, "raise_error_at_min_scale": False}
        return self.theirs.CreateLossScaler(torch.half, 1.0, True, numbers | more)

    def state(self, run: Any) -> dict[str, Any]:
        return from_deepspeed(vars(run))

    def step(self, run: Any, bad: bool, like_ours: bool = True) -> float:
        if like_ours and not bad and run.cur_iter - run.last_overflow_iter == 1:
            run.update_scale(False)
        run.update_scale(bad)
        return float(run.cur_scale)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nobody else is here to agree with."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [Megatron, DeepSpeed])
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_a_run_goes_on_as_it_would_have(kind: Any, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it changes over, for all of its steps."""
    peer, seen = kind(monkeypatch), {"grew": 0, "backed off": 0, "held": 0, "at the bottom": 0}
    for seed in range(16):
        draw = random.Random(seed)
        numbers, bads = drawn(draw), trace(draw)
        run, before = peer.new(**numbers), numbers["scale"]
        for step, bad in enumerate(bads):
            if step % 12 == 0:
                other, ours = copy.deepcopy(run), started(cls, "cpu")
                ours.load_state_dict(peer.state(run))
                for later, each in enumerate(bads[step:], step):
                    assert update(ours, each) == peer.step(other, each), (seed, numbers, step, later)
            after = peer.step(run, bad, like_ours=False)
            seen["grew"] += after > before
            seen["backed off"] += after < before
            seen["held"] += bad and after == before > numbers["min_scale"]
            seen["at the bottom"] += bad and after == numbers["min_scale"]
            before = after
    assert min(seen.values()) > 30, seen


def test_megatrons_state_lies_where_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is read without trusting the file."""
    peer, optimizers = Megatron(monkeypatch), imported("megatron.core.optimizer.optimizer")
    config = imported("megatron.core.optimizer.optimizer_config").OptimizerConfig(fp16=True)
    monkeypatch.setattr(optimizers, "torch", ON_CPU)
    run = peer.new(64.0, 8.0, 3, 2)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2), requires_grad=False)], lr=0.1)  # others need a GPU
    one = optimizers.Float16OptimizerWithFloat16Params(inner, config, run, lambda *_: None)
    chained = optimizers.ChainedOptimizer([one, one])
    torch.save([one.state_dict(), chained.state_dict()], tmp_path / "model_optim_rng.pt")
    saved, chain = torch.load(tmp_path / "model_optim_rng.pt", weights_only=True)
    for state in (saved["grad_scaler"], chain[0]["grad_scaler"]):
        assert from_megatron(state, **peer.numbers) == peer.state(run)

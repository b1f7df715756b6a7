"""Loops as people write them: two ranks skip together, and train as with torch's scaler where that is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jobs import WIDTH, new_net, new_optimizer, overflow, whole, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from scaler_triton import GradScaler, ShardedGradScaler

STEPS, MICRO_BATCHES, MAX_NORM = 6, 2, 0.05
RANKS, BAD_RANK = (0, 1), 1
BAD_BATCH, BAD_SHARD = 1, 4  # steps: one rank's batch overflows; one element of one rank's shard does
SCALES = [8.0, 4.0, 4.0, 4.0, 2.0, 2.0]
SCALERS = {
    "ours": ShardedGradScaler,
    "ours-grad": GradScaler,
    "torch": torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler,
    "torch-grad": torch.amp.GradScaler,
}


@dataclass(frozen=True)
class Outcome:
    """What a loop left on one rank: its parameters, whole; the scale after every step, and the norms."""

    weights: Tensor
    scales: list[float]
    norms: list[float]


class Side:
    """Where a loop runs: on one of the ranks under a wrapper, or, for rank None, in one process on all batches.

    `which` names the scaler. `clip` is "torch" for what such loops call, or "ours" for `scaler.clip_grad_norm_`.
    """

    def __init__(self, rank: int | None, wrapper: str, which: str, optimizer: str, clip: str) -> None:
        self.rank, self.wrapper, self.optimizer, self.clip = rank, wrapper, optimizer, clip
        self.which = "torch-grad" if rank is None else which
        self.parts: Sequence[int] = RANKS if rank is None else (rank,)
        self.sharded = rank is not None and wrapper.startswith("fsdp")

    def model(self, seed: int) -> nn.Module:
        return new_net(seed) if self.rank is None else wrap(self.wrapper, new_net(seed))

    def scaler(self) -> Any:
        return SCALERS[self.which]("cpu", init_scale=8.0, growth_interval=400)

    def optimizer_of(self, *models: nn.Module) -> Any:
        return new_optimizer(self.optimizer, [p for model in models for p in model.parameters()])

    def backward(self, scaler: Any, model: nn.Module, step: int, micro: int = 0, bad: int = BAD_BATCH) -> None:
        """Add the gradients of each of this side's batches, which sum to this side's share."""
        for part in self.parts:
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + part))
            overflows = part == BAD_RANK and micro == 0 and step in ((bad,) if self.sharded else (bad, BAD_SHARD))
            with torch.autocast("cpu", torch.float16):
                out = model(x * math.inf if overflows else x)
            loss = nn.functional.mse_loss(out.float(), x.flip(1).sin()) / MICRO_BATCHES / len(self.parts)
            scaler.scale(loss).backward()

    def clipped(self, scaler: Any, optimizer: Any, step: int, *models: nn.Module) -> list[float]:
        """Spoil one rank's shard in its step; unscale, and clip each model for itself; return the norms."""
        if self.sharded and (step, self.rank) == (BAD_SHARD, BAD_RANK):
            overflow(p for group in optimizer.param_groups for p in group["params"])
        if self.clip == "torch":
            scaler.unscale_(optimizer)
            return [clipped_by_torch(model) for model in models]
        if len(models) == 1:
            return [scaler.clip_grad_norm_(optimizer, MAX_NORM, model=models[0]).item()]
        every = nn.ModuleList(models)
        norms = [scaler.clip_grad_norm_(optimizer, MAX_NORM, parameters=m.parameters(), model=every) for m in models]
        return [norm.item() for norm in norms]


def clipped_by_torch(model: nn.Module) -> float:
    """Clip as torch wants it for this kind of model."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(MAX_NORM).item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def verl(rank: int | None, *kind: str) -> Outcome:
    """An actor and a critic with micro-batches, each with its own scaler; the critic's bad batch is a step later."""
    side = Side(rank, *kind)
    models, scalers = [side.model(seed) for seed in (0, 1)], [side.scaler() for _ in range(2)]
    optimizers, scales, norms = [side.optimizer_of(model) for model in models], ([], []), []
    for step in range(STEPS):
        for later, (model, scaler, optimizer) in enumerate(zip(models, scalers, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(MICRO_BATCHES):
                side.backward(scaler, model, step, micro, BAD_BATCH + later)
            norms += side.clipped(scaler, optimizer, step, model)
            scaler.step(optimizer)
            scaler.update()
            scales[later].append(scaler.get_scale())
    return Outcome(whole(*models), [*scales[0], *scales[1]], norms)


def dinov2(rank: int | None, *kind: str) -> Outcome:
    """Several sharded modules under one optimizer, each clipped for itself."""
    side, scales, norms = Side(rank, *kind), [], []
    scaler, models = side.scaler(), [side.model(seed) for seed in (0, 1)]
    optimizer = side.optimizer_of(*models)
    for step in range(STEPS):
        optimizer.zero_grad()
        side.backward(scaler, nn.Sequential(*models), step)
        norms += side.clipped(scaler, optimizer, step, *models)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return Outcome(whole(*models), scales, norms)


def gan(rank: int | None, *kind: str) -> Outcome:
    """Two optimizers, one scaler, one update; at BAD_BATCH only the judge's gradients overflow."""
    side, scales, norms = Side(rank, *kind), [], []
    scaler, models = side.scaler(), [side.model(seed) for seed in (0, 1)]
    optimizers = [side.optimizer_of(model) for model in models]
    for step in range(STEPS):
        for model, optimizer, bad in zip(models, optimizers, (-1, BAD_BATCH), strict=True):
            optimizer.zero_grad()
            side.backward(scaler, model if model is models[1] else nn.Sequential(*models), step, bad=bad)
            norms += side.clipped(scaler, optimizer, step, model)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return Outcome(whole(*models), scales, norms)


# loop -> which of its norms, two a step, a loop sees to be NaN or infinite
BAD_NORMS = {
    verl: {2 * BAD_BATCH, 2 * BAD_BATCH + 3, 2 * BAD_SHARD, 2 * BAD_SHARD + 1},
    dinov2: {2 * BAD_BATCH, 2 * BAD_BATCH + 1, 2 * BAD_SHARD, 2 * BAD_SHARD + 1},
    gan: {2 * BAD_BATCH + 1, 2 * BAD_SHARD, 2 * BAD_SHARD + 1},
}
LOOPS = pytest.mark.parametrize("loop", BAD_NORMS)


def assert_equal(mine: Outcome, other: Outcome) -> None:
    """Assert equality to the bit."""
    assert mine.scales == other.scales
    assert torch.equal(torch.tensor(mine.norms).nan_to_num(-1.0), torch.tensor(other.norms).nan_to_num(-1.0))
    assert torch.equal(mine.weights, other.weights)


@LOOPS
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("clip", ["torch", "ours"])
def test_ranks_train_as_one_process(
    two: Callable[..., list[Any]], loop: Any, wrapper: str, optimizer: str, clip: str
) -> None:
    which = "ours-grad" if loop is gan and wrapper != "fsdp1" else "ours"
    mine, other = two(loop, wrapper, which, optimizer, clip)
    assert_equal(mine, other)
    assert mine.scales[:STEPS] == SCALES
    bad = {number for number, norm in enumerate(mine.norms) if not math.isfinite(norm)}
    # Of dinov2's modules the first one's shard is spoilt; what overflows in a batch, does so in both.
    assert bad == BAD_NORMS[loop] - ({2 * BAD_SHARD + 1} if loop is dinov2 and wrapper != "ddp" else set())
    one = loop(None, wrapper, "torch-grad", "adamw", "torch")
    assert mine.scales == one.scales
    assert one.weights.isfinite().all()
    for ours, expected in zip(mine.norms, one.norms, strict=True):
        if math.isfinite(expected):
            assert ours == pytest.approx(expected, rel=1e-4)
    # Gradients are summed over the ranks in another order, and Adam divides tiny ones by their own size.
    torch.testing.assert_close(mine.weights, one.weights, rtol=0, atol=2e-4)


# torch's ShardedGradScaler warns of itself on DTensors, where its GradScaler is right.
@LOOPS
@pytest.mark.parametrize(("wrapper", "torchs"), [("ddp", "torch"), ("fsdp1", "torch"), ("fsdp2", "torch-grad")])
def test_equals_torchs_scaler_to_the_bit(two: Callable[..., list[Any]], loop: Any, wrapper: str, torchs: str) -> None:
    mine, theirs = (two(loop, wrapper, which, "adamw", "torch") for which in ("ours", torchs))
    assert_equal(mine[0], theirs[0])

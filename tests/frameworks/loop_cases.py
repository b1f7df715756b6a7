"""Training loops as people write them, on two ranks one of which overflows, and in one process; ranks import this.

`clip` is "torch" for what such loops call, or "ours" for `scaler.clip_grad_norm_`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cases
import model_cases
import torch
from cases import Fault
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
    """What a loop left on one rank: scale, and norms if it took any, after every step; its parameters, whole."""

    scales: list[float] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class Side:
    """Where a loop runs: on one of the ranks under a wrapper, or in one process on all batches."""

    def __init__(self, rank: int | None, wrapper: str) -> None:
        self.rank, self.wrapper = rank, wrapper
        self.parts: Sequence[int] = RANKS if rank is None else (rank,)
        self.sharded = rank is not None and wrapper.startswith("fsdp")

    def wrap(self, net: nn.Module) -> nn.Module:
        """Shard a model, or leave it."""
        return net if self.rank is None else model_cases.WRAPPERS[self.wrapper](net, False)

    def scaler(self, which: str) -> Any:
        """Make a scaler as verl does, with a first scale that this little model can stand."""
        return SCALERS["torch-grad" if self.rank is None else which]("cpu", init_scale=8.0, growth_interval=400)

    def losses(self, model: nn.Module, step: int, micro: int, bad: int = BAD_BATCH) -> list[Tensor]:
        """Return the loss of each of this side's batches, which sum to this side's share."""
        found = []
        for part in self.parts:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + part))
            with torch.autocast("cpu", torch.float16):
                out = model(x * math.inf if self._overflows(step, micro, part, bad) else x)
            found.append(nn.functional.mse_loss(out.float(), x.flip(1).sin()) / MICRO_BATCHES / len(self.parts))
        return found

    def _overflows(self, step: int, micro: int, part: int, bad: int) -> bool:
        steps = (bad,) if self.sharded else (bad, BAD_SHARD)
        return part == BAD_RANK and micro == 0 and step in steps

    def spoil(self, step: int, parameters: Sequence[Tensor]) -> None:
        """Make one element of one rank's shard infinite, at that step."""
        if self.sharded:
            cases.plant([Fault(BAD_SHARD, BAD_RANK)], self.rank, step, parameters)


def new_net(seed: int = 0) -> nn.Module:
    """Make the model, the same everywhere."""
    torch.manual_seed(seed)
    return model_cases.Net()


def clipped(scaler: Any, optimizer: Any, model: nn.Module, clip: str) -> Tensor:
    """Unscale and clip one model's gradients; return the norm, whole."""
    if clip == "ours":
        return scaler.clip_grad_norm_(optimizer, MAX_NORM, model=model)
    scaler.unscale_(optimizer)
    return clipped_by_torch(model)


def clipped_by_torch(model: nn.Module) -> Tensor:
    """Clip as torch wants it for this kind of model."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(MAX_NORM)
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def whole(*models: nn.Module) -> list[Tensor]:
    """Return all parameters of the models."""
    return [p.detach().clone() for model in models for p in model_cases._full_params(model)]


# verl: micro-batches, unscale, clip, a look at the norm, step, update; an actor and a critic, each with its scaler.


class Learner:
    """verl's actor or critic."""

    def __init__(self, side: Side, which: str, optimizer: str, seed: int) -> None:
        self.side, self.scaler = side, side.scaler(which)
        self.model = side.wrap(new_net(seed))
        self.optimizer = cases.new_optimizer(optimizer, self.model.parameters())
        self.outcome = Outcome()

    def step(self, step: int, clip: str, bad: int) -> None:
        """Train on one batch, in micro-batches."""
        self.optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            for loss in self.side.losses(self.model, step, micro, bad):
                self.scaler.scale(loss).backward()
        self.side.spoil(step, cases.params_of(self.optimizer))
        norm = clipped(self.scaler, self.optimizer, self.model, clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.outcome.scales.append(self.scaler.get_scale())
        self.outcome.norms.append([norm.item()])


def verl(rank: int | None, wrapper: str, which: str, optimizer: str, clip: str) -> list[Outcome]:
    """Train an actor and a critic, whose bad batch comes a step later; return what each left."""
    side = Side(rank, wrapper)
    learners = [Learner(side, which, optimizer, seed) for seed in (0, 1)]
    for step in range(STEPS):
        for later, learner in enumerate(learners):
            learner.step(step, clip, BAD_BATCH + later)
    for learner in learners:
        learner.outcome.weights.extend(whole(learner.model))
    return [learner.outcome for learner in learners]


# DINOv2: several FSDP modules under one optimizer, each clipped for itself.


def dinov2(rank: int | None, wrapper: str, which: str, optimizer_name: str, clip: str) -> Outcome:
    """Train a backbone and a head."""
    side, outcome = Side(rank, wrapper), Outcome()
    scaler = side.scaler(which)
    student = nn.ModuleDict({"backbone": side.wrap(new_net(0)), "head": side.wrap(new_net(1))})
    optimizer = cases.new_optimizer(optimizer_name, student.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for loss in side.losses(nn.Sequential(*student.values()), step, 0):
            scaler.scale(loss).backward()
        side.spoil(step, cases.params_of(optimizer))
        outcome.norms.append(_clip_each(scaler, optimizer, student, clip))
        scaler.step(optimizer)
        scaler.update()
        outcome.scales.append(scaler.get_scale())
    outcome.weights.extend(whole(*student.values()))
    return outcome


def _clip_each(scaler: Any, optimizer: Any, student: nn.ModuleDict, clip: str) -> list[float]:
    if clip == "torch":
        scaler.unscale_(optimizer)
        return [clipped_by_torch(module).item() for module in student.values()]
    norms = [
        scaler.clip_grad_norm_(optimizer, MAX_NORM, parameters=module.parameters(), model=student)
        for module in student.values()
    ]
    return [norm.item() for norm in norms]


# A GAN: two optimizers, one scaler, one update.


def gan(rank: int | None, wrapper: str, which: str, optimizer_name: str, clip: str) -> Outcome:
    """Train a generator against a judge; at BAD_BATCH only the judge's gradients overflow."""
    side, outcome = Side(rank, wrapper), Outcome()
    scaler, models = side.scaler(which), [side.wrap(new_net(seed)) for seed in (0, 1)]
    generator, judge = models
    optimizers = [cases.new_optimizer(optimizer_name, model.parameters()) for model in models]
    for step in range(STEPS):
        for model, optimizer, bad in zip(models, optimizers, (-1, BAD_BATCH), strict=True):
            optimizer.zero_grad()
            through = judge if model is judge else nn.Sequential(generator, judge)
            for loss in side.losses(through, step, 0, bad):
                scaler.scale(loss).backward()
            side.spoil(step, cases.params_of(optimizer))
            norm = clipped(scaler, optimizer, model, clip)
            outcome.norms.append([norm.item()])
            scaler.step(optimizer)
        scaler.update()
        outcome.scales.append(scaler.get_scale())
    outcome.weights.extend(whole(*models))
    return outcome

"""Whole models under DDP, FSDP1, FSDP2, HSDP and TP, against one process that skips the same steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cases
import torch
import torch.distributed as dist
from cases import Fault, Habits, Report
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 8
WIDTH = 8
BATCH = 8  # over all ranks together
MAX_NORM = 0.05  # small enough to clip at every step

Wrap = Callable[[nn.Module, bool], nn.Module]


@dataclass(frozen=True)
class Outcome:
    """A run, the single-process run beside it, and how far apart their parameters ended."""

    report: Report
    reference: Report
    distance: float


class Net(nn.Module):
    """A norm and two linear layers: under TP they live on different meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        return self.down(torch.tanh(self.up(self.norm(x))))


def _ddp(net: nn.Module, half: bool) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def _fsdp1(strategy: ShardingStrategy, orig: bool) -> Wrap:
    def wrap(net: nn.Module, half: bool) -> nn.Module:
        hybrid = strategy is ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            net,
            sharding_strategy=strategy,
            use_orig_params=orig,
            device_id=cases.this_device(),
            device_mesh=cases.square() if hybrid else None,
            mixed_precision=MixedPrecision(param_dtype=torch.float16) if half else None,
        )

    return wrap


def _fully_shard(net: nn.Module, mesh: object, half: bool) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy if half else MixedPrecisionPolicy()}
    for layer in net.children():
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def _fsdp2(net: nn.Module, half: bool) -> nn.Module:
    return _fully_shard(net, cases.line(), half)


def _hsdp2(net: nn.Module, half: bool) -> nn.Module:
    return _fully_shard(net, cases.square(), half)


def _tp(net: nn.Module, half: bool) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, cases.square()["tp"], plan)
    return _fully_shard(net, cases.square()["dp"], half)


WRAPPERS: dict[str, Wrap] = {
    "ddp": _ddp,
    "fsdp1-full": _fsdp1(ShardingStrategy.FULL_SHARD, orig=True),
    "fsdp1-full-flat": _fsdp1(ShardingStrategy.FULL_SHARD, orig=False),
    "fsdp1-grad-op": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, orig=True),
    "fsdp1-grad-op-flat": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, orig=False),
    "fsdp1-no-shard": _fsdp1(ShardingStrategy.NO_SHARD, orig=True),
    "fsdp1-no-shard-flat": _fsdp1(ShardingStrategy.NO_SHARD, orig=False),
    "fsdp1-hybrid": _fsdp1(ShardingStrategy.HYBRID_SHARD, orig=True),
    "fsdp1-hybrid-flat": _fsdp1(ShardingStrategy.HYBRID_SHARD, orig=False),
    "fsdp2": _fsdp2,
    "hsdp2": _hsdp2,
    "fsdp2-tp": _tp,
}


def against_one_process(
    rank: int,
    kind: str,
    wrapper: str,
    name: str,
    faults: Sequence[Fault],
    *,
    half: bool = False,
    clip: bool = False,
) -> Outcome:
    """Train a wrapped model on this rank's part of each batch, and the bare one on all of it."""
    net = Net()
    bare = copy.deepcopy(net)
    model = WRAPPERS[wrapper](net, half)
    # Tensor-parallel peers see the same data.
    index, parts = (rank // 2, 2) if wrapper == "fsdp2-tp" else (rank, dist.get_world_size())
    report = _train(rank, model, cases.new_scaler(kind), name, faults, clip, part=(index, parts))
    skipped = [Fault(step, rank) for step in {fault.step for fault in faults}]
    torch_scaler = torch.amp.GradScaler(
        cases.DEVICE, init_scale=cases.INIT_SCALE, growth_interval=cases.GROWTH_INTERVAL
    )
    reference = _train(rank, bare, torch_scaler, name, skipped, clip, part=(0, 1))
    pairs = zip(_full_params(model), bare.parameters(), strict=True)
    distance = max(float((full - one).detach().abs().max()) for full, one in pairs)
    return Outcome(report, reference, distance)


def _train(
    rank: int,
    model: nn.Module,
    scaler: object,
    name: str,
    faults: Sequence[Fault],
    clip: bool,
    part: tuple[int, int],
) -> Report:
    optimizer = cases.new_optimizer(name, model.parameters())

    def backward(step: int) -> None:
        x, y = _batch(step, part)
        loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()

    habits = Habits(unscale=clip, after_unscale=lambda: _clip(model) if clip else None)
    return cases.train(rank, scaler, [optimizer], backward, faults, steps=STEPS, habits=habits)


def _batch(step: int, part: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The part's share of a batch: inputs and what to make of them."""
    index, parts = part
    x = cases.drawn((BATCH, WIDTH), torch.Generator().manual_seed(step))
    rows = slice(index * BATCH // parts, (index + 1) * BATCH // parts)
    return x[rows], x.flip(1).sin()[rows]


def _clip(model: nn.Module) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(MAX_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def _full_params(model: nn.Module) -> list[Tensor]:
    """Every parameter, whole."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return [param.detach().clone() for param in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def warned_about_fsdp1(rank: int, kind: str, wrapper: str) -> tuple[list[str], list[Report]]:
    """Use one scaler on two wrapped models; the warnings it gave, and what became of an inf in each."""
    scaler = cases.new_scaler(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = []
        for _ in range(2):
            model = WRAPPERS[wrapper](Net(), False)
            scaler.load_state_dict(cases.new_scaler(kind).state_dict())
            reports.append(_train(rank, model, scaler, "adamw", [Fault(2, 1)], False, part=(0, 1)))
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return [text for text in texts if "Scaler" in text], reports


def zero_beside_whole(rank: int, kind: str, *, fused: bool) -> tuple[list[float], list[float], bool]:
    """Train under DDP with our scaler and optimizer states split over the ranks, then with torch's and whole states.

    Returns: the scales of both, and whether they ended with the same parameters, to the bit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its module scripts other optimizers
        from torch.distributed.optim import ZeroRedundancyOptimizer

    nets = Net(), Net()
    nets[1].load_state_dict(nets[0].state_dict())
    options = {"lr": cases.LEARNING_RATE, "fused": fused}
    zero = ZeroRedundancyOptimizer(nets[0].parameters(), torch.optim.AdamW, **options)
    whole = torch.optim.AdamW(nets[1].parameters(), **options)
    torch_scaler = torch.amp.GradScaler(
        cases.DEVICE, init_scale=cases.INIT_SCALE, growth_interval=cases.GROWTH_INTERVAL
    )
    ours = _scales_under_ddp(rank, nets[0], zero, cases.new_scaler(kind))
    theirs = _scales_under_ddp(rank, nets[1], whole, torch_scaler)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return ours, theirs, all(torch.equal(one, other) for one, other in pairs)


def _scales_under_ddp(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> list[float]:
    """Train; the loss of the last rank is infinite at two steps. Returns the scale after every step."""
    world_size = dist.get_world_size()
    model, scales = _ddp(net, False), []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = _batch(step, (rank, world_size))
        loss = nn.functional.mse_loss(model(x), y)
        bad = step in (2, 5) and rank == world_size - 1
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales

"""A small model under DDP, FSDP1, FSDP2, HSDP and TP, its batches, and how it is trained."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import cases
from ranks.cases import TORCHS, Fault, Report

STEPS = 8
WIDTH = 8
BATCH = 8  # over all ranks together
MAX_NORM = 0.05  # small enough to clip at every step

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """A norm and two linear layers: under TP they live on different meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _fsdp1(strategy: ShardingStrategy, orig: bool, mesh: Callable[[], Any] = lambda: None) -> Wrap:
    def wrap(net: nn.Module) -> nn.Module:
        options = {"sharding_strategy": strategy, "use_orig_params": orig, "device_mesh": mesh()}
        return FullyShardedDataParallel(net, device_id=cases.this_device(), **options)

    return wrap


def _fsdp2(mesh: Callable[[], Any]) -> Wrap:
    def wrap(net: nn.Module) -> nn.Module:
        for layer in net.children():
            fully_shard(layer, mesh=mesh())
        return fully_shard(net, mesh=mesh())

    return wrap


def _rows() -> Any:
    return cases.square()["dp"]


def _over_tp(wrap: Wrap) -> Wrap:
    """Wrap a net whose linear layers are cut along the second dimension of the square."""

    def wrap_cut(net: nn.Module) -> nn.Module:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return wrap(parallelize_module(net, cases.square()["tp"], plan))

    return wrap_cut


def _ddp(mesh: Callable[[], Any] = lambda: None) -> Wrap:
    return lambda net: nn.parallel.DistributedDataParallel(net, device_mesh=mesh())


WRAPPERS: dict[str, Wrap] = {
    "ddp": _ddp(),
    "ddp-tp": _over_tp(_ddp(_rows)),  # DDP takes the shards for parameters
    "fsdp1-full": _fsdp1(ShardingStrategy.FULL_SHARD, orig=True),
    "fsdp1-full-flat": _fsdp1(ShardingStrategy.FULL_SHARD, orig=False),
    "fsdp1-grad-op": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, orig=True),
    "fsdp1-grad-op-flat": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, orig=False),
    "fsdp1-no-shard": _fsdp1(ShardingStrategy.NO_SHARD, orig=True),
    "fsdp1-no-shard-flat": _fsdp1(ShardingStrategy.NO_SHARD, orig=False),
    "fsdp1-hybrid": _fsdp1(ShardingStrategy.HYBRID_SHARD, orig=True, mesh=cases.square),
    "fsdp1-hybrid-flat": _fsdp1(ShardingStrategy.HYBRID_SHARD, orig=False, mesh=cases.square),
    "fsdp1-tp": _over_tp(_fsdp1(ShardingStrategy.FULL_SHARD, orig=True, mesh=_rows)),
    "fsdp1-tp-flat": _over_tp(_fsdp1(ShardingStrategy.FULL_SHARD, orig=False, mesh=_rows)),
    "fsdp2": _fsdp2(cases.line),
    "fsdp2-tp": _over_tp(_fsdp2(_rows)),
    "hsdp2": _fsdp2(cases.square),
}


def part_of(wrapper: str, rank: int) -> tuple[int, int]:
    """Which of how many parts of a batch a rank works on: tensor-parallel peers see the same data."""
    return (rank // 2, 2) if "-tp" in wrapper else (rank, dist.get_world_size())


def batch(step: int, part: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
    """The part's share of a batch: inputs and what to make of them."""
    index, parts = part
    x = cases.drawn((BATCH, WIDTH), torch.Generator().manual_seed(step))
    rows = slice(index * BATCH // parts, (index + 1) * BATCH // parts)
    return x[rows], x.flip(1).sin()[rows]


def backward(model: nn.Module, step: int, part: tuple[int, int], scaler: Any = None) -> None:
    x, y = batch(step, part)
    loss = nn.functional.mse_loss(model(x).float(), y)
    (loss if scaler is None else scaler.scale(loss)).backward()


def train(
    rank: int, model: nn.Module, scaler: Any, name: str, faults: Sequence[Fault], *, clip: str = "", part: Any = (0, 1)
) -> tuple[Report, list[float]]:
    """Train, clipping by "torch", by "ours" or not at all; return the report and the norms before each clip."""
    optimizer, norms = cases.new_optimizer(name, model.parameters()), []

    def clip_by_torch() -> None:
        is_fsdp1 = isinstance(model, FullyShardedDataParallel)
        clip_grad_norm_ = model.clip_grad_norm_ if is_fsdp1 else partial(nn.utils.clip_grad_norm_, model.parameters())
        norms.append(whole(clip_grad_norm_(max_norm=MAX_NORM)).item())

    def clip_by_ours(optimizer: torch.optim.Optimizer) -> None:
        norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, model=model).item())

    step = lambda number: backward(model, number, part, scaler)  # noqa: E731
    how = {"torch": {"unscale": True, "after_unscale": clip_by_torch}, "ours": {"clip": clip_by_ours}}.get(clip, {})
    return cases.train(rank, scaler, optimizer, step, faults, steps=STEPS, **how), norms


def full_params(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return [param.detach().clone() for param in model.parameters()]
    return [whole(param) for param in model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Outcome:
    """A run, the norms of it and of the single-process run beside it, and how far apart their parameters ended."""

    report: Report
    norms: list[float]
    expected_norms: list[float]
    distance: float


def against_one_process(rank: int, kind: str, wrapper: str, name: str, faults: Sequence[Fault], clip: str) -> Outcome:
    """Train a wrapped model on this rank's part of each batch, and the bare one on all of it, which torch clips."""
    net = Net()
    bare = copy.deepcopy(net)
    model = WRAPPERS[wrapper](net)
    scaler = cases.new_scaler(kind)
    report, norms = train(rank, model, scaler, name, faults, clip=clip, part=part_of(wrapper, rank))
    skipped = [Fault(step, rank) for step in {fault.step for fault in faults}]
    by_torch = "torch" if clip else ""
    _, expected_norms = train(rank, bare, cases.new_scaler("grad", TORCHS), name, skipped, clip=by_torch)
    pairs = zip(full_params(model), bare.parameters(), strict=True)
    distance = max(float((full - one).detach().abs().max()) for full, one in pairs)
    return Outcome(report, norms, expected_norms, distance)

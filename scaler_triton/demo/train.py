"""The training that the demo shows: a small fp16 transformer on ranks, an inf in a gradient now and then, and the same
in one process without any scaler class, to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from scaler_triton.demo.launch import tell
from scaler_triton.demo.model import Block, CharTransformer, ModelSize


def load_library(name: str) -> tuple[str, Any]:
    """Return a label for "torch" or "ours", and a namespace with its GradScaler and ShardedGradScaler."""
    if name == "torch":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        scalers = {"GradScaler": torch.amp.GradScaler, "ShardedGradScaler": ShardedGradScaler}
        return f"torch {torch.__version__}", SimpleNamespace(**scalers)
    import scaler_triton

    return f"scaler_triton {scaler_triton.__version__}", scaler_triton


@dataclass(frozen=True)
class Config:
    """One run, the same on every rank."""

    scaler: str  # "ours" or "torch"
    mode: str  # "single", "ddp", "fsdp1" or "fsdp2"
    optimizer: str  # "adamw", "adamw-fused" or "sgd"
    steps: int
    ranks: int = 2
    device_type: str = "cpu"
    size: ModelSize = field(default_factory=ModelSize)
    batch_size: int = 8  # snippets of text in one rank's micro-batch
    init_scale: float = 2.0**10

    @property
    def growth_interval(self) -> int:
        """Good steps before the scale doubles: few, so that a short run shows it."""
        return max(2, self.steps // 8)

    @property
    def bad_shards(self) -> dict[int, int]:
        """The rank whose shard gets an inf, by step."""
        steps = (self.steps // 5, self.steps // 2, self.steps * 4 // 5)
        return {step: (nth + 1) % self.ranks for nth, step in enumerate(steps)}


@dataclass
class Trace:
    """What happened in one process. The checks see nothing else."""

    enabled: bool  # whether the scaler scaled at all
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # at each step, and after the last update
    skipped: list[bool] = field(default_factory=list)
    step_counts: tuple[int, ...] = ()  # the optimizer's own step counters at the end, without repeats
    start: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))  # all parameters, gathered
    end: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    why: str = ""  # the scaler's report on the last skip, if it has one


def train_rank(rank: int, config: Config) -> Trace:
    """Train as one of the ranks, with a library's scaler."""
    model = spread(new_model(config, use_device(config.device_type, rank)), config.mode, config.ranks)
    library = load_library(config.scaler)[1]
    new_scaler = library.GradScaler if config.mode == "single" else library.ShardedGradScaler
    scaler = new_scaler(config.device_type, config.init_scale, growth_interval=config.growth_interval)
    return train(config, model, scaler, [rank])


def train_alone(rank: int, config: Config) -> Trace:
    """Train on all ranks' micro-batches in this one process, and scale by hand."""
    model = new_model(config, use_device(config.device_type, rank))
    return train(config, model, ScalerByHand(config), range(config.ranks))


def train(config: Config, model: nn.Module, scaler: Any, ranks: Sequence[int]) -> Trace:
    """Train on the micro-batches of `ranks`, and put an inf into their gradients when it is their turn."""
    optimizer = new_optimizer(config.optimizer, model.parameters())
    steps_taken = count_steps(optimizer)
    trace = Trace(scaler.is_enabled(), start=whole_parameters(model))
    for step in range(config.steps):
        before = steps_taken()
        trace.scales.append(scaler.get_scale())
        losses = [loss_of(config, model, step, rank) for rank in ranks]
        for loss in losses:
            scaler.scale(loss).backward()
        if config.bad_shards.get(step) in ranks:
            put_inf(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.losses.append(sum(loss.item() for loss in losses) / len(losses))
        trace.skipped.append(steps_taken() == before)
        if 0 in ranks:
            tell(f"loss {trace.losses[-1]:.3f}, scale {trace.scales[-1]:g}")
    trace.scales.append(scaler.get_scale())
    trace.step_counts = steps_taken()
    trace.end = whole_parameters(model)
    if hasattr(scaler, "overflow_report"):  # torch's scaler has none
        trace.why = str(scaler.overflow_report(model, gather=True))
    return trace


class ScalerByHand:
    """Loss scaling as torch's documentation describes it, in one process that averages the ranks' gradients, too."""

    def __init__(self, config: Config) -> None:
        self._ranks, self._growth_interval = config.ranks, config.growth_interval
        self._scale, self._good_steps, self._overflow = config.init_scale, 0, False

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def step(self, optimizer: Optimizer) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for grad in grads:
            grad.div_(self._ranks).div_(self._scale)
        self._overflow = not all(bool(grad.isfinite().all()) for grad in grads)
        if not self._overflow:
            optimizer.step()

    def update(self) -> None:
        self._good_steps = 0 if self._overflow else self._good_steps + 1
        if self._overflow:
            self._scale *= 0.5
        elif self._good_steps == self._growth_interval:
            self._scale *= 2.0
            self._good_steps = 0


def new_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer that `--optimizer` names."""
    if name == "sgd":
        return SGD(parameters, lr=0.3, momentum=0.9)
    return AdamW(parameters, lr=5e-3, eps=1e-6, fused=name == "adamw-fused")


def count_steps(optimizer: Optimizer) -> Callable[[], tuple[int, ...]]:
    """Return a function that returns how many steps each parameter has taken, sorted and without repeats.

    A fused optimizer is called on skipped steps, too, and only its state knows which it took. SGD has no such state,
    but is called only to step.
    """
    calls: list[None] = []
    optimizer.register_step_post_hook(lambda *args: calls.append(None))

    def taken() -> tuple[int, ...]:
        counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
        return tuple(sorted(counts)) or (len(calls),)

    return taken


@cache
def python_topics() -> tuple[Tensor, str]:
    """Return the help topics of this Python, half a million characters, as numbers into an alphabet; and that."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    number = {character: place for place, character in enumerate(alphabet)}
    return torch.tensor([number[character] for character in text]), alphabet


def batch_of(config: Config, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next-character targets of one micro-batch, the same ones in every process."""
    codes, _ = python_topics()
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(codes) - config.size.context - 1, (config.batch_size, 1), generator=generator)
    snippets = codes[starts + torch.arange(config.size.context + 1)]  # [batch_size, context + 1]
    return snippets[:, :-1], snippets[:, 1:]


def loss_of(config: Config, model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of one rank's micro-batch under fp16 autocast, unscaled."""
    inputs, targets = (part.to(config.device_type) for part in batch_of(config, step, rank))
    with torch.autocast(config.device_type, dtype=torch.float16):
        loss: Tensor = model(inputs, targets)
    return loss


def new_model(config: Config, device: torch.device) -> CharTransformer:
    """Return a model with the same starting parameters in every process."""
    torch.manual_seed(0)
    return CharTransformer(len(python_topics()[1]), config.size).to(device)


def spread(model: CharTransformer, mode: str, ranks: int) -> nn.Module:
    """Return the model as the mode trains it; FSDP shards each block and the rest."""
    device = next(model.parameters()).device
    if mode == "ddp":
        return DistributedDataParallel(model)
    if mode == "fsdp1":
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    if mode == "fsdp2":
        # On a machine with a GPU torch 2.11 gives a mesh NCCL, which refuses two ranks on one GPU.
        gloo: dict[int | str, Any] | None = {0: "gloo"} if dist.get_backend() == "gloo" else None
        mesh = init_device_mesh(device.type, (ranks,), backend_override=gloo)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole_parameters(model: nn.Module) -> NDArray[np.float32]:
    """Return all parameters of a spread model, gathered, as one vector. A collective call."""
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model) if is_fsdp1 else nullcontext():
        vector = torch.cat([_whole(p).detach().flatten().cpu() for p in model.parameters()])
    return vector.numpy()


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    if "gloo" in dist.get_backend():  # it would read a GPU's memory as if it were the host's
        mesh = init_device_mesh("cpu", parameter.device_mesh.shape)
        local, shape, stride = parameter.to_local().cpu(), parameter.shape, parameter.stride()
        parameter = DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
    return parameter.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put_inf(model: nn.Module) -> None:
    """Set one element of this rank's own gradient shards to inf."""
    shards = (local_part(p.grad) for p in model.parameters() if p.grad is not None)
    next(shard for shard in shards if shard.numel()).view(-1)[0] = inf


def use_device(device_type: str, rank: int) -> torch.device:
    """Return a rank's device, made the current one; ranks share GPUs where there are fewer."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device

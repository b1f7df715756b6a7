"""What is trained: a small fp16 transformer on every rank, and the same in one process, to compare."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from scaler_triton.core.gradients import local_tensor
from scaler_triton.demo.launch import tell
from scaler_triton.demo.model import Block, CharTransformer, ModelSize


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
    start: Any = None  # all parameters, gathered: a numpy vector
    end: Any = None
    why: str = ""  # the scaler's report on the last skip, if it has one


def load_library(name: str) -> tuple[str, Any]:
    """Return a label for "torch" or "ours", and a module with its GradScaler and ShardedGradScaler."""
    if name == "torch":
        from torch.distributed.fsdp import sharded_grad_scaler

        return f"torch {torch.__version__}", sharded_grad_scaler
    import scaler_triton

    return f"scaler_triton {scaler_triton.__version__}", scaler_triton


def mean_losses(ranks: Sequence[Trace]) -> list[float]:
    """Return the loss of each step, averaged over the ranks' micro-batches."""
    return [sum(losses) / len(losses) for losses in zip(*(trace.losses for trace in ranks), strict=True)]


def first_split(ranks: Sequence[Trace]) -> int | None:
    """Return after which step, counted from 1, the ranks hold different scales for the first time; None: never."""
    by_step = zip(*(trace.scales for trace in ranks), strict=True)
    return next((step for step, scales in enumerate(by_step) if len(set(scales)) > 1), None)


def train_rank(rank: int, config: Config) -> Trace:
    """Train as one of the ranks."""
    _, library = load_library(config.scaler)
    new_scaler = library.GradScaler if config.mode == "single" else library.ShardedGradScaler
    return train(config, spread(new_model(rank, config), config), new_scaler, [rank])


def train_alone(rank: int, config: Config) -> Trace:
    """Train on all ranks' micro-batches in this one process, where torch's GradScaler is right."""
    return train(config, new_model(rank, config), torch.amp.GradScaler, range(config.ranks))


def train(config: Config, model: nn.Module, new_scaler: Callable[..., Any], ranks: Sequence[int]) -> Trace:
    """Train on the micro-batches of `ranks`, and put an inf into their gradients when it is their turn."""
    few = max(2, config.steps // 8)  # good steps before the scale doubles, so that a short run shows it
    scaler = new_scaler(config.device_type, config.init_scale, growth_interval=few)
    optimizer: Optimizer = AdamW(model.parameters(), lr=5e-3, eps=1e-6, fused=config.optimizer == "adamw-fused")
    if config.optimizer == "sgd":
        optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    steps_taken = count_steps(optimizer)
    trace = Trace(scaler.is_enabled(), start=whole_parameters(model))
    for step in range(config.steps):
        before = steps_taken()
        trace.scales.append(scaler.get_scale())
        with torch.autocast(config.device_type, dtype=torch.float16):
            losses = [model(*batch_of(config, step, rank)) for rank in ranks]
        for loss in losses:
            scaler.scale(loss).backward()
        if len(ranks) > 1:  # the average, which DDP and FSDP make among themselves
            torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], len(ranks))
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
    trace.step_counts, trace.end = steps_taken(), whole_parameters(model)
    if hasattr(scaler, "overflow_report"):  # torch's scaler has none
        trace.why = str(scaler.overflow_report(model, gather=True))
    return trace


def count_steps(optimizer: Optimizer) -> Callable[[], tuple[int, ...]]:
    """Return a function that returns how many steps the parameters have taken, sorted and without repeats."""
    # A fused AdamW is called on skipped steps, too, and counts in its state. SGD has no such state, but is only called
    # to step.
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *args: calls.append(None))
    return lambda: tuple(sorted({int(s["step"]) for s in optimizer.state.values() if "step" in s})) or (len(calls),)


@cache
def python_topics() -> tuple[Tensor, str]:
    """Return the help topics of this Python, half a million characters, as numbers into an alphabet; and that."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    return torch.tensor([*map({character: place for place, character in enumerate(alphabet)}.get, text)]), alphabet


def batch_of(config: Config, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next-character targets of one micro-batch, the same ones in every process."""
    codes, _ = python_topics()
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(codes) - config.size.context - 1, (config.batch_size, 1), generator=generator)
    snippets = codes[starts + torch.arange(config.size.context + 1)].to(config.device_type)  # [batch, context + 1]
    return snippets[:, :-1], snippets[:, 1:]


def new_model(rank: int, config: Config) -> CharTransformer:
    """Return a model on this rank's device, with the same starting parameters in every process."""
    if config.device_type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    return CharTransformer(len(python_topics()[1]), config.size).to(config.device_type)


def spread(model: CharTransformer, config: Config) -> nn.Module:
    """Return the model as the mode trains it; FSDP shards each block and the rest."""
    if config.mode == "ddp":
        return DistributedDataParallel(model)
    if config.mode == "fsdp1":
        device = next(model.parameters()).device
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    if config.mode == "fsdp2":
        mesh = init_device_mesh(config.device_type, (config.ranks,))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    return model


def whole_parameters(model: nn.Module) -> Any:
    """Return all parameters of a spread model, gathered, as one numpy vector. A collective call."""
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model) if is_fsdp1 else nullcontext():
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        return torch.cat([p.flatten().cpu() for p in whole]).numpy()


def put_inf(model: nn.Module) -> None:
    """Set one element of this rank's own gradient shards to inf."""
    shards = (local_tensor(p.grad) for p in model.parameters() if p.grad is not None)
    next(shard for shard in shards if shard.numel()).view(-1)[0] = inf

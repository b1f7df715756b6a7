"""One rank of the demo: an ordinary fp16 training loop, with an inf put into a shard now and then."""

import os
from math import inf

import torch
from torch.amp import GradScaler
from torch.nn import Module

from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.device import use_device
from scaler_triton.demo.parallel import spread, whole_parameters
from scaler_triton.demo.scalers import load_scalers
from scaler_triton.demo.trace import StepCounter, Trace
from scaler_triton.demo.workload import Workload, new_optimizer
from scaler_triton.placement import local_tensor


def train_rank(rank: int, config: DemoConfig, feed: str) -> Trace:
    """Train as one of the ranks and tell what happened.

    Args:
        rank: this process.
        config: the run.
        feed: a file that rank 0 writes a line to after each step.
    """
    trainer = Trainer(rank, config)
    with open(feed if rank == 0 else os.devnull, "a", buffering=1) as progress:
        for step in range(config.steps):
            trainer.train_step(step)
            progress.write(f"loss {trainer.trace.losses[-1]:.3f}, scale {trainer.trace.scales[-1]:g}\n")
    return trainer.finish()


class Trainer:
    """The model, optimizer and scaler of one rank."""

    def __init__(self, rank: int, config: DemoConfig) -> None:
        self.rank = rank
        self.config = config
        device = use_device(config.device_type, rank)
        self.workload = Workload(config, device)
        self.model = spread(self.workload.new_model(), config.mode, config.ranks)
        self.optimizer = new_optimizer(config.optimizer, self.model.parameters())
        self.counter = StepCounter(self.optimizer)
        self.scaler = new_scaler(config, device)
        self.trace = Trace(self.scaler.is_enabled(), start=whole_parameters(self.model).numpy())

    def train_step(self, step: int) -> None:
        """Take one step: forward, backward, maybe an inf, and the scaler decides."""
        taken = self.counter.counts()
        self.trace.scales.append(self.scaler.get_scale())
        loss = self.workload.loss(self.model, step, self.rank)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.config.bad_shards.get(step) == self.rank:
            spoil_one_element(self.model)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.trace.losses.append(loss.item())
        self.trace.skipped.append(self.counter.counts() == taken)

    def finish(self) -> Trace:
        """Return the trace, completed with what is true at the end."""
        self.trace.scales.append(self.scaler.get_scale())
        self.trace.step_counts = self.counter.counts()
        self.trace.end = whole_parameters(self.model).numpy()
        report = getattr(self.scaler, "overflow_report", None)  # torch's scaler has none
        if report is not None:
            self.trace.why = str(report(self.model, gather=True))
        return self.trace


def new_scaler(config: DemoConfig, device: torch.device) -> GradScaler:
    """Return the scaler that is shown, with settings that show growth and backoff in a short run."""
    scalers = load_scalers(config.scaler)
    chosen = scalers.plain if config.mode == "single" else scalers.sharded
    return chosen(device=device.type, init_scale=config.init_scale, growth_interval=config.growth_interval)


def spoil_one_element(model: Module) -> None:
    """Set one element of this rank's own gradient shards to inf."""
    shards = (local_tensor(p.grad) for p in model.parameters() if p.grad is not None)
    next(shard for shard in shards if shard.numel()).view(-1)[0] = inf

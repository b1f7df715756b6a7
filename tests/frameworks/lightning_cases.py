"""Small trainings by Lightning's Trainer and Fabric and by hand, and what they leave; ranks import this file."""

from __future__ import annotations

import builtins
import math
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scaler_triton import GradScaler

NAMESPACES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
STEPS, BAD_STEPS = 6, (1, 4)
SETTINGS = {"init_scale": 8.0, "growth_interval": 2}
SCALES = [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]  # after each step: 1 and 4 overflow, and two good ones in a row double
MAX_NORM = 0.01  # small enough to clip at every step
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}

# Warnings of Lightning and torch that these runs meet, as pytest's `filterwarnings` takes them.
KNOWN_WARNINGS = [
    # These tests find out whether another version works.
    "ignore:.* is installed. scaler_triton was tested with:UserWarning",
    # Lightning advises worker processes for the loader; five-element batches need none.
    "ignore:The '.*_dataloader' does not have many workers:UserWarning",
    # Lightning notices a GPU, where there is one, that a test on the CPU leaves alone.
    "ignore:GPU available but not used:UserWarning",
    # Lightning notices that it would not log by then.
    "ignore:The number of training batches:UserWarning",
    # Lightning 2.6 uses what torch 2.13 has deprecated.
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
    # Lightning's FSDPPrecision makes a scaler for GPUs first, which is not used.
    "ignore:.*torch.cuda.amp.GradScaler is enabled, but CUDA is not available:UserWarning",
    # torch's FSDP1 warns of itself when its sharded state is saved or loaded.
    "ignore:._get_pg_default_device. will be deprecated:UserWarning",
    "ignore:Multiple backends are registered with this ProcessGroup:UserWarning",
    "ignore:.load_state_dict. is deprecated and will be removed:FutureWarning",
    "ignore:FSDP.state_dict_type.. and FSDP.set_state_dict_type.. are being deprecated:FutureWarning",
    "ignore:Please use DTensor instead and we are deprecating ShardedTensor:FutureWarning",
]


def namespace(name: str) -> Any:
    """Import one of Lightning's two namespaces: its Trainer, its Fabric, and where their plugins are."""
    trainer, fabric = map(import_module, NAMESPACES[name])
    return SimpleNamespace(
        pl=trainer,
        Trainer=trainer.Trainer,
        Fabric=fabric.Fabric,
        trainer_plugins=import_module(f"{trainer.__name__}.plugins"),
        fabric_plugins=import_module(f"{fabric.__name__}.plugins"),
        environments=import_module(f"{fabric.__name__}.plugins.environments"),
        trainer_strategies=import_module(f"{trainer.__name__}.strategies"),
        fabric_strategies=import_module(f"{fabric.__name__}.strategies"),
    )


def network() -> nn.Sequential:
    """The model, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2))


def batches(part: int = 0, bad: Sequence[int] = BAD_STEPS, steps: int = STEPS) -> list[Tensor]:
    """Return a part's batch for every step; those of the bad steps make gradients overflow."""
    made = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * part + step)) for step in range(steps)]
    return [batch * math.inf if step in bad else batch for step, batch in enumerate(made)]


def new_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer from a name such as "adamw" or "sgd-fused"."""
    kind, _, fused = name.partition("-")
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    return cls(parameters, lr=0.1, **({"fused": True} if fused else {}))


def values(module: nn.Module) -> Tensor:
    """Return a module's parameters in one tensor, copied."""
    return torch.cat([p.detach().flatten().float().cpu().clone() for p in module.parameters()])


class Trace:
    """Scale, growth tracker, learning rate and parameters after every step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.trackers: list[int] = []
        self.rates: list[float] = []
        self.weights: list[Tensor] = []

    def add(self, scaler: Any, optimizer: Any, module: nn.Module) -> None:
        """Take in the state after a step."""
        self.scales.append(scaler.get_scale())
        self.trackers.append(int(scaler._growth_tracker))
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.weights.append(values(module))

    def assert_same(self, other: Trace, since: int = 0) -> None:
        """Assert that the other run went alike, to the bit; `since`: it is this run's end, from that step on."""
        mine = (self.scales[since:], self.trackers[since:], self.rates[since:])
        assert mine == (other.scales, other.trackers, other.rates)
        assert all(map(torch.equal, self.weights[since:], other.weights))
        assert not torch.equal(self.weights[0], self.weights[-1])  # it did train
        assert self.weights[-1].isfinite().all()


def module_of(pl: Any, optimizer: str, data: Sequence[Tensor], decay: bool = False) -> Any:
    """Make a LightningModule that trains the network on the data and keeps a trace."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.trace, self.seen = network(), Trace(), []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).float().square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(self.net[0].weight.grad.clone())

        def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
            self.trace.add(self.trainer.scaler, self.trainer.optimizers[0], self.net)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=None)

        def configure_optimizers(self) -> Any:
            made = new_optimizer(optimizer, self.parameters())
            scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
            return ([made], [{"scheduler": scheduler, "interval": "step"}]) if decay else made

    return Module()


def quietly() -> None:
    """Ignore the known warnings, in ranks that have made all others errors."""
    for known in KNOWN_WARNINGS:
        _, message, category = known.split(":")
        warnings.filterwarnings("ignore", message, getattr(builtins, category))


def fit(name: str, plugin: Any, optimizer: str, *, decay: bool = False, **options: Any) -> Any:
    """Train by the Trainer; return the module."""
    space = namespace(name)
    module = module_of(space.pl, optimizer, batches(), decay)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | QUIET | options
    space.Trainer(plugins=plugin, **options).fit(module)
    return module


Clip = Callable[[Any, Any, nn.Module], Any]


def clip(scaler: Any, optimizer: Any, net: nn.Module) -> None:
    """Clip as the Trainer's plugin does."""
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, MAX_NORM, parameters=net.parameters())


def by_hand(scaler: Any, optimizer_name: str, clip: Clip | None = None, device: str = "cpu") -> Trace:
    """Train the same in a loop of one's own; `clip(scaler, optimizer, net)` comes before the step."""
    net, trace = network().to(device), Trace()
    optimizer = new_optimizer(optimizer_name, net.parameters())
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = net(batch.to(device)).float().square().mean()
        scaler.scale(loss).backward()
        if clip is not None:
            clip(scaler, optimizer, net)
        scaler.step(optimizer)
        scaler.update()
        trace.add(scaler, optimizer, net)
    return trace


def ours(device: str = "cpu", **options: Any) -> GradScaler:
    """Make a scaler of ours with the tests' settings."""
    return GradScaler(device, **SETTINGS, **options)


def theirs() -> torch.amp.GradScaler:
    """Make a scaler of torch's with the same."""
    return torch.amp.GradScaler("cpu", **SETTINGS)

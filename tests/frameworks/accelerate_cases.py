"""What the ranks run with Accelerate: real Accelerators on gloo, and what their training left behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradScalerKwargs
from collective_counter import CollectiveCounter
from model_cases import BATCH, WIDTH, Net
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from scaler_triton.integrations.accelerate import use_scaler_triton

INIT_SCALE = 8.0
GROWTH_INTERVAL = 2
DECAY = 0.9375  # of the learning rate, in each step of the scheduler

# Warnings of others; everything else is an error.
IGNORED_WARNINGS = [
    # torch's FSDP1 saves shards by ways of torch's that are deprecated, and asks a group of gloo for its only device.
    (r"FSDP.state_dict_type\(\) and FSDP.set_state_dict_type\(\) are being deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    (r"`_get_pg_default_device` will be deprecated", UserWarning),
    (r"Multiple backends are registered with this ProcessGroup", UserWarning),
]


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """What `accelerate launch` puts into the environment, and no state of an Accelerator before or after."""
    size = str(dist.get_world_size())
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # Without the last one its device would be called cpu:0, which FSDP1 takes for another than cpu.
    added = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_TORCH_DEVICE": "cpu"}
    for message, category in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    # Barriers, and `fully_shard` without a mesh, take what torch is built for, even where there is none.
    on_cpu = mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu"))
    with mock.patch.dict(os.environ, launcher | added), on_cpu:
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Let the next Accelerator of this process be its first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def new_accelerator(sharding: str = "ddp", **options: Any) -> Accelerator:
    """Make an Accelerator for fp16: "ddp", "fsdp1", "fsdp1-flat" or "fsdp2"; without ranks, "ddp" is one process."""
    handlers = [GradScalerKwargs(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)]
    options = {"cpu": True, "mixed_precision": "fp16", "kwargs_handlers": handlers} | options
    accelerator = Accelerator(**options)
    if sharding != "ddp":
        shard(int(sharding[4]), orig=not sharding.endswith("flat"), whole=sharding.endswith("whole"))
    return accelerator


def linear(accelerator: Accelerator, name: str = "SGD", **options: Any) -> tuple[nn.Module, Any]:
    """A prepared layer of two weights and its optimizer."""
    layer = nn.Linear(2, 1, bias=False)
    return accelerator.prepare(layer, getattr(torch.optim, name)(layer.parameters(), lr=0.5, **options))


def backward(accelerator: Accelerator, *layers: nn.Module, value: float = 1.0) -> None:
    """Leave a gradient of (3, 4) in every layer, scaled; of another size by `value`."""
    accelerator.backward(sum((layer(torch.tensor([[3.0, 4.0]])) * value).float().sum() for layer in layers))


def shard(version: int, *, orig: bool, whole: bool) -> None:
    """Do what Accelerate does for an `fsdp_plugin=` on GPUs only: on a CPU it passes over it."""
    kind = "FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT"
    options = {"use_orig_params": orig, "state_dict_type": kind} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False, **options)
    plugin.set_mixed_precision("fp16")
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP


def use_torch(accelerator: Accelerator) -> Any:
    """Put torch's scaler where Accelerate does on a GPU."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    fsdp1 = accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
    scaler_class = ShardedGradScaler if fsdp1 else torch.amp.GradScaler
    accelerator.scaler = scaler_class(accelerator.device.type, init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    accelerator.native_amp = True
    return accelerator.scaler


@contextmanager
def nothing_offloaded() -> Iterator[None]:
    """Let FSDP1 copy whole states: on a CPU what it "offloads" is the memory that it frees, and saving that crashes."""
    original = FullyShardedDataParallel.state_dict_type

    def state_dict_type(model: nn.Module, kind: Any, *configs: Any) -> Any:
        for config in configs:
            config.offload_to_cpu = False
        return original(model, kind, *configs)

    with mock.patch.object(FullyShardedDataParallel, "state_dict_type", state_dict_type):
        yield


@dataclass
class Report:
    """What a run left on one rank; lists run over the optimizer's steps."""

    scales: list[str] = field(default_factory=list)  # as hex: compared bit by bit
    trackers: list[int] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    collectives: list[tuple[int, int]] = field(default_factory=list)  # of the clipping, of the step
    clipped_by_scaler: list[Any] = field(default_factory=list)  # its argument `parameters`
    digests: list[str] = field(default_factory=list)  # of each parameter's local values
    step_counts: list[float] = field(default_factory=list)  # of the optimizer's state


class Job:
    """A model, an optimizer and a scheduler that an Accelerator has prepared."""

    def __init__(self, rank: int, sharding: str, name: str, *, ours: bool = True, **options: Any) -> None:
        self.rank, self.sharding = rank, sharding
        self.accelerator = new_accelerator(sharding, **options)
        self.scaler = (use_scaler_triton if ours else use_torch)(self.accelerator)
        torch.manual_seed(0)
        net: nn.Module = Net()
        if sharding == "fsdp1-flat":
            net = self.accelerator.prepare(net)
        optimizer = cases.new_optimizer(name, net.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: DECAY**n)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(net, optimizer, scheduler)

    def train(self, steps: range, overflows: Collection[int], max_norm: float = 0.05) -> Report:
        """Train as Accelerate's documentation shows, each step on this rank's part of its own batch."""
        report = Report()
        spy = mock.MagicMock(side_effect=getattr(self.scaler, "clip_grad_norm_", None))
        for step in steps:
            with (
                self.accelerator.accumulate(self.model),
                mock.patch.object(self.scaler, "clip_grad_norm_", spy, create=True),
            ):
                self._backward(step)
                if step in overflows:
                    self._overflow()
                if self.accelerator.sync_gradients:
                    self._step(report, max_norm)
                self.scheduler.step()
                self.optimizer.zero_grad()
        report.clipped_by_scaler = [call.kwargs["parameters"] for call in spy.call_args_list]
        report.digests = [cases.digest(parameter) for parameter in self.model.parameters()]
        report.step_counts = cases.step_counts(self.optimizer)
        return report

    def _backward(self, step: int) -> None:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        part = x.chunk(dist.get_world_size())[self.rank] if dist.is_initialized() else x
        part = part.to(self.accelerator.device)
        self.accelerator.backward(nn.functional.mse_loss(self.model(part).float(), part.sin()))

    def _overflow(self) -> None:
        """Put an inf where one rank alone sees it; under DDP, which has added up the gradients, on all of them."""
        if self.rank == 1 or self.sharding == "ddp":
            held = [cases.values_of(p.grad) for p in self.model.parameters() if p.grad is not None]
            next(values for values in held if values.numel()).view(-1)[0] = torch.inf

    def _step(self, report: Report, max_norm: float) -> None:
        with CollectiveCounter() as clipping:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        with CollectiveCounter() as stepping:
            self.optimizer.step()
        report.norms.append(_whole(norm))
        report.collectives.append((clipping.count, stepping.count))
        report.skipped.append(self.accelerator.optimizer_step_was_skipped)
        report.rates.append(self.scheduler.get_last_lr()[0])
        report.scales.append(float(self.scaler.get_scale()).hex())
        report.trackers.append(self.scaler._get_growth_tracker())


def _whole(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, cases.DTensor) else norm)


def train(rank: int, sharding: str, name: str, overflows: Collection[int], steps: int, **options: Any) -> Report:
    """Train a fresh job from the start."""
    max_norm = options.pop("max_norm", 0.05)
    with launched(rank):
        return Job(rank, sharding, name, **options).train(range(steps), overflows, max_norm)


def prepared(rank: int, sharding: str) -> tuple[str, str, str]:
    """Return the types of the model and of a parameter, and in which dtype a layer answers."""
    with launched(rank):
        job, dtypes = Job(rank, sharding, "adamw"), []
        layer = next(module for module in job.model.modules() if isinstance(module, nn.Linear))
        layer.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        job._backward(0)
        return type(job.model).__name__, type(next(job.model.parameters())).__name__, str(dtypes[0])


@dataclass(frozen=True)
class Resumed:
    """A run that went on after a checkpoint, and one that started from it."""

    saved: tuple[dict[str, Any], list[str]]  # the scaler's state and the parameters when it was saved
    loaded: tuple[dict[str, Any], list[str]]
    straight: Report
    resumed: Report


def resume_whole(rank: int, name: str, folder: Path, **options: Any) -> Resumed:
    """Do the same with the whole states of FSDP1, loaded into a fresh job."""
    with nothing_offloaded():
        return resume(rank, "fsdp1-whole", name, folder, trained=0, **options)


def resume(
    rank: int, sharding: str, name: str, folder: Path, *, trained: int, first_ours: bool = True, max_norm: float = 0.05
) -> Resumed:
    """Save in the middle of a run, and load into a job that has taken `trained` steps of its own.

    Args:
        first_ours: False: the run that is saved has torch's scaler.
    """
    with launched(rank):
        first = Job(rank, sharding, name, ours=first_ours)
        first.train(range(5), {1}, max_norm)
        first.accelerator.save_state(str(folder))
        saved = state_of(first)
        straight = first.train(range(5, 9), {6}, max_norm)
    with launched(rank):
        second = Job(rank, sharding, name)
        second.train(range(20, 20 + trained), ())
        second.accelerator.load_state(str(folder))
        loaded = state_of(second)
        return Resumed(saved, loaded, straight, second.train(range(5, 9), {6}, max_norm))


def save_before_the_first_step(rank: int, sharding: str, name: str, folder: Path) -> tuple[Any, Any]:
    """Save a job that nothing has happened to; the scaler's state before and after."""
    with launched(rank):
        job = Job(rank, sharding, name)
        before = job.scaler.state_dict()
        job.accelerator.save_state(str(folder))
        return before, job.scaler.state_dict()


def save_while_accumulating(rank: int, sharding: str, folder: Path | None) -> Report:
    """Train with two backwards a step, and save between the first two; without a folder, do not save."""
    with launched(rank):
        job = Job(rank, sharding, "adamw", gradient_accumulation_steps=2)
        job.train(range(1), ())
        if folder is not None:
            job.accelerator.save_state(str(folder))
        return job.train(range(1, 6), {3})


def state_of(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Return the scaler's state, and digests of the parameters."""
    return job.scaler.state_dict(), [cases.digest(parameter) for parameter in job.model.parameters()]


def clip_some(rank: int, sharding: str) -> tuple[float, float, int]:
    """Clip one layer's parameters: the norm, what the ranks' gradients sum up to, and how many collectives it took."""
    with launched(rank):
        job = Job(rank, sharding, "adamw")
        job._backward(0)
        layer = [parameter for name, parameter in job.model.named_parameters() if ".up." in f".{name}"]
        with CollectiveCounter() as counter:
            norm = job.accelerator.clip_grad_norm_(layer, 1e9)
        return float(norm), _norm_of_all(layer, sharding), counter.count


def clip_two_models(rank: int) -> tuple[list[float], list[int], list[bool]]:
    """Clip two FSDP1 models under one norm, then, after a step, one after the other."""
    with launched(rank):
        accelerator = new_accelerator("fsdp1")
        use_scaler_triton(accelerator)
        models = [accelerator.prepare(Net()) for _ in range(2)]
        optimizers = [accelerator.prepare(cases.new_optimizer("adamw-fused", net.parameters())) for net in models]
        norms, counts = [], []
        for together in (True, False):
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
            accelerator.backward(sum(nn.functional.mse_loss(net(x).float(), x.sin()) for net in models))
            groups = [list(net.parameters()) for net in models]
            for group in [[*groups[0], *groups[1]]] if together else groups:
                with CollectiveCounter() as counter:
                    norms.append(float(accelerator.clip_grad_norm_(group, 1e9)))
                counts.append(counter.count)
                norms.append(_norm_of_all(group, "fsdp1"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return norms, counts, [optimizer.step_was_skipped for optimizer in optimizers]


def _norm_of_all(parameters: list[Tensor], sharding: str) -> float:
    """The norm over the ranks' unscaled shards, in fp64; under DDP every rank holds all."""
    held = [cases.values_of(parameter.grad).double() for parameter in parameters if parameter.grad is not None]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *(values.square().sum() for values in held)]).sum()
    if sharding != "ddp":
        dist.all_reduce(total)
    return float(total.sqrt())

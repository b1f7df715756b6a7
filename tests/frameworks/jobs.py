"""What the frameworks' tests share, and their ranks import: a small model, its sharding, batches, optimizers."""

import builtins
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from ranks.cases import digest, values_of
from ranks.models import WIDTH, Net
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

BATCH = 8
SETTINGS = {"init_scale": 8.0, "growth_interval": 2}
STEPS, BAD_STEPS = 6, (1, 4)
SCALES = [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]  # after each step: 1 and 4 overflow, and two good ones in a row double
SKIPPED = [step in BAD_STEPS for step in range(STEPS)]
FUSED = ["adamw", "adamw-fused"]
GUARD = {"spike_sigma": 30.0, "window": 4}  # looks for spikes from the third norm on
SPIKE = 1000.0  # times a batch: so large is its loss then, too

# By what two layers' parts of each of four losses are multiplied; a bad part has infinite gradients.
GOOD_PARTS = [(1.0, 0.5), (0.75, 2.0), (1.5, 1.0), (0.5, 0.25)]
BAD_PARTS = {"none": (), "first": (0,), "second": (1,), "both": (0, 1)}

# Warnings of others, as message and category; every other one is an error, here as in the ranks.
WARNINGS = [
    (".* is installed. scaler_triton was tested with", "UserWarning"),  # the tests find out whether it works
    ("The '.*_dataloader' does not have many workers", "UserWarning"),
    ("The number of training batches", "UserWarning"),
    ("GPU available but not used", "UserWarning"),
    (".training_step. returned .None.", "UserWarning"),
    ("Starting from v1.9.0, `tensorboardX` has been removed", "UserWarning"),
    ("'pin_memory' argument is set as true but no accelerator is found", "UserWarning"),
    (".isinstance.treespec, LeafSpec.. is deprecated", "FutureWarning"),  # Lightning 2.6 uses it
    ("`is_gradient_checkpointing` is deprecated", "FutureWarning"),  # transformers asks its own models for it
    (".torch.cpu.amp.autocast.args..... is deprecated", "FutureWarning"),  # of transformers 4.56 in bf16 on a CPU
    # Lightning's FSDPPrecision makes a scaler for GPUs first, which is not used.
    (".*torch.cuda.amp.GradScaler is enabled, but CUDA is not available", "UserWarning"),
    # torch's FSDP1 warns of itself when its sharded state is saved or loaded.
    (".*_get_pg_default_device. will be deprecated", "UserWarning"),
    ("Multiple backends are registered with this ProcessGroup", "UserWarning"),
    ("TypedStorage is deprecated", "UserWarning"),  # by torch 2.10's own checkpoints
    (".load_state_dict. is deprecated and will be removed", "FutureWarning"),
    ("FSDP.state_dict_type.. and FSDP.set_state_dict_type.. are being deprecated", "FutureWarning"),
    ("Please use DTensor instead", "FutureWarning"),
    ("The `NO_SHARD` sharding strategy is deprecated", "FutureWarning"),
    ("FSDP2-wrapped module .* returned a view tensor", "UserWarning"),
    # A case before this one may have imported Accelerate.
    (r"\[ST14\]", "UserWarning"),
]


def strictly(rank: int, case: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a case in a rank, with every other warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message, category in WARNINGS:
            warnings.filterwarnings("ignore", message, getattr(builtins, category))
        return case(rank, *args, **options)


def new_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x).float(), x.float().flip(1).sin())
    return loss * torch.where(x.abs().amax() > 0.1 * SPIKE, SPIKE, 1.0)


def batches(part: int = 0, bad: Collection[int] = BAD_STEPS, steps: int = STEPS) -> list[Tensor]:
    """Return a part's batch for every step; those of the bad steps make gradients overflow.

    In fp16, to which Fabric casts a model's inputs, and the Trainer does not.
    """
    draws = [torch.Generator().manual_seed(10 * part + step) for step in range(steps)]
    made = [torch.randn(4, WIDTH, generator=draw).half() for draw in draws]
    return [batch * math.inf if step in bad else batch for step, batch in enumerate(made)]


def guarded_batches(bad: int, factor: float, steps: int = STEPS) -> list[Tensor]:
    """Return fp32 batches, the bad one times a factor: infinite, or `SPIKE`."""
    made = [batch.float() for batch in batches(bad=(), steps=steps)]
    return [batch * factor if step == bad else batch for step, batch in enumerate(made)]


def parts_of_losses(bad: str) -> list[list[float]]:
    """Return what the layers' parts of each loss are multiplied by; the first and the third are bad."""
    which = BAD_PARTS[bad]
    return [
        [math.inf if number % 2 == 0 and part in which else factor for part, factor in enumerate(factors)]
        for number, factors in enumerate(GOOD_PARTS)
    ]


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model by FSDP2, layer by layer."""
    for layer in (*net.children(), net):
        fully_shard(layer, mesh=mesh)
    return net


def overflow(parameters: Iterable[Tensor]) -> None:
    """Make one gradient's first element on this rank infinite."""
    held = [values_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    next(values for values in held if values.numel()).view(-1)[0] = torch.inf


def digests(model: nn.Module) -> list[str]:
    """Return a short name for each parameter's local values, bit by bit."""
    return [digest(parameter) for parameter in model.parameters()]


def whole(*models: nn.Module) -> Tensor:
    """Return all parameters of the models in one tensor, copied, on every rank."""
    found = []
    for model in models:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                found += [p.detach().flatten().clone() for p in model.parameters()]
        else:
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
            found += [p.detach().flatten().clone() for p in full]
    return torch.cat(found).float().cpu()

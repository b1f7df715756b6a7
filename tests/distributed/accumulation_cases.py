"""Gradients that are reduced only after several backward passes: what each rank runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cases
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.nn.parallel import DistributedDataParallel


def accumulates_without_sync(rank: int, how: str) -> list[dict[str, Any]]:
    """Train under DDP, FSDP1 or FSDP2 with `no_sync`, with torch's scaler and with ours; what each left."""
    settings = {"device": cases.DEVICE, "init_scale": cases.INIT_SCALE, "growth_interval": cases.GROWTH_INTERVAL}
    if how == "fsdp1":
        classes: tuple[Any, ...] = TorchShardedGradScaler, cases.scaler_class("sharded")
    else:
        classes = torch.amp.GradScaler, cases.scaler_class("grad")
    return [_accumulate(rank, scaler(**settings), _spread(how)) for scaler in classes]


def _spread(how: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_id=cases.this_device())
    return fully_shard(model, mesh=cases.line())


def _accumulate(rank: int, scaler: Any, model: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator, scales, digests = torch.Generator().manual_seed(rank), [], []
    for step in range(cases.STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            spoiled = (step, micro, rank) == (1, 0, 1)  # one rank, in a pass that is not reduced by itself
            with _synchronised(model, micro == 2):  # around the forward pass, too, in which DDP decides
                loss = model(cases.drawn((2, 4), generator)).square().mean()
                scaler.scale(loss * torch.inf if spoiled else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        digests.append([cases.digest(p) for p in model.parameters()])
    return {"scales": scales, "digests": digests}


def _synchronised(model: Any, wanted: bool) -> AbstractContextManager[None]:
    if hasattr(model, "no_sync"):
        return nullcontext() if wanted else model.no_sync()
    model.set_requires_gradient_sync(wanted)
    return nullcontext()

"""`no_sync`: gradients of several backward passes, of which only the last is reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranks import cases

pytestmark = pytest.mark.distributed


def accumulates_without_sync(rank: int, how: str) -> list[dict[str, Any]]:
    """Train under DDP, FSDP1 or FSDP2 with `no_sync`, with torch's scaler and with ours; what each left."""
    kind = "sharded" if how == "fsdp1" else "grad"
    return [_accumulate(rank, make(kind), _spread(how)) for make in (cases.torch_scaler, cases.new_scaler)]


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


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_no_sync(two, how):
    """One rank overflows in a pass that is not reduced by itself; ours does what torch's does, to the bit."""
    results = two.run(accumulates_without_sync, how)
    for theirs, ours in results:
        assert ours == theirs
        assert ours["scales"] == [float.fromhex(scale) for scale in cases.scale_model([1])[0]]
        assert ours["digests"][1] == ours["digests"][0] != ours["digests"][2]
    (_, first), (_, second) = results
    assert (first["digests"] == second["digests"]) == (how == "ddp")  # whole parameters, or different shards

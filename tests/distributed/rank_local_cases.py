"""Cases over parameters that each rank holds for itself, as FSDP1 shards or pipeline stages are."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from cases import (
    STEPS,
    Fault,
    Habits,
    Report,
    drawn,
    give_grads,
    giving,
    new_optimizer,
    new_scaler,
    params_of,
    plain_param,
    this_device,
    train,
)
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss


def rank_local(
    rank: int,
    kind: str,
    names: Sequence[str],
    faults: Sequence[Fault],
    *,
    unscale: bool = False,
    gradless: Sequence[int] = (),
) -> Report:
    """Own parameters on every rank, two for each named optimizer; `gradless` ranks have no gradients."""
    scaler = new_scaler(kind)
    optimizers = [new_optimizer(name, [plain_param(3), plain_param(2, 2)]) for name in names]
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    without = range(len(params)) if rank in gradless else ()
    backward = giving(scaler, params, without)
    return train(rank, scaler, optimizers, backward, faults, habits=Habits(unscale=unscale))


def differing_optimizers(rank: int, kind: str, names: Sequence[str], faults: Sequence[Fault]) -> Report:
    """Rank r uses the r-th optimizer: fused here, plain there."""
    return rank_local(rank, kind, [names[rank]], faults)


def unscale_on_some(rank: int, kind: str, name: str, faults: Sequence[Fault]) -> Report:
    """Even ranks call unscale_ themselves, odd ones leave it to step."""
    return rank_local(rank, kind, [name], faults, unscale=rank % 2 == 0)


def pipeline_stages(rank: int, kind: str, name: str, faults: Sequence[Fault]) -> Report:
    """Every rank has other parameters: another number, other shapes, other dtypes."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    scaler = new_scaler(kind)
    params = [plain_param(rank + 2, dtype=dtypes[(rank + i) % 4]) for i in range(rank + 1)]
    optimizer = new_optimizer(name, params)
    return train(rank, scaler, [optimizer], giving(scaler, params), faults)


def pipeline_schedule(rank: int, name: str, faults: Sequence[Fault]) -> tuple[Report, float]:
    """A layer a rank under torch's 1F1B, one step bad; what it reports, and how far from one process it ends."""
    layers = [torch.nn.Linear(6, 6) for _ in range(dist.get_world_size())]
    bare = copy.deepcopy(torch.nn.Sequential(*layers))
    stage = PipelineStage(layers[rank], rank, len(layers), this_device())
    scaler, optimizer = new_scaler("sharded"), new_optimizer(name, layers[rank].parameters())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: scaler.scale(mse_loss(output, target)))
    if not stage.is_last:
        scaler.scale(torch.zeros(()))

    def backward(step: int) -> None:
        x, y = _batch(step)
        schedule.step(*[x] * stage.is_first, **({"target": y, "losses": []} if stage.is_last else {}))

    report = train(rank, scaler, [optimizer], backward, faults)
    reference, bad = new_optimizer(name, bare.parameters()), {fault.step for fault in faults}
    for step in sorted({*range(STEPS)} - bad):
        x, y = _batch(step)
        reference.zero_grad()
        mse_loss(bare(x), y).backward()
        reference.step()
    pairs = zip(layers[rank].parameters(), bare[rank].parameters(), strict=True)
    return report, max(float((ours - one).detach().abs().max()) for ours, one in pairs)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    x = drawn((8, 6), torch.Generator().manual_seed(step))
    return x, x.sin()


def frozen_on_some(rank: int, kind: str, name: str, faults: Sequence[Fault]) -> Report:
    """Odd ranks hold only frozen and empty parameters."""
    scaler = new_scaler(kind)
    params = [plain_param(3), plain_param(0)]
    if rank % 2:
        params[0].requires_grad_(False)
    optimizer = new_optimizer(name, params)
    without = [0] if rank % 2 else []
    backward = giving(scaler, params, without)
    return train(rank, scaler, [optimizer], backward, faults)


def sparse_on_some(rank: int, kind: str, name: str, faults: Sequence[Fault]) -> Report:
    """Odd ranks hold sparse gradients, uncoalesced, where the others hold dense ones."""
    scaler, param = new_scaler(kind), plain_param(4, 2)
    optimizer = new_optimizer(name, [param])

    def backward(step: int) -> None:
        give_grads(scaler, [param], step)
        if rank % 2:
            rows = param.grad[:2].clone() / 2
            param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), rows, param.shape, check_invariants=True)

    return train(rank, scaler, [optimizer], backward, faults)


def patched_unscale(rank: int, kind: str, name: str, faults: Sequence[Fault], unscale: bool) -> Report:
    """A user's wrapper around `_unscale_grads_`, as kohya-ss puts one in to allow fp16."""
    scaler = new_scaler(kind)
    inner = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inv, found, allow_fp16: inner(optimizer, inv, found, True)
    param = plain_param(3)
    optimizer = new_optimizer(name, [param])
    backward = giving(scaler, [param])
    return train(rank, scaler, [optimizer], backward, faults, habits=Habits(unscale=unscale))


def grads_come_and_go(rank: int, kind: str, name: str, faults: Sequence[Fault]) -> Report:
    """Another parameter has no gradient on every rank and step, as in a mixture of experts."""
    scaler = new_scaler(kind)
    params = [plain_param(2) for _ in range(4)]
    optimizer = new_optimizer(name, params)

    def backward(step: int) -> None:
        give_grads(scaler, params, step, without=[1 + (rank + step) % 3])

    return train(rank, scaler, [optimizer], backward, faults)

"""Cases over parameters that each rank holds for itself, as FSDP1 shards or pipeline stages are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cases import Fault, Habits, Report, give_grads, giving, new_optimizer, new_scaler, params_of, plain_param, train


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

"""What the ranks run in test_unstepped_ranks: the step of one of two optimizers comes after `update`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from cases import Fault, collectives_of, dtensor_param, line, local_of, new_optimizer, new_scaler, plain_param, plant
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

GRADIENT = 8.0


class Outcome(NamedTuple):
    """What one rank holds after the late step, and how many collectives that step made."""

    values: list[float]
    collectives: int
    scale: float


def postponed_step(rank: int, kind: str, layout: str, name: str, faults: Sequence[Fault], gradless: int) -> Outcome:
    """Unscale `late`, step the other optimizer, update, and only then step `late`, whose parameters start at 1."""
    scaler = new_scaler(kind)
    late, early = _param(layout), _param(layout)
    optimizers = [new_optimizer(name, [late]), new_optimizer("sgd", [early])]
    scaler.scale(torch.ones(()))
    for param in (late, early):
        param.grad = None if rank == gradless and param is late else _gradient(param)
    plant(faults, rank, 0, [late])
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[1])
    scaler.update()
    return _outcome(scaler, late, collectives_of(scaler.step, optimizers[0]))


def skipped_step(rank: int, kind: str, layout: str, name: str, gradless: int) -> Outcome:
    """All ranks overflow and skip by hand; then come new gradients, but on one rank, which had none before either."""
    scaler = new_scaler(kind)
    param = _param(layout)
    optimizer = new_optimizer(name, [param])
    scaler.scale(torch.ones(()))
    param.grad = None if rank == gradless else _gradient(param, float("inf"))
    scaler.unscale_(optimizer)
    scaler.update()
    param.grad = None if rank == gradless else _gradient(param)
    return _outcome(scaler, param, collectives_of(scaler.step, optimizer))


def failed_clip(rank: int, sparse_first: bool, norm_type: float) -> Outcome:
    """Rank 1 cannot clip one of two optimizers; the step of the other, with a sparse gradient, comes after `update`."""
    scaler, sparse, cut = new_scaler("grad"), plain_param(3), _param("dtensor")
    optimizers = [new_optimizer("sgd", [sparse]), new_optimizer("sgd", [cut])]
    scaler.scale(torch.ones(()))
    sparse.grad = torch.sparse_coo_tensor([[0, 0, 1]], [GRADIENT] * 3, (3,), check_invariants=True)
    cut.grad = _gradient(cut)
    if rank == 1:
        cut.grad = DTensor.from_local(torch.ones(1).expand(2, 3), line(), [Shard(0)], run_check=False)
    with suppress(RuntimeError) if rank == 1 else nullcontext():  # its gradient is one element, expanded
        scaler.clip_grad_norm_(optimizers if sparse_first else optimizers[::-1], 1.0, norm_type)
    scaler.update()
    return _outcome(scaler, sparse, collectives_of(scaler.step, optimizers[0]))


def _outcome(scaler: Any, param: Tensor, collectives: int) -> Outcome:
    scaler.update()
    return Outcome(local_of(param).flatten().tolist(), collectives, scaler.get_scale())


def _param(layout: str) -> Tensor:
    return dtensor_param(line(), [Shard(0)]) if layout == "dtensor" else plain_param(2, 3)


def _gradient(param: Tensor, value: float = GRADIENT) -> Tensor:
    local = torch.full((2, 3), value)
    if isinstance(param, DTensor):
        return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)
    return local


def step_that_failed(rank: int, kind: str, layout: str, name: str, gradless: int) -> Outcome:
    """Rank 1 runs out of memory in a step, and so has no update: it goes on with the next batch, as the others do."""
    scaler, param = new_scaler(kind), _param(layout)
    scaler.set_growth_interval(100)  # their trackers part
    optimizer = new_optimizer(name, [param])
    for batch in range(2):
        param.grad = None
        scaler.scale(torch.ones(()))
        param.grad = None if rank == gradless else _gradient(param)
        with _no_memory(optimizer) if (rank, batch) == (1, 0) else nullcontext():
            collectives = collectives_of(scaler.step, optimizer)
            if batch == 0:
                scaler.update()
    return _outcome(scaler, param, collectives)


@contextmanager
def _no_memory(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    with suppress(torch.OutOfMemoryError), patch.object(optimizer, "step", side_effect=torch.OutOfMemoryError):
        yield

"""Cases over DTensors, laid out by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases import (
    Fault,
    Habits,
    Report,
    dtensor_param,
    give_grads,
    giving,
    line,
    local_of,
    mesh,
    new_optimizer,
    new_scaler,
    params_of,
    plain_param,
    square,
    train,
)
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from scaler_triton import placement


def _line_shards() -> list[Tensor]:
    return [dtensor_param(line(), [Shard(0)]) for _ in range(2)]


def _line_replicated_first() -> list[Tensor]:
    return [dtensor_param(line(), [Replicate()]), dtensor_param(line(), [Shard(0)])]


def _line_replicated_last() -> list[Tensor]:
    return _line_replicated_first()[::-1]


def _line_dtypes() -> list[Tensor]:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    return [dtensor_param(line(), [Shard(0)], dtype) for dtype in dtypes]


def _line_beside_plain() -> list[Tensor]:
    return [dtensor_param(line(), [Shard(0)]), plain_param(3)]


def _plain_beside_line() -> list[Tensor]:
    return _line_beside_plain()[::-1]


def _line_beside_plain_double() -> list[Tensor]:
    return [dtensor_param(line(), [Shard(0)]), plain_param(3, dtype=torch.float64)]


def _square_shards() -> list[Tensor]:
    return [dtensor_param(square(), [Shard(0), Shard(1)]) for _ in range(2)]


def _square_replicated_first() -> list[Tensor]:
    placements = [[Replicate(), Replicate()], [Shard(0), Shard(1)]]
    return [dtensor_param(square(), each) for each in placements]


def _square_half_replicated_first() -> list[Tensor]:
    placements = [[Shard(0), Replicate()], [Shard(0), Shard(1)]]
    return [dtensor_param(square(), each) for each in placements]


def _hsdp() -> list[Tensor]:
    return [dtensor_param(square(), [Replicate(), Shard(0)]) for _ in range(2)]


def _fsdp_then_tp() -> list[Tensor]:
    # A norm is sharded over dp alone, a linear layer over dp and tp: two meshes of one root.
    return [dtensor_param(square()["dp"], [Shard(0)]), dtensor_param(square(), [Shard(0), Shard(1)])]


def _two_slices() -> list[Tensor]:
    return [dtensor_param(square()["dp"], [Shard(0)]), dtensor_param(square()["tp"], [Shard(0)])]


def _expert_parallel() -> list[Tensor]:
    # Dense layers over a line, experts over another mesh of the same ranks.
    experts = mesh((2, 2), ("ep", "efsdp"), (0, 2, 1, 3))
    return [dtensor_param(line(), [Shard(0)]), dtensor_param(experts, [Shard(0), Shard(1)])]


def _expert_parallel_slice() -> list[Tensor]:
    # The experts know only their own fsdp dim: a 1-D slice of another root.
    experts = mesh((2, 2), ("ep", "efsdp"), (0, 2, 1, 3))
    return [dtensor_param(experts["efsdp"], [Shard(0)]), dtensor_param(line(), [Shard(0)])]


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "line-shards": _line_shards,
    "line-replicated-first": _line_replicated_first,
    "line-replicated-last": _line_replicated_last,
    "line-dtypes": _line_dtypes,
    "line-beside-plain": _line_beside_plain,
    "plain-beside-line": _plain_beside_line,
    "line-beside-plain-double": _line_beside_plain_double,
    "square-shards": _square_shards,
    "square-replicated-first": _square_replicated_first,
    "square-half-replicated-first": _square_half_replicated_first,
    "hsdp": _hsdp,
    "fsdp-then-tp": _fsdp_then_tp,
    "two-slices": _two_slices,
    "expert-parallel": _expert_parallel,
    "expert-parallel-slice": _expert_parallel_slice,
}


def laid_out(
    rank: int,
    kind: str,
    layout: str,
    name: str,
    faults: Sequence[Fault],
    *,
    unscale: bool = False,
    gradless: Sequence[int] = (),
) -> Report:
    """DTensors in a named layout, one optimizer, a param group each: fused kernels refuse a DTensor beside a plain."""
    scaler, params = new_scaler(kind), LAYOUTS[layout]()
    without = range(len(params)) if rank in gradless else ()
    backward = giving(scaler, params, without)
    optimizer = new_optimizer(name, [{"params": [param]} for param in params])
    return train(rank, scaler, [optimizer], backward, faults, habits=Habits(unscale=unscale))


def two_optimizers_two_meshes(rank: int, kind: str, faults: Sequence[Fault]) -> Report:
    """One optimizer for each mesh, plain and fused, as expert-parallel trainers have."""
    scaler = new_scaler(kind)
    first, second = LAYOUTS["expert-parallel"]()
    optimizers = [new_optimizer("adamw", [first]), new_optimizer("adamw-fused", [second])]
    return train(rank, scaler, optimizers, giving(scaler, [first, second]), faults)


def one_slice(rank: int, kind: str, name: str, faults: Sequence[Fault]) -> Report:
    """Parameters on the tp slice of a square alone."""
    scaler = new_scaler(kind)
    params = [dtensor_param(square()["tp"], [Shard(0)])]
    optimizer = new_optimizer(name, params)
    return train(rank, scaler, [optimizer], giving(scaler, params), faults)


def world_beside_a_pair(rank: int, name: str, faults: Sequence[Fault], unscale: bool, holders: Sequence[int]) -> Report:
    """Dense layers on a mesh of all ranks, and on some of them experts on one of two, which knows no larger one."""
    scaler = new_scaler("grad")
    pairs = [mesh((2,), ("pair",), order) for order in ((0, 2), (1, 3))]
    params = [dtensor_param(on, [Shard(0)]) for on in (pairs[rank % 2], line())]
    params = params if rank in holders else params[1:]
    optimizer = new_optimizer(name, params)
    return train(rank, scaler, [optimizer], giving(scaler, params), faults, habits=Habits(unscale=unscale))


def placed_anew(rank: int, bad: bool) -> tuple[float, bool, float]:
    """A step after loading, in place, shards over all ranks where those of a slice were: norm, skip, scale."""
    scaler, whole = new_scaler("grad", init_scale=4.0), torch.ones(4, 4)
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(whole, square()["tp"], [Shard(0)]))
    optimizer = new_optimizer("sgd", [layer.weight])
    give_grads(scaler, [layer.weight], 0)
    scaler.step(optimizer)
    scaler.update()
    placed = {"weight": distribute_tensor(whole, square(), [Shard(0), Shard(1)])}
    with swapping():
        layer.load_state_dict(placed, assign=True)
    optimizer.zero_grad()
    gradient = DTensor.from_local(torch.full((2, 2), scaler.get_scale()), square(), [Shard(0), Shard(1)])
    if bad and rank == 0:
        gradient.to_local()[0, 0] = torch.inf
    layer.weight.grad = gradient
    norm = scaler.clip_grad_norm_(optimizer, 100.0).item()
    scaler.step(optimizer)
    skipped = scaler.was_skipped(optimizer)
    scaler.update()
    return norm, skipped, scaler.get_scale()


@contextmanager
def swapping() -> Iterator[None]:
    """Modules take what they load by swapping it with what they have: a parameter stays the same object."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def an_optimizer_each(rank: int, kind: str, layout: str) -> list[str]:
    """Two steps with two optimizers for each parameter of a layout; what is warned of."""
    scaler = new_scaler(kind)
    optimizers = [new_optimizer("sgd", [param]) for _ in range(2) for param in LAYOUTS[layout]()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            for optimizer in optimizers:
                give_grads(scaler, params_of(optimizer), step)
                scaler.step(optimizer)
            scaler.update()
    return [str(each.message) for each in caught]


def part_of_the_world(rank: int, name: str, faults: Sequence[Fault]) -> Report | None:
    """A 1 x 2 mesh of ranks 0 and 1 in a larger world; the other ranks have no scaler at all."""
    pair = mesh((1, 2), ("replica", "shard"), (0, 1))
    if rank > 1:
        return None
    scaler = new_scaler("grad")
    params = [dtensor_param(pair, [Replicate(), Shard(0)])]
    optimizer = new_optimizer(name, params)
    return train(rank, scaler, [optimizer], giving(scaler, params), faults)


def part_beside_uneven_groups(rank: int, name: str, faults: Sequence[Fault]) -> tuple[Report | None, float]:
    """As `part_of_the_world`, after a group that rank 0 has to itself; how many ranks a later group reaches."""
    dist.new_group([0])
    report = part_of_the_world(rank, name, faults)
    dist.all_reduce(ranks := torch.ones(()), group=dist.new_group())
    return report, ranks.item()


def _agree_in_a_larger_world(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Work out who must agree while the world seems to have more ranks: only a mesh's own groups reach just those."""
    size = dist.get_world_size
    with mock.patch.object(dist, "get_world_size", lambda group=None: 8 if group is None else size(group)):
        scaler._agreement(scaler._records.plan(optimizer))


def square_in_a_larger_world(rank: int, name: str, faults: Sequence[Fault], unscale: bool) -> Report:
    """Shards on a 2 x 2 mesh that is a part of the world."""
    scaler, params = new_scaler("grad"), LAYOUTS["square-shards"]()
    optimizer = new_optimizer(name, params)
    _agree_in_a_larger_world(scaler, optimizer)
    return train(rank, scaler, [optimizer], giving(scaler, params), faults, habits=Habits(unscale=unscale))


def norm_in_a_larger_world(rank: int, order: float) -> float:
    """The norm of such shards, two of 2 x 3 elements a rank; those of rank n hold n + 1."""
    scaler, params = new_scaler("grad"), LAYOUTS["square-shards"]()
    optimizer = new_optimizer("sgd", params)
    _agree_in_a_larger_world(scaler, optimizer)
    for param in params:
        local = scaler.scale(torch.full((2, 3), rank + 1.0))
        param.grad = DTensor.from_local(local, square(), [Shard(0), Shard(1)], run_check=False)
    return scaler.clip_grad_norm_(optimizer, 1e6, order).item()


def partial_grads(
    rank: int, kind: str, name: str, scale: float, value: float, unscale: bool = False
) -> tuple[Report, list[float]]:
    """Replicated parameters whose gradients are still partial sums, `value` on every rank, one step."""
    scaler = new_scaler(kind, init_scale=scale)
    param = dtensor_param(line(), [Replicate()])

    def backward(_step: int) -> None:
        local = scaler.scale(torch.ones(2, 3)) * value
        param.grad = DTensor.from_local(local, line(), [Partial()], run_check=False)

    optimizer = new_optimizer(name, [param])
    report = train(rank, scaler, [optimizer], backward, steps=1, habits=Habits(unscale=unscale))
    return report, local_of(param).flatten().tolist()


def plain_grads(rank: int, kind: str) -> tuple[list[list[float]], list[float]]:
    """A replicated parameter with plain gradients, as an optimizer of one's own may want them; rank 1's is bad once."""
    scaler, param = new_scaler(kind), dtensor_param(line(), [Replicate()])
    optimizer = new_optimizer("sgd", [param])
    flags = []
    for value in (torch.inf if rank else 3.0, 3.0):
        param.grad = scaler.scale(torch.full((2, 3), value))
        scaler.unscale_(optimizer)
        flags.append([flag.item() for flag in scaler._found_inf_per_device(optimizer).values()])
        scaler.update()
    return flags, param.grad.flatten().tolist()


def _under_way(local: Tensor) -> Tensor:
    partial = DTensor.from_local(local, line(), [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()], async_op=True)


def async_shards(rank: int) -> list[str]:
    """What torch holds of a gradient under way, and what an op is handed of it."""
    gradient: Any = _under_way(torch.ones(2, 3))
    return [type(gradient._local_tensor).__name__, type(placement.local_tensor(gradient)).__name__]


def async_grads(rank: int, kind: str, name: str) -> tuple[Report, list[float]]:
    """Gradients whose all-reduce is still under way when the scaler gets them."""
    scaler = new_scaler(kind)
    param = dtensor_param(line(), [Replicate()])

    def backward(_step: int) -> None:
        param.grad = _under_way(scaler.scale(torch.ones(2, 3)))

    optimizer = new_optimizer(name, [param])
    report = train(rank, scaler, [optimizer], backward, steps=1, habits=Habits(unscale=True))
    return report, local_of(param).flatten().tolist()

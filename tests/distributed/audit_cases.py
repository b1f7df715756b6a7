"""What the ranks run in test_audit_ranks: a training or parameters by hand, and what the audit says of it."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import cases
import matrix_cases
import model_cases
import torch
import torch.distributed as dist
from cases import Fault, dtensor_param, local_of, new_optimizer, new_scaler, params_of, plain_param, square
from collective_counter import CollectiveCounter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import scaler_triton
from scaler_triton.placement import DDP_SPEC

PLACEMENTS = {
    "replicated": (Replicate(), Replicate()),
    "hsdp": (Replicate(), Shard(0)),
    "tp": (Shard(0), Replicate()),
    "sharded": (Shard(0), Shard(1)),
    "partial": (Replicate(), Partial()),
}


class Said(NamedTuple):
    """What an audit gave on one rank."""

    text: str
    printed: str
    verdict: str
    differences: tuple[str, ...]
    collectives: int


def said(optimizer: Any, scaler: Any, model: nn.Module | None = None, **options: Any) -> Said:
    """Audit, and see that nothing was changed."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = _held(optimizers, scaler)
    file = io.StringIO()
    with CollectiveCounter() as counter:
        report = scaler_triton.audit(optimizer, scaler, model, file=file, **options)
    assert _held(optimizers, scaler) == before
    return Said(str(report), file.getvalue(), report.verdict, tuple(report.differences), counter.count)


def _held(optimizers: list[Any], scaler: Any) -> list[object]:
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    held = [cases.digest(param) for param in params] + [str(optimizer.state) for optimizer in optimizers]
    lazy = getattr(scaler, "_scale", None), len(getattr(scaler, "_per_optimizer_states", ()))
    return [*held, *lazy, torch.get_rng_state().tolist(), [len(optimizer.state) for optimizer in optimizers]]


def flip(tensor: Tensor, element: int = 0) -> None:
    """Change the last bit of one fp32 element."""
    local_of(tensor.detach()).view(-1).view(torch.int32)[element] ^= 1


def trained(rank: int, whose: str, wrapper: str, kind: str, name: str, faults: list[Fault]) -> Said:
    """Train a wrapped model with torch's class or ours, then audit."""
    make = {"torch": matrix_cases.torch_class, "ours": matrix_cases.our_class}[whose](kind)
    scaler = make(cases.DEVICE, init_scale=cases.INIT_SCALE, growth_interval=cases.GROWTH_INTERVAL)
    model = model_cases.WRAPPERS[wrapper](model_cases.Net(), False)
    optimizer = new_optimizer(name, model.parameters())

    def backward(step: int) -> None:
        x, y = model_cases._batch(step, (rank, dist.get_world_size()))
        scaler.scale(nn.functional.mse_loss(model(x).float(), y)).backward()

    cases.train(rank, scaler, [optimizer], backward, faults)
    return said(optimizer, scaler, model)


def flipped_in(rank: int, wrapper: str, bad: int, *, with_model: bool = True, **options: Any) -> Said:
    """A wrapped model, untrained; one bit of its last parameter is flipped on the bad rank."""
    model = model_cases.WRAPPERS[wrapper](model_cases.Net(), False)
    optimizer = new_optimizer("sgd", model.parameters())
    if rank == bad:
        flip(params_of(optimizer)[-1])
    return said(optimizer, new_scaler("grad"), model if with_model else None, **options)


def flipped_mesh(rank: int, layout: str, bad: int) -> Said:
    """A DTensor on a 2 x 2 mesh that holds the coordinates of its shard; one bit is flipped on the bad rank."""
    placements = PLACEMENTS[layout]
    param = dtensor_param(square(), placements)
    with torch.no_grad():
        for place, at in zip(placements, square().get_coordinate(), strict=True):
            if not place.is_replicate():
                local_of(param).add_(at + 1)
    if rank == bad:
        flip(param, 5)
    return said(new_optimizer("sgd", [param]), new_scaler("grad"))


def on_some_ranks(rank: int, bad: int) -> Said:
    """A DTensor on the first two of four ranks; one bit is flipped on the bad rank."""
    param = _replicated_on_two(torch.ones(2, 3))
    if rank == bad:
        flip(param)
    return said(new_optimizer("sgd", [param, plain_param(2)]), new_scaler("grad"), replicated=True)


def around_a_wrapper(rank: int) -> str:
    """DTensors whose shards are tensors of a class of its own."""
    param = _replicated_on_two(TwoTensor(torch.ones(2, 3), torch.ones(2, 3)))
    optimizer = new_optimizer("sgd", [param])
    return str(scaler_triton.audit(optimizer, new_scaler("grad"), replicated=True, file=io.StringIO()))


def _replicated_on_two(local: Tensor) -> Tensor:
    mesh = cases.mesh((2,), ("pair",), (0, 1))
    return nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))


def own_parameters(rank: int, replicated: bool) -> Said:
    """A parameter of each rank's own, as in a pipeline, and one that is equal."""
    params = [plain_param(3), plain_param(2)]
    params[0].data.fill_(rank)
    return said(new_optimizer("sgd", params), new_scaler("sharded"), replicated=replicated)


def own_shapes(rank: int) -> Said:
    """As many elements everywhere, and in the model's eyes the same name; the shape differs."""
    model = nn.Module()
    model.weight = plain_param(2, 3) if rank else plain_param(3, 2)
    return said(new_optimizer("sgd", model.parameters()), new_scaler("grad"), model, replicated=True)


def ignored_by_ddp(rank: int) -> Said:
    """DDP that leaves one parameter to the ranks."""
    net = model_cases.Net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["norm.weight"])
    model = nn.parallel.DistributedDataParallel(net)
    net.norm.weight.data.fill_(rank)
    return said(new_optimizer("sgd", model.parameters()), new_scaler("grad"), model)


def ddp_of_pairs(rank: int, bad: int, listed: bool) -> Said:
    """DDP over pairs of ranks that differ from each other, as under tensor parallelism."""
    torch.manual_seed(rank % 2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=square()["dp"].get_group())
    if not listed:
        del model._module_parameters  # torch's own name, not promised
    if rank == bad:
        flip(model.module.weight)
    return said(new_optimizer("sgd", model.parameters()), new_scaler("grad"), model)


def ddp_over_tensor_parallel(rank: int, bad: int) -> Said:
    """DDP over layers that tensor parallelism cut, after a step; one bit of a shard is flipped on the bad rank."""
    net, mesh = model_cases.Net(), square()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = nn.parallel.DistributedDataParallel(net, device_mesh=mesh["dp"])
    scaler, optimizer = new_scaler("grad"), new_optimizer("sgd", model.parameters())
    scaler.scale(model(torch.ones(2, model_cases.WIDTH)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    if rank == bad:
        flip(next(param for param in params_of(optimizer) if hasattr(param, DDP_SPEC)))
    return said(optimizer, scaler, model, replicated=True)


def a_rank_raises(rank: int, bad: int, what: str) -> Said:
    """One rank cannot say what it holds."""
    optimizer, scaler = new_optimizer("sgd", [plain_param(3)]), new_scaler("sharded")
    if rank == bad and what == "steps":
        optimizer.state[params_of(optimizer)[0]] = {"step": torch.ones((), device="meta")}
    if rank == bad and what == "scaler":
        scaler = None
    return said(optimizer, scaler)


def disabled_on(rank: int, ranks: list[int]) -> Said:
    """A scaler that is off on some ranks."""
    return said(new_optimizer("sgd", [plain_param(3)]), new_scaler("grad", enabled=rank not in ranks))


def in_group(rank: int) -> Said | str:
    """Only the last two ranks audit; the others are refused."""
    members = [2, 3]
    group = dist.new_group(members)
    optimizer, scaler = new_optimizer("sgd", [plain_param(3)]), new_scaler("grad", init_scale=2.0**rank)
    scaler.scale(torch.ones(()))
    try:
        return said(optimizer, scaler, process_group=group)
    except ValueError as error:
        return str(error)


def lists_of(rank: int, count: int) -> Said:
    """Two optimizers, the second of which stepped more often on one rank; with a third somewhere."""
    optimizers = [new_optimizer(name, [plain_param(2)]) for name in ("adamw", "adam", "sgd")[: count - (rank == 0)]]
    for number, optimizer in enumerate(optimizers):
        for _ in range(2 if rank and number == 1 else 1):
            params_of(optimizer)[0].grad = torch.ones(2)
            optimizer.step()
    return said(optimizers, new_scaler("sharded"))

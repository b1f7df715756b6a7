"""What the ranks run in test_clipping_ranks: one norm over all that they hold, beside the same model in one process."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import cases
import dtensor_cases
import model_cases
import torch
import torch.distributed as dist
from cases import Fault, collectives_of, local_of
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.weak import TensorWeakRef

MAX_NORM = 0.05


class Clipped(NamedTuple):
    """What one rank saw: norms, ours and the reference's; collectives of each clip and step; and where it ended."""

    norms: list[float]
    expected: list[float]
    collectives: list[tuple[int, int]]
    distance: float
    values: list[list[float]]
    scale: float


def laid_out(
    rank: int,
    kind: str,
    layout: str,
    name: str,
    faults: Sequence[Fault],
    gradless: int = -1,
    order: float = 2.0,
    enabled: bool = True,
) -> Clipped:
    """One clipped step over parameters in a named layout; their gradients are known, so the test knows the norm."""
    scaler, params = cases.new_scaler(kind, enabled=enabled), dtensor_cases.LAYOUTS[layout]()
    optimizer = cases.new_optimizer(name, [{"params": [param]} for param in params])
    cases.give_grads(scaler, params, 0, range(len(params)) if rank == gradless else ())
    cases.plant(faults, rank, 0, params)
    norms: list[Tensor] = []
    clip = collectives_of(lambda: norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, order)))
    grads = [local_of(param.grad).flatten().tolist() for param in params if param.grad is not None]
    step = collectives_of(scaler.step, optimizer)
    scaler.update()
    return Clipped([norms[0].item()], [], [(clip, step)], 0.0, grads, scaler.get_scale())


def laid_out_at_random(rank: int, layout: str) -> tuple[float, dict[tuple[int, ...], float]]:
    """The norm of random gradients, and the sum of squares, in fp64, of each piece that this rank holds."""
    scaler, params = cases.new_scaler("grad"), dtensor_cases.LAYOUTS[layout]()
    cases.give_grads(scaler, params, 0)
    squares = {}
    for index, param in enumerate(params):
        piece, gradient = (index, *_place_of(param)), local_of(param.grad)
        draw = torch.Generator().manual_seed(int("".join(map(str, (1, *piece)))))  # copies are equal
        values = cases.drawn(gradient.shape, draw, torch.float64).to(gradient.dtype)
        squares[piece] = values.double().square().sum().item()
        gradient.copy_(values * cases.INIT_SCALE)
    optimizer = cases.new_optimizer("adamw", [{"params": [param]} for param in params])
    return scaler.clip_grad_norm_(optimizer, MAX_NORM).item(), squares


def _place_of(param: Tensor) -> list[int]:
    """Return where this rank stands along the mesh's dims that cut the parameter."""
    if not isinstance(param, DTensor):
        return []
    places = zip(param.device_mesh.get_coordinate(), param.placements, strict=True)
    return [place for place, placement in places if not placement.is_replicate()]


def trained(rank: int, kind: str, wrapper: str, name: str, defer: bool) -> Clipped:
    """A wrapped model clipped by us, and the bare one by torch on the whole batch."""
    net = model_cases.Net()
    bare = copy.deepcopy(net)
    model = model_cases.WRAPPERS[wrapper](net, False)
    part = (rank // 2, 2) if wrapper == "fsdp2-tp" else (rank, dist.get_world_size())
    optimizer, reference = (cases.new_optimizer(name, m.parameters()) for m in (model, bare))
    scaler = cases.new_scaler(kind)
    norms, expected, collectives = [], [], []
    for step in range(4):
        _backward(model, optimizer, part, step, scaler)
        clip = collectives_of(_clip, norms, scaler, optimizer, model, defer)
        collectives.append((clip, collectives_of(scaler.step, optimizer)))
        scaler.update()
        _backward(bare, reference, (0, 1), step, None)
        expected.append(torch.nn.utils.clip_grad_norm_(bare.parameters(), MAX_NORM).item())
        reference.step()
    pairs = zip(model_cases._full_params(model), bare.parameters(), strict=True)
    distance = max(float((full - one).detach().abs().max()) for full, one in pairs)
    return Clipped(norms, expected, collectives, distance, [], scaler.get_scale())


def _clip(norms: list[float], scaler, optimizer: torch.optim.Optimizer, model: torch.nn.Module, defer: bool) -> None:
    norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, model=model, defer=defer).item())


def _backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: tuple[int, int], step: int, scaler):
    optimizer.zero_grad()
    x, y = model_cases._batch(step, part)
    loss = torch.nn.functional.mse_loss(model(x).float(), y)
    (loss if scaler is None else scaler.scale(loss)).backward()


def several(rank: int, kind: str, faults: Sequence[Fault]) -> Clipped:
    """Two optimizers over two meshes under one norm; rank 1's second one has no gradients."""
    scaler = cases.new_scaler(kind)
    params = dtensor_cases.LAYOUTS["fsdp-then-tp"]()
    optimizers = [cases.new_optimizer("adamw", [params[0]]), cases.new_optimizer("adamw-fused", [params[1]])]
    cases.give_grads(scaler, params, 0)
    cases.plant(faults, rank, 0, params)
    norms: list[Tensor] = []
    clip = collectives_of(lambda: norms.append(scaler.clip_grad_norm_(optimizers, MAX_NORM)))
    before = [local_of(param.detach()).clone() for param in params]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    stepped = [float(not torch.equal(old, local_of(p.detach()))) for old, p in zip(before, params, strict=True)]
    return Clipped([norms[0].item()], [], [(clip, 0)], 0.0, [stepped], scaler.get_scale())


def partial(rank: int, kind: str) -> Clipped:
    """A replicated parameter whose gradient is a sum over the ranks, yet to be taken."""
    scaler = cases.new_scaler(kind)
    param = cases.dtensor_param(cases.line(), [Replicate()])
    local = scaler.scale(torch.ones(2, 3)) * (rank + 1)
    param.grad = DTensor.from_local(local, cases.line(), [Partial()], run_check=False)
    norm = scaler.clip_grad_norm_(cases.new_optimizer("sgd", [param]), 1e6)
    return Clipped([norm.item()], [], [], 0.0, [local_of(param.grad).flatten().tolist()], scaler.get_scale())


def placed_otherwise(rank: int, kind: str, own: Placement, others: Sequence[Placement], order: float) -> Clipped:
    """A parameter whose gradients backward places one way, then another; unscaled they are 0 to 23."""
    mesh, whole = cases.line(), torch.arange(24.0).view(8, 3)
    scaler, param = cases.new_scaler(kind), torch.nn.Parameter(distribute_tensor(torch.ones(8, 3), mesh, [own]))
    optimizer, norms = cases.new_optimizer("sgd", [param]), []
    for placement in others:
        scaled = scaler.scale(whole)
        if placement.is_partial():
            param.grad = DTensor.from_local(scaled / dist.get_world_size(), mesh, [placement], run_check=False)
        else:
            param.grad = distribute_tensor(scaled, mesh, [placement])
        norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, order).item())
        scaler.step(optimizer)
        scaler.update()
    return Clipped(norms, [], [], 0.0, [param.grad.full_tensor().flatten().tolist()], scaler.get_scale())


def disabled_on_uneven_shards(rank: int, size: int, order: float) -> tuple[str, float]:
    """A disabled scaler's norm of 1 to `size`, sharded over the ranks: of which type, and what."""
    mesh = cases.line()
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(size), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.arange(1.0, size + 1), mesh, [Shard(0)])
    scaler = cases.new_scaler("grad", enabled=False)
    norm = scaler.clip_grad_norm_(cases.new_optimizer("sgd", [param]), 1e9, order)
    return type(norm).__name__, norm.item()


def stages(rank: int, kind: str, enabled: bool, order: float) -> float:
    """The norm of a parameter of rank + 1 that no other rank has, and that tells of none."""
    scaler, param = cases.new_scaler(kind, enabled=enabled), cases.plain_param(1)
    param.grad = scaler.scale(torch.full_like(param, rank + 1.0))
    return scaler.clip_grad_norm_(cases.new_optimizer("sgd", [param]), 1e9, order).item()


def plain_beside_placed(rank: int, kind: str) -> list[float]:
    """Norms of a replicated parameter's gradient, all ones: cut, the local tensor alone, and cut as before."""
    mesh, scaler = cases.line(), cases.new_scaler(kind)
    param = cases.dtensor_param(mesh, [Replicate()])
    cut = DTensor.from_local(torch.empty(1, 3), mesh, [Shard(0)], run_check=False)
    optimizer, norms = cases.new_optimizer("sgd", [param]), []
    for gradient in (cut, torch.empty(2, 3), cut):
        local_of(gradient).fill_(scaler.scale(torch.ones(())).item())
        param.grad = gradient
        norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM).item())
        scaler.update()
    return norms


def fsdp1_with_a_plain_scaler(rank: int, sharding: str) -> tuple[str, float]:
    """An FSDP1 model clipped by a `GradScaler`, which knows no group: what it says, or the norm."""
    model = model_cases.WRAPPERS[sharding](model_cases.Net(), False)
    scaler, optimizer = cases.new_scaler("grad"), cases.new_optimizer("sgd", model.parameters())
    _backward(model, optimizer, (0, 1), 0, scaler)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GradScaler cannot tell which ranks", category=UserWarning)
        try:
            return "", scaler.clip_grad_norm_(optimizer, 1.0, model=model).item()
        except ValueError as error:
            return str(error), 0.0


def fsdp1_and_no_scaling(rank: int, kind: str, enabled: bool, norm_type: float) -> tuple[float, str]:
    """FSDP1 inside of a plain module, the scaler on or off: the norm, and what `error_if_nonfinite` says of an inf."""
    model = nn.Sequential(model_cases.WRAPPERS["fsdp1-full"](model_cases.Net(), False))
    scaler, optimizer = cases.new_scaler(kind, enabled=enabled), cases.new_optimizer("sgd", model.parameters())
    _backward(model, optimizer, (0, 1), 0, scaler)
    norm = scaler.clip_grad_norm_(optimizer, 1e9, norm_type, model=model).item()
    scaler = cases.new_scaler(kind, enabled=enabled)
    _backward(model, optimizer, (0, 1), 0, scaler)
    if rank == 1:
        next(p.grad for p in model.parameters() if p.grad is not None and p.numel()).view(-1)[0] = math.inf
    try:
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type, True, model=model)
    except RuntimeError as error:
        return norm, str(error)
    return norm, ""


def one_rank_looks_again(rank: int) -> list[list[float]]:
    """A sharded and a plain parameter are clipped together; one rank looks at the plain one before its step."""
    scaler = cases.new_scaler("grad")
    params = [cases.dtensor_param(cases.line(), [Shard(0)]), cases.plain_param(3)]
    optimizers = [cases.new_optimizer("sgd", [param]) for param in params]
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        local_of(params[0].grad).fill_(math.inf)
    scaler.clip_grad_norm_(optimizers, 1.0)
    if rank == 0:
        scaler._check_inf_per_device(optimizers[1])
    before = params[1].tolist()
    scaler.step(optimizers[1])
    return [before, params[1].tolist()]


def several_and_then_one(rank: int) -> list[bool]:
    """Two optimizers clipped together; the second one goes: whether its parameter and gradient stay."""
    scaler, params = cases.new_scaler("sharded"), [cases.plain_param(3), cases.plain_param(2)]
    optimizers = [cases.new_optimizer("sgd", [param]) for param in params]
    cases.give_grads(scaler, params, 0)
    scaler.clip_grad_norm_(optimizers, 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    last = [weakref.ref(params[1]), TensorWeakRef(params[1].grad)]
    del params[1], optimizers[1], optimizer
    gc.collect()
    cases.give_grads(scaler, params, 1)
    scaler.step(optimizers[0])
    scaler.update()
    return [each() is not None for each in last]


def kept_after_an_error(rank: int, order: float) -> list[bool]:
    """Rank 1's gradient cannot be unscaled: do gradients outlive the error, garbage not collected."""
    scaler, params = cases.new_scaler("sharded"), [cases.plain_param(3), cases.plain_param(2)]
    optimizer = cases.new_optimizer("sgd", params)
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        params[1].grad = torch.ones(()).expand(2)
    gradients = [TensorWeakRef(param.grad) for param in params]
    gc.disable()
    try:
        with suppress(RuntimeError):
            scaler.clip_grad_norm_(optimizer, 1.0, order)
        with suppress(RuntimeError):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [each() is not None for each in gradients]
    finally:
        gc.enable()


def fsdp1_over_tensor_parallel(rank: int, orig: bool) -> tuple[list[float], list[float], str]:
    """FSDP1 over layers that tensor parallelism cut: norms beside those of one process, and what is refused."""
    net, tp = model_cases.Net(), cases.square()["tp"]
    bare = copy.deepcopy(net)
    parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = FullyShardedDataParallel(
        net, device_mesh=cases.square()["dp"], use_orig_params=orig, device_id=cases.this_device()
    )
    scaler, optimizer = cases.new_scaler("sharded"), cases.new_optimizer("sgd", model.parameters())
    norms, expected = [], []
    for step, order in enumerate((2.0, 1.0, 3.0, math.inf)):
        _backward(model, optimizer, (rank // 2, 2), step, scaler)
        _backward(bare, cases.new_optimizer("sgd", bare.parameters()), (0, 1), step, None)
        try:
            norms.append(scaler.clip_grad_norm_(optimizer, 1e6, order, model=model).item())
        except ValueError as error:
            return [], [], str(error)
        expected.append(torch.nn.utils.clip_grad_norm_(bare.parameters(), 1e6, order).item())
        scaler.update()
    return norms, expected, ""


def ddp_over_tensor_parallel(rank: int, kind: str) -> tuple[list[float], list[float], bool]:
    """DDP over layers that tensor parallelism cut: norms beside those of one process, and if a shard's inf skips."""
    net, mesh = model_cases.Net(), cases.square()
    bare = copy.deepcopy(net)
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = nn.parallel.DistributedDataParallel(net, device_mesh=mesh["dp"])  # takes the shards for parameters
    scaler, optimizer = cases.new_scaler(kind), cases.new_optimizer("sgd", model.parameters())
    norms, expected = [], []
    for step, order in enumerate((2.0, 1.0, 3.0, math.inf)):
        _backward(model, optimizer, (rank // 2, 2), step, scaler)
        _backward(bare, cases.new_optimizer("sgd", bare.parameters()), (0, 1), step, None)
        norms.append(scaler.clip_grad_norm_(optimizer, 1e6, order).item())
        expected.append(torch.nn.utils.clip_grad_norm_(bare.parameters(), 1e6, order).item())
        scaler.update()
    _backward(model, optimizer, (rank // 2, 2), 0, scaler)
    if mesh.get_local_rank("tp") == 1:
        next(p.grad for p in cases.params_of(optimizer) if p.shape == (model_cases.WIDTH,) * 2).fill_(math.inf)
    scaler.step(optimizer)
    return norms, expected, scaler.was_skipped(optimizer)


def fsdp1_without_model(rank: int, *, inner: bool = False) -> str:
    """An FSDP1 model's optimizer clipped, once well, then without telling the model or by what the model wraps."""
    model = model_cases.WRAPPERS["fsdp1-full"](model_cases.Net(), False)
    scaler = cases.new_scaler("sharded")
    optimizer = cases.new_optimizer("sgd", model.parameters())
    _backward(model, optimizer, (0, 1), 0, scaler)
    scaler.clip_grad_norm_(optimizer, 1.0, model=model)
    scaler.step(optimizer)
    scaler.update()
    _backward(model, optimizer, (0, 1), 1, scaler)
    try:
        scaler.clip_grad_norm_(optimizer, 1.0, model=model.module if inner else None)
    except ValueError as error:
        return str(error)
    return ""

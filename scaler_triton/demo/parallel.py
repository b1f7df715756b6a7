"""The four ways to spread a model over ranks, and the way back to whole parameters."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scaler_triton.demo.model import Block, CharTransformer


def spread(model: CharTransformer, mode: str, ranks: int) -> nn.Module:
    """Return the model as the mode trains it; FSDP shards each block and the rest.

    Args:
        model: whole, on this rank's device, with the same values on every rank.
        mode: "single", "ddp", "fsdp1" or "fsdp2".
        ranks: processes in the default group.
    """
    device = next(model.parameters()).device
    if mode == "ddp":
        return DistributedDataParallel(model)
    if mode == "fsdp1":
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    if mode == "fsdp2":
        mesh = _mesh(device.type, ranks)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _mesh(device_type: str, ranks: int) -> DeviceMesh:
    # Where there is a GPU torch 2.11 makes a group for the mesh that takes NCCL, which refuses two ranks on one GPU.
    backend: dict[int | str, Any] | None = {0: "gloo"} if dist.get_backend() == "gloo" else None
    return init_device_mesh(device_type, (ranks,), backend_override=backend)


def whole_parameters(model: nn.Module) -> Tensor:
    """Return all parameters of a spread model, gathered, as one fp32 vector on the CPU. A collective call."""
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model) if is_fsdp1 else nullcontext():
        return torch.cat([_whole(p).detach().flatten().cpu() for p in model.parameters()])


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    if "gloo" in dist.get_backend():
        parameter = _on_host(parameter)  # this collective has gloo read a GPU's memory as if it were the host's
    return parameter.full_tensor()


def _on_host(sharded: DTensor) -> DTensor:
    mesh = init_device_mesh("cpu", sharded.device_mesh.shape)
    local, shape, stride = sharded.to_local().cpu(), sharded.shape, sharded.stride()
    return DTensor.from_local(local, mesh, sharded.placements, run_check=False, shape=shape, stride=stride)

"""Parameters of a rank: plain, FSDP1's and on meshes."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate


def on(mesh: Any) -> Any:
    """Return a parameter that is replicated on a mesh."""
    return nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()] * mesh.ndim, run_check=False))


def mesh_of(*shape: int, ranks: Any = None) -> Any:
    if ranks is not None:
        return DeviceMesh("cpu", ranks)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def plain() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def fsdp1() -> Any:
    parameter: Any = plain()
    parameter._fsdp_flattened = True
    return parameter

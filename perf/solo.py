"""A process group of one rank: what DTensors need, at no other rank's cost."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perf.grads import Wrap


@contextmanager
def one_rank(device: str) -> Iterator[DeviceMesh]:
    """Join a group of this process alone and give its mesh on `device`.

    On a GPU gloo serves the CPU's tensors and NCCL the GPU's; rank 0 has GPU 0.
    """
    # A machine without a network has nothing else.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]
    variables = {variable: name for name in loopback for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {**variables, **os.environ}):
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh(device, (1,))
        finally:
            dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> Wrap:
    """Return what makes local tensors DTensors sharded over `mesh`; as in FSDP2 a gradient keeps its spec."""
    from torch.distributed.tensor import DTensor, Shard

    def wrap(local: Tensor, like: Any) -> Tensor:
        if like is None:
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return DTensor(local, like._spec, requires_grad=False)

    return wrap

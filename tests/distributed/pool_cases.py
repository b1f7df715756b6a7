"""What ranks do in the tests of the pool itself: fail, hang, die, fall out of step. Imported by the ranks."""

import os
import sys
import time

import torch
import torch.distributed as dist
from cases import DEVICE
from collective_counter import CollectiveCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def describe(rank: int) -> dict[str, object]:
    """Say who and where this rank is."""
    return {
        "rank": rank,
        "pid": os.getpid(),
        "group": (dist.get_rank(), dist.get_world_size()),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "pytest": "pytest" in sys.modules,
        "random": torch.rand(2).tolist(),
    }


def raise_on(rank: int, bad_rank: int) -> int:
    """Raise on one rank, return on the others."""
    if rank == bad_rank:
        raise KeyError("lost")
    return rank


def hang_on(rank: int, bad_rank: int) -> None:
    """Leave one rank out of a collective, so that the others wait for it."""
    if rank == bad_rank:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def sleep(rank: int) -> None:
    """Answer nobody for a while."""
    time.sleep(60)


def die_on(rank: int, bad_rank: int) -> None:
    """End one rank's process while the others wait for it."""
    if rank == bad_rank:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def leave_open(rank: int, bad_rank: int) -> int:
    """Start a collective on one rank only and return everywhere."""
    if rank == bad_rank:
        dist.all_reduce(torch.ones(1), async_op=True)
    return rank


def unpicklable(rank: int) -> object:
    """Return what cannot travel."""
    return lambda: rank


def sum_of_ranks(rank: int) -> float:
    """A collective over everybody."""
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def count_kinds(rank: int) -> tuple[list[str], list[str], list[str]]:
    """Count a plain, an in-DTensor (functional), and no collective."""
    with CollectiveCounter() as plain:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with CollectiveCounter() as functional:
        sharded.sum().full_tensor()
    with CollectiveCounter() as none:
        torch.ones(3).sum()
        sharded.to_local().sum()
    return plain.calls, functional.calls, none.calls

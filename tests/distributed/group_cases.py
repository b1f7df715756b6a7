"""What the ranks run with process groups: given, wrong, copied, replaced, or looked up anew."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import cases
import dtensor_cases
import torch
import torch.distributed as dist
from cases import Fault, Report
from failure_cases import Attempt, attempt
from torch.distributed.tensor import Shard


@functools.cache
def _pair(rank: int) -> dist.ProcessGroup:
    """The group of ranks 0 and 1, or of 2 and 3: the one this rank is in."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


@functools.cache
def _first_only() -> Any:
    """The group of rank 0 alone, as every rank gets it."""
    return dist.new_group([0])


def group_without_me(rank: int, kind: str, name: str, method: str) -> Attempt:
    """A process group that only rank 0 is in."""
    scaler = cases.new_scaler(kind, process_group=_first_only())
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer(name, params)
    cases.give_grads(scaler, params, 0)
    return attempt(scaler, method, optimizer)


def no_group(rank: int, kind: str, name: str, method: str, mesh: bool) -> Attempt:
    """What is easily taken for a process group: a mesh, or a list of ranks."""
    scaler = cases.new_scaler(kind, process_group=cases.line() if mesh else [0, 1])
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer(name, params)
    cases.give_grads(scaler, params, 0)
    return attempt(scaler, method, optimizer)


def group_too_small(rank: int, kind: str, name: str, layout: str, method: str) -> Attempt:
    """A process group of two ranks for DTensors that live on four."""
    scaler = cases.new_scaler(kind, process_group=_pair(rank))
    params = dtensor_cases.LAYOUTS[layout]()
    optimizer = cases.new_optimizer(name, params)
    cases.give_grads(scaler, params, 0)
    return attempt(scaler, method, optimizer)


def roots_over_different_ranks(rank: int, kind: str, name: str, method: str) -> Attempt:
    """Parameters on two meshes of two ranks, this one's row and column: neither tells who must agree."""
    rows = [cases.mesh((2,), ("row",), order) for order in ((0, 1), (2, 3))]
    columns = [cases.mesh((2,), ("column",), order) for order in ((0, 2), (1, 3))]
    params = [cases.dtensor_param(on, [Shard(0)]) for on in (rows[rank // 2], columns[rank % 2])]
    scaler = cases.new_scaler(kind)
    optimizer = cases.new_optimizer(name, params)
    cases.give_grads(scaler, params, 0)
    return attempt(scaler, method, optimizer)


def agree_in_pairs(rank: int, kind: str, name: str, faults: Sequence[Fault], copied: str = "") -> tuple[Report, bool]:
    """Ranks agree within pairs only, with a scaler or a copy of it; whether the copy has the very same group."""
    scaler = cases.new_scaler(kind, process_group=_pair(rank))
    if copied == "deepcopy":
        scaler = copy.deepcopy(scaler)
    if copied == "pickle":
        scaler = pickle.loads(pickle.dumps(scaler))
        scaler.process_group = _pair(rank)
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer(name, params)
    backward = cases.giving(scaler, params)
    return cases.train(rank, scaler, [optimizer], backward, faults), scaler.process_group is _pair(rank)


def unlisted(rank: int, made: str, store: str, kind: str, name: str, faults: Sequence[Fault]) -> tuple[Report, str]:
    """Ranks agree over a group that was made without `init_process_group` or `new_group`; the report of all."""
    group: Any = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2)
    if made == "group":
        backend, group = group, dist.ProcessGroup(dist.FileStore(store, 2), rank, 2)
        group._register_backend(torch.device(cases.DEVICE), dist.ProcessGroup.BackendType.GLOO, backend)
    if made == "registered":
        group = Managed(group, rank).registered()
    scaler, params = cases.new_scaler(kind, process_group=group), [cases.plain_param(3)]
    optimizer = cases.new_optimizer(name, params)
    report = cases.train(rank, scaler, [optimizer], cases.giving(scaler, params), faults)
    return report, str(scaler.overflow_report(gather=True))


class Managed(dist.ProcessGroup):
    """A group of processes that torch does not count, but for this one."""

    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(rank, 2)
        self._inner = inner

    def size(self) -> int:
        """All of them."""
        return 2

    def allreduce(self, tensors: Any, options: Any) -> Any:
        """Of all of them."""
        return self._inner.allreduce(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        """Of all of them."""
        return self._inner.allgather(outputs, inputs, options)

    def registered(self) -> Any:
        """As torchft's `ManagedProcessGroup.register` does it."""
        name = f"managed{len(dist.Backend.backend_list)}"
        dist.Backend.register_backend(name, lambda *args: self, devices=[cases.DEVICE])
        return dist.new_group([dist.get_rank()], backend=name, use_local_synchronization=True)


def deepcopied_in_mid_run(rank: int, kind: str) -> tuple[bool, list[float]]:
    """Copy a scaler that has run; whether the group is shared, and both scales after only the copy backs off."""
    scaler = cases.new_scaler(kind, process_group=_pair(rank))
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer("sgd", params)
    cases.train(rank, scaler, [optimizer], cases.giving(scaler, params), steps=1)
    clone = copy.deepcopy(scaler)
    backward = cases.giving(clone, params)
    cases.train(rank, clone, [optimizer], backward, [Fault(0, 0), Fault(0, 2)], steps=1)
    return clone.process_group is scaler.process_group, [scaler.get_scale(), clone.get_scale()]


def unpickled(rank: int, kind: str, method: str) -> Attempt:
    """Use a scaler whose explicit group was lost when it was pickled."""
    scaler = pickle.loads(pickle.dumps(cases.new_scaler(kind, process_group=_pair(rank))))
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer("sgd", params)
    cases.give_grads(scaler, params, 0)
    return attempt(scaler, method, optimizer)


def pickled_too_late(rank: int, kind: str) -> tuple[Any, str | None]:
    """Pickle a scaler whose group has been destroyed; what it keeps of it, and what a step of the copy raises."""
    scaler = cases.new_scaler(kind, process_group=dist.new_group())
    dist.barrier(scaler.process_group)  # The other rank may still be connecting.
    dist.destroy_process_group(scaler.process_group)
    copied = pickle.loads(pickle.dumps(scaler))
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer("sgd", params)
    cases.give_grads(copied, params, 0)
    return copied.process_group, attempt(copied, "step", optimizer).error


def unpickled_default(rank: int, kind: str, explicit: bool, faults: Sequence[Fault]) -> Report:
    """A pickled scaler with the default group, named or not, is a scaler with the default group."""
    group = {"process_group": dist.group.WORLD} if explicit else {}
    scaler = pickle.loads(pickle.dumps(cases.new_scaler(kind, **group)))
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer("adamw-fused", params)
    return cases.train(rank, scaler, [optimizer], cases.giving(scaler, params), faults)


def another_group_later(rank: int, kind: str, optimizers: int, how: str) -> list[tuple[list[bool], float]]:
    """Two steps in which rank 0 overflows, the second with a group of two ranks: who skipped, and the scale."""
    scaler = cases.new_scaler(kind, process_group=dist.group.WORLD)
    params = [cases.plain_param(3) for _ in range(optimizers)]
    each = [cases.new_optimizer("sgd", [param]) for param in params]
    calls = {
        "unscaled": lambda: [scaler.unscale_(optimizer) for optimizer in each],
        "clipped": lambda: scaler.clip_grad_norm_(each, 1.0),
    }
    ends = []
    for step in range(2):
        cases.give_grads(scaler, params, step)
        cases.plant([Fault(step, 0)], rank, step, params)
        calls[how]()
        for optimizer in each:
            scaler.step(optimizer)
        scaler.update()
        ends.append(([scaler.was_skipped(optimizer) for optimizer in each], scaler.get_scale()))
        scaler.process_group = _pair(rank)
    return ends


def reborn_group(rank: int, store: str, kind: str, name: str) -> list[Report]:
    """Train, destroy the default group, make another, and go on with the same scaler and optimizer."""
    scaler, params = cases.new_scaler(kind), [cases.plain_param(3)]
    optimizer = cases.new_optimizer(name, params)
    backward = cases.giving(scaler, params)
    reports = [cases.train(rank, scaler, [optimizer], backward, steps=2)]
    _renew_default_group(rank, store)
    reports.append(cases.train(rank, scaler, [optimizer], backward, [Fault(0, 1)], steps=2))
    return reports


def _renew_default_group(rank: int, store: str) -> None:
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    for cached in (cases.mesh, _pair, _first_only):
        cached.cache_clear()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

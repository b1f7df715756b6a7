"""Finds the ranks that must agree on a step, from process groups and parameters, never from gradients.

It also runs their collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaler_triton.core.gradients import dtensor_spec, is_fsdp1
from scaler_triton.core.meeting import meet
from scaler_triton.core.warning import warn_once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Whether a GradScaler that finds FSDP1 parameters raises instead of warning: set by `patch_torch(strict=True)`.
strict = False

_AVAILABLE = dist.is_available()  # in this build of torch
_LENGTH, _AT_ONCE = 8, 1 << 14  # bytes of a message's length, and of all that the first all-gather carries
_NO_GROUP = "For one process use scaler_triton.GradScaler; for several call init_process_group before the first step."
_ON_FSDP1 = (
    "GradScaler cannot tell which ranks share FullyShardedDataParallel's parameters, so ranks may disagree on "
    "skipping a step. Use scaler_triton.ShardedGradScaler, or pass process_group=."
)
_APART = (
    "GradScaler's optimizers are on meshes over different ranks, here {} and {}: an overflow in one of them may leave "
    "ranks with different scales. Use scaler_triton.ShardedGradScaler, or pass process_group=."
)


@dataclass(frozen=True)
class Ranks:
    """The ranks, this one included, on which one optimizer's flag must be equal: its `peers`."""

    groups: tuple[ProcessGroup, ...]  # theirs, or one for each dimension of a mesh, reduced over one by one
    ranks: tuple[int, ...]  # global ones in ascending order; for a bare group its own numbers

    def reduce_(self, values: Tensor, op: str) -> None:
        """Replace `values` (fp32 or fp64, shape (n,), any device) by their elementwise MAX or SUM over the ranks."""
        for group in self.groups:
            carrier = values.to(_serving_device(group, values.device))  # `values` itself where that is its device
            dist.all_reduce(carrier, op=getattr(dist.ReduceOp, op), group=group)
            if carrier is not values:
                values.copy_(carrier)


def ranks_of_meshes(parameters: Sequence[Tensor], warned: set[str]) -> Ranks | None:
    """Return the ranks of the parameters' meshes, None if no other rank must agree; warn of FSDP1 without a group."""
    if several_ranks() and any(map(is_fsdp1, parameters)):
        if strict:
            raise RuntimeError(_ON_FSDP1)
        warn_once(warned, "ST11", _ON_FSDP1)
    return mesh_ranks(parameters)


def warn_if_apart(warned: set[str], mine: Ranks | None, others: Iterable[Ranks | None]) -> None:
    """Warn once if another optimizer's flag is reduced over other ranks: all optimizers share one scale."""
    for theirs in others:
        if mine is not None and theirs is not None and theirs.ranks != mine.ranks:
            warn_once(warned, "ST12", _APART.format(list(theirs.ranks), list(mine.ranks)))


def group_ranks(parameters: Iterable[Tensor], process_group: Any) -> Ranks | None:
    """Return all ranks of `process_group`, by default of the default group; None for a group of one rank."""
    group = checked_group(process_group)
    if is_bare(group):
        return _together((group,), range(group.size()))
    members = sorted(dist.get_process_group_ranks(group))
    for mesh in _meshes(parameters):
        missing = sorted(set(_ranks_of(mesh)) - set(members))
        if missing:
            raise ValueError(
                f"process_group must contain every rank of {mesh}, which shards a parameter, "
                f"got a group of ranks {members} without {missing}"
            )
    return _together((group,), members)


def mesh_ranks(parameters: Iterable[Tensor]) -> Ranks | None:
    """Return the ranks of the parameters' meshes; None without DTensors.

    For a single 1-D mesh these are its ranks. Otherwise they are all ranks of the root mesh, or of the root mesh that
    contains all others, as only then every rank finds the same set. They reduce over the default group if they are the
    whole world, else over the root's groups, one for each dimension. No group is created here, as not all ranks would
    join: it could hang, and the names that torch gives to groups could differ between ranks.
    """
    meshes = _meshes(parameters)
    if not meshes:
        return None
    world = range(dist.get_world_size())
    root = meshes[0] if len(meshes) == 1 and meshes[0].ndim == 1 else _common_root(meshes)
    if root is None or (root.ndim > 1 and root.size() == len(world)):
        return _together((dist.group.WORLD,), world)
    members = _ranks_of(root)
    if dist.get_rank() not in members:
        raise ValueError(f"process_group must contain this rank, {dist.get_rank()}, got parameters on {root}")
    return _together(tuple(root.get_group(dim) for dim in range(root.ndim) if root.size(dim) > 1), members)


def _together(groups: tuple[Any, ...], members: Sequence[int]) -> Ranks | None:
    return Ranks(groups, tuple(members)) if len(members) > 1 else None


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    specs = map(dtensor_spec, parameters)
    return list(dict.fromkeys(spec.device_mesh for spec in specs if spec is not None))


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _common_root(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """Return the root mesh that contains all root meshes; None, for the whole world, where torch does not tell one."""
    if not all(hasattr(mesh, "_get_root_mesh") for mesh in meshes):
        return None
    roots = [mesh._get_root_mesh() for mesh in meshes]
    ranks = {_ranks_of(root) for root in roots}
    widest = [root for root in roots if set().union(*ranks) <= set(_ranks_of(root))]
    if not widest:
        raise ValueError(
            f"process_group is needed: the parameters' meshes span different ranks {sorted(map(list, ranks))}, "
            "so which ranks must agree cannot be told from one of them"
        )
    return min(widest, key=lambda root: root.ndim)  # fewest reductions


def default_group() -> ProcessGroup | None:
    """Return the current default process group, None before `init_process_group`."""
    return dist.group.WORLD if _AVAILABLE else None


def is_in_a_group(process_group: Any) -> bool:
    """Return whether there is a group: this one, or the default group."""
    return process_group is not None or default_group() is not None


def several_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    return default_group() is not None and dist.get_world_size() > 1


def is_bare(group: Any) -> bool:
    """Return whether torch does not know a group's ranks, as of a bare backend, torchft's groups or a destroyed one."""
    if not isinstance(group, dist.ProcessGroup):
        return hasattr(group, "allreduce")
    try:
        dist.get_rank(group)  # quicker than listing its ranks
    except ValueError:
        return True
    # torchft's `register` lists this rank alone for a group that spans processes which torch does not know.
    return type(group) is not dist.ProcessGroup and len(dist.get_process_group_ranks(group)) == 1 < group.size()


def own_rank(process_group: Any) -> int:
    """Return this process's global rank; without a default group its rank in a bare group, else 0."""
    if default_group() is not None:
        return dist.get_rank()
    return int(process_group.rank()) if is_bare(process_group) else 0


def checked_group(process_group: Any) -> Any:
    """Return a scaler's process group, the default one for None; raise if it is unusable. A bare one is not checked."""
    if is_bare(process_group):
        return process_group
    try:
        rank = dist.get_rank()
    except ValueError as error:  # torch's, without a default group
        if process_group is None:
            error.add_note(_NO_GROUP)
        raise
    group: Any = default_group() if process_group is None else process_group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"process_group must contain this rank, {rank}, got a group made for other ranks")
    if not isinstance(group, dist.ProcessGroup):  # such as a DeviceMesh, or a list of ranks
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return group


def gathering_group(process_group: Any) -> Any:
    """Return the `checked_group` to gather over, None for a process without a group."""
    return checked_group(process_group) if is_in_a_group(process_group) else None


def gather_bytes(call: str, data: bytes, group: Any, home: torch.device) -> list[bytes]:
    """Return the data of every rank, by one all-gather, or two if a rank has over 16 KB; a bare group serves `home`.

    It begins when all ranks have come to `call`, by name; a bare group has no store to find that out.

    Raises: TimeoutError on the ranks that came, if not all did.
    """
    store = _store_of(group)
    if store is not None:
        # Groups that were split from one may share their store's names.
        members = hashlib.sha256(repr(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
        store = dist.PrefixStore(f"scaler_triton/{call}/{members}/", store)  # type: ignore[attr-defined]
        meet(store, dist.get_world_size(group), call)
    if not is_bare(group):
        served = _serving_device(group, torch.device("cpu"))
        # The current device may be another rank's.
        home = home if home.type == served.type and home.index is not None else served
    message = len(data).to_bytes(_LENGTH, "little") + data
    gathered = _all_gather(message[:_AT_ONCE], _AT_ONCE, group, home)
    ends = [_LENGTH + int.from_bytes(each[:_LENGTH], "little") for each in gathered]
    if max(ends) > _AT_ONCE:
        rests = _all_gather(message[_AT_ONCE:], max(ends) - _AT_ONCE, group, home)
        gathered = [begin + rest for begin, rest in zip(gathered, rests, strict=True)]
    return [each[_LENGTH:end] for each, end in zip(gathered, ends, strict=True)]


def _store_of(group: Any) -> Any:
    """Return the store of a group's ranks, None where it has none or torch does not tell it."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if find is None or is_bare(group) or dist.get_backend(group) in ("fake", "mpi"):  # these need no store
        return None
    return find(group)


def _all_gather(data: bytes, size: int, group: Any, home: torch.device) -> list[bytes]:
    """Return the data of every rank, padded to `size` bytes."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(home)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def _serving_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return `device` if the group's backend reduces there, else one where it does."""
    if is_bare(group):
        return device
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    served = [entry.split(":")[0] for entry in config.split(",")]
    bound = getattr(group, "bound_device_id", None)  # of init_process_group: the only device of its type that it serves
    if bound is not None and bound.type in served and (device.type == bound.type or device.type not in served):
        return torch.device(bound)
    if device.type in served:
        return device
    for kind in served if "cpu" not in served else ():
        if torch.get_device_module(kind).is_available():
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")

"""Which ranks must agree that a step is skipped, and the reduction that makes them agree."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaler_triton.placement import is_fsdp1, placing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_AVAILABLE = dist.is_available()  # in this build of torch
# What a rank has to tell goes in one all-gather, behind its length, up to so many bytes.
_LENGTH, _AT_ONCE = 8, 1 << 14


@dataclass(frozen=True)
class GroupRanks:
    """Stands where a scaler's process group was before it was pickled: groups do not outlive their process."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """The ranks one optimizer's flag must be equal on.

    Args:
        groups: their process group; or several that reach all of them one after the other, as those of a mesh's
            dimensions do.
        ranks: theirs, in ascending order; in a bare group its own ones.
    """

    groups: tuple[ProcessGroup, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def maximum_(self, signals: Tensor) -> None:
        """Replace `signals` by their elementwise maximum over the ranks: an all-reduce a group, no host wait.

        Args:
            signals: fp32 or fp64, shape (n,), any device; written. It travels on a device the group's backend serves.
        """
        self._reduce_(signals, dist.ReduceOp.MAX)

    def sum_(self, totals: Tensor) -> None:
        """Replace `totals` (fp64, shape (n,), any device) by their sums over the ranks, as `maximum_` does."""
        self._reduce_(totals, dist.ReduceOp.SUM)

    def _reduce_(self, values: Tensor, op: Any) -> None:
        for group in self.groups:
            device = _serving_device(group, values.device)
            if device == values.device:
                dist.all_reduce(values, op=op, group=group)
            else:
                carrier = values.to(device)
                dist.all_reduce(carrier, op=op, group=group)
                values.copy_(carrier)


def default_group() -> ProcessGroup | None:
    """Return the default process group of this moment, None before `init_process_group`."""
    return dist.group.WORLD if _AVAILABLE else None


def gather_bytes(data: bytes, group: Any) -> list[bytes]:
    """Return what every rank of `group` passed, in one all-gather; in two where one of them passed much."""
    begin, rest = data[:_AT_ONCE], data[_AT_ONCE:]
    told = _all_gather(len(data).to_bytes(_LENGTH, "little") + begin, _LENGTH + _AT_ONCE, group)
    lengths = [int.from_bytes(each[:_LENGTH], "little") for each in told]
    whole = [each[_LENGTH:] for each in told]
    longest = max(lengths)
    if longest > _AT_ONCE:
        whole = [*map(operator.add, whole, _all_gather(rest, longest - _AT_ONCE, group))]
    return [each[:length] for each, length in zip(whole, lengths, strict=True)]


def _all_gather(data: bytes, size: int, group: Any) -> list[bytes]:
    """Return what every rank passed, filled up to `size` bytes."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    mine = mine.to(_serving_device(group, mine.device))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def is_bare(group: Any) -> bool:
    """Tell whether a group reduces without torch knowing its ranks: a backend by itself, or a test's stand-in."""
    return hasattr(group, "allreduce") and not isinstance(group, dist.ProcessGroup)


def own_rank(process_group: Any) -> int:
    """Return this process's rank: the global one, without a default group that in a bare group, 0 without either."""
    if default_group() is not None:
        return dist.get_rank()
    return int(process_group.rank()) if is_bare(process_group) else 0


def checked_group(process_group: Any) -> Any:
    """Return a scaler's process group, the default one where it is None; a bare one is believed, as by torch.

    Raises: torch's ValueError without a default group; ValueError if it was lost by pickling, or is without this rank;
        TypeError if it is no group.
    """
    if isinstance(process_group, GroupRanks):
        raise ValueError(
            f"process_group is unset: this scaler was unpickled, and its group of ranks {list(process_group.ranks)} "
            "did not come along; set scaler.process_group"
        )
    if is_bare(process_group):
        return process_group
    rank = dist.get_rank()  # raises torch's error without a default group
    group: Any = default_group() if process_group is None else process_group
    absent = group is dist.GroupMember.NON_GROUP_MEMBER
    if not absent and not isinstance(group, dist.ProcessGroup):  # such as a DeviceMesh, or a list of ranks
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if absent or dist.get_rank(group) < 0:
        raise ValueError(f"process_group must contain this rank, {rank}, got a group made for other ranks")
    return group


def gathering_group(process_group: Any) -> Any:
    """Return the group whose ranks can be asked, None for a process that is alone.

    Raises: as `checked_group`.
    """
    alone = process_group is None and default_group() is None
    return None if alone else checked_group(process_group)


def sharded_agreement(parameters: Iterable[Tensor], process_group: Any) -> Agreement | None:
    """Return the agreement of all ranks of `process_group`, or of the default group where it is None.

    Returns: None for a group of one rank.

    Raises: torch's ValueError without a default group; ValueError if this rank is not in the group or a
        parameter's mesh reaches beyond it. Neither for a bare group.
    """
    group = checked_group(process_group)
    if is_bare(group):
        return Agreement((group,), tuple(range(group.size()))) if group.size() > 1 else None
    return _covering((group,), dist.get_process_group_ranks(group), _meshes(parameters))


def inferred_agreement(parameters: Iterable[Tensor]) -> Agreement | None:
    """Return who must agree as the parameters' meshes tell: nobody without DTensors, else all who hold a part.

    One 1-D mesh: its group. Otherwise the ranks of the root mesh, of several roots the one with the others' ranks, as
    no smaller set is the same on all ranks: by the default group if they are all there are, else by the root's own
    groups, one a dimension. A group made here would be one that not all ranks make, after which torch's names of groups
    can differ between ranks, and making one hangs.

    Raises: ValueError if there are several root meshes and none holds the ranks of all: only the caller knows then; or
        if this rank is not in the mesh.
    """
    meshes = _meshes(parameters)
    if not meshes:
        return None
    root = meshes[0] if len(meshes) == 1 and meshes[0].ndim == 1 else _common_root(meshes)
    if root is None or (root.ndim > 1 and root.size() == dist.get_world_size()):
        return _covering((dist.group.WORLD,), range(dist.get_world_size()), meshes)
    if dist.get_rank() not in _mesh_ranks(root):
        raise ValueError(f"process_group must contain this rank, {dist.get_rank()}, got parameters on {root}")
    groups = tuple(root.get_group(dim) for dim in range(root.ndim) if root.size(dim) > 1)
    return _covering(groups, _mesh_ranks(root), meshes)


def has_fsdp1(parameters: Iterable[Tensor]) -> bool:
    """Tell whether parameters are shards of `FullyShardedDataParallel`, which look like plain tensors."""
    return any(map(is_fsdp1, parameters))


def several_ranks() -> bool:
    """Tell whether this process is one of several ranks."""
    return default_group() is not None and dist.get_world_size() > 1


def picklable(process_group: Any) -> Any:
    """Return what of `process_group` can be pickled: None for the default group, else its ranks."""
    if process_group is None or isinstance(process_group, GroupRanks):
        return process_group
    if process_group is default_group():
        return None
    try:
        return GroupRanks(tuple(dist.get_process_group_ranks(process_group)))
    except KeyError:  # destroyed
        return GroupRanks(())


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    placed = (placing(parameter) for parameter in parameters)
    return list(dict.fromkeys(each.device_mesh for each in placed if each is not None))


def _mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _root_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh that `mesh` was sliced from, None where this torch does not tell."""
    find = getattr(mesh, "_get_root_mesh", None)
    return find() if find is not None else None


def _common_root(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """Return the root that reaches all ranks of all meshes' roots; None, which means all ranks, if one is unknown."""
    roots = [_root_of(mesh) for mesh in meshes]
    known = [root for root in roots if root is not None]
    if len(known) < len(roots):
        return None
    ranks = {_mesh_ranks(root) for root in known}
    widest = [root for root in known if set().union(*ranks) <= set(_mesh_ranks(root))]
    if not widest:
        raise ValueError(
            f"process_group is needed: the parameters' meshes span different ranks {sorted(map(list, ranks))}, "
            "so which ranks must agree cannot be told from one of them"
        )
    return min(widest, key=lambda root: root.ndim)  # fewest reductions


def _covering(groups: tuple[Any, ...], members: Sequence[int], meshes: Iterable[DeviceMesh]) -> Agreement | None:
    """Return the groups' members as an agreement, None if that is one rank, if they cover the meshes."""
    for mesh in meshes:
        missing = sorted(set(_mesh_ranks(mesh)) - set(members))
        if missing:
            raise ValueError(
                f"process_group must contain every rank of {mesh}, which shards a parameter, "
                f"got a group of ranks {sorted(members)} without {missing}"
            )
    return Agreement(groups, tuple(sorted(members))) if len(members) > 1 else None


def _serving_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return `device` if the group's backend reduces there, else one where it does."""
    if is_bare(group):
        return device
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    served = [entry.split(":")[0] for entry in config.split(",")]
    if device.type in served:
        return device
    for kind in served:
        if kind != "cpu" and torch.get_device_module(kind).is_available():
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")

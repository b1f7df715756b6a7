"""A scaler's process group: how it is checked and pickled, and the collectives over it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
_AVAILABLE = dist.is_available()  # in this build of torch
# `gather_bytes`: bytes of the length field, and of data in the first all-gather.
_LENGTH, _AT_ONCE = 8, 1 << 14


@dataclass(frozen=True)
class GroupRanks:
    """What a pickle holds of a process group, which cannot be pickled itself."""

    ranks: tuple[int, ...]


def default_group() -> ProcessGroup | None:
    """Return the current default process group, None before `init_process_group`."""
    return dist.group.WORLD if _AVAILABLE else None


def all_reduce_(values: Tensor, op: Any, group: ProcessGroup) -> None:
    """All-reduce `values` (any device, written) over the group, on a device that its backend serves."""
    device = _serving_device(group, values.device)
    if device == values.device:
        dist.all_reduce(values, op=op, group=group)
    else:
        carrier = values.to(device)
        dist.all_reduce(carrier, op=op, group=group)
        values.copy_(carrier)


def gather_bytes(data: bytes, group: Any, home: torch.device) -> list[bytes]:
    """Return the data of every rank of `group`, by one all-gather; two if a rank has more than 16 KB.

    Args:
        home: where the ranks reduce their flags: a bare group, of which torch does not tell, is taken to serve it.
    """
    home = _gathering_device(group, home)
    begin, rest = data[:_AT_ONCE], data[_AT_ONCE:]
    gathered = _all_gather(len(data).to_bytes(_LENGTH, "little") + begin, _LENGTH + _AT_ONCE, group, home)
    lengths = [int.from_bytes(each[:_LENGTH], "little") for each in gathered]
    whole = [each[_LENGTH:] for each in gathered]
    longest = max(lengths)
    if longest > _AT_ONCE:
        whole = [*map(operator.add, whole, _all_gather(rest, longest - _AT_ONCE, group, home))]
    return [each[:length] for each, length in zip(whole, lengths, strict=True)]


def _all_gather(data: bytes, size: int, group: Any, home: torch.device) -> list[bytes]:
    """Return the data of every rank, padded to `size` bytes."""
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(home)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes() for part in parts]


def is_bare(group: Any) -> bool:
    """Tell whether torch does not know a group's ranks: a bare backend, a fake, or a ProcessGroup of one's own making.

    torchft makes such ones; a destroyed group has become one.
    """
    if not isinstance(group, dist.ProcessGroup):
        return hasattr(group, "allreduce")
    try:
        dist.get_rank(group)  # quicker than to list its ranks
    except ValueError:
        return True
    # torchft's `register` enters its group, which spans processes that torch knows nothing of, under this rank alone.
    return type(group) is not dist.ProcessGroup and len(dist.get_process_group_ranks(group)) == 1 < group.size()


def own_rank(process_group: Any) -> int:
    """Return this process's global rank; without a default group its rank in a bare group, 0 without that."""
    if default_group() is not None:
        return dist.get_rank()
    return int(process_group.rank()) if is_bare(process_group) else 0


def checked_group(process_group: Any) -> Any:
    """Return a scaler's process group, the default one for None; a bare one is not checked, as by torch.

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
    """Return the group to gather over, None for a process without a group.

    Raises: as `checked_group`.
    """
    alone = process_group is None and default_group() is None
    return None if alone else checked_group(process_group)


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


def _gathering_device(group: Any, home: torch.device) -> torch.device:
    """Return the host if the group serves it, else `home`, as the current device may be another rank's."""
    if is_bare(group):
        return home
    served = _serving_device(group, _CPU)
    return home if home.type == served.type and home.index is not None else served


def _serving_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return `device` if the group's backend reduces there, else one where it does."""
    if is_bare(group):
        return device
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    served = [entry.split(":")[0] for entry in config.split(",")]
    bound = getattr(group, "bound_device_id", None)  # by init_process_group(device_id=): of its type it takes no other
    if bound is not None and bound.type in served and (device.type == bound.type or device.type not in served):
        return torch.device(bound)
    if device.type in served:
        return device
    for kind in served:
        if kind != "cpu" and torch.get_device_module(kind).is_available():
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")

"""Agreement: which ranks must agree that a step is skipped, and the reduction that makes them agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from scaler_triton import collectives
from scaler_triton.placement import dtensor_spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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
            signals: fp32 or fp64, shape (n,), any device; written.
        """
        self._reduce_(signals, dist.ReduceOp.MAX)

    def sum_(self, totals: Tensor) -> None:
        """Replace `totals` (fp64, shape (n,), any device) by their sums over the ranks, as `maximum_` does."""
        self._reduce_(totals, dist.ReduceOp.SUM)

    def _reduce_(self, values: Tensor, op: Any) -> None:
        for group in self.groups:
            collectives.all_reduce_(values, op, group)


def sharded_agreement(parameters: Iterable[Tensor], process_group: Any) -> Agreement | None:
    """Return the agreement of all ranks of `process_group`, or of the default group where it is None.

    Returns: None for a group of one rank.

    Raises: torch's ValueError without a default group; ValueError if this rank is not in the group or a
        parameter's mesh reaches beyond it. Neither for a bare group.
    """
    group = collectives.checked_group(process_group)
    if collectives.is_bare(group):
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


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    specs = map(dtensor_spec, parameters)
    return list(dict.fromkeys(spec.device_mesh for spec in specs if spec is not None))


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

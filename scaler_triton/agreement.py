"""Agreement: the ranks that must skip a step together, and the reductions over them."""

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
    """The ranks on which one optimizer's flag must be equal.

    Args:
        groups: their process group; or one group for each dimension of a mesh, to be reduced over one after the other.
        ranks: the global ranks, in ascending order; of a bare group its own numbers.
    """

    groups: tuple[ProcessGroup, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def maximum_(self, values: Tensor) -> None:
        """Replace `values` by their elementwise maximum over the ranks: one all-reduce for each group, no host wait.

        Args:
            values: fp32 or fp64, shape (n,), any device; written.
        """
        self._reduce_(values, dist.ReduceOp.MAX)

    def sum_(self, values: Tensor) -> None:
        """Replace `values` (as for `maximum_`) by their sums over the ranks."""
        self._reduce_(values, dist.ReduceOp.SUM)

    def _reduce_(self, values: Tensor, op: Any) -> None:
        for group in self.groups:
            collectives.all_reduce_(values, op, group)


def sharded_agreement(parameters: Iterable[Tensor], process_group: Any) -> Agreement | None:
    """Return the agreement of all ranks of `process_group`, or of the default group where it is None.

    Returns: None for a group of one rank.

    Raises: torch's ValueError without a default group; ValueError if this rank is not in the group or a
        parameter's mesh has ranks outside it. Neither is checked for a bare group.
    """
    group = collectives.checked_group(process_group)
    if collectives.is_bare(group):
        return Agreement((group,), tuple(range(group.size()))) if group.size() > 1 else None
    return _covering((group,), dist.get_process_group_ranks(group), _meshes(parameters))


def inferred_agreement(parameters: Iterable[Tensor]) -> Agreement | None:
    """Return the agreement of the ranks of the parameters' meshes; None without DTensors.

    One 1-D mesh: its group. Otherwise all ranks of the root mesh, of several root meshes the one with the ranks of all,
    as every rank arrives at the same set only there: by the default group if that is the whole world, else by the
    root's own groups, one for each dimension. No group is created here, as not all ranks would join: it could hang, and
    the names that torch gives to groups could differ between ranks.

    Raises: ValueError if no root mesh has the ranks of all, or if this rank is not in the mesh.
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
    """Return the mesh that `mesh` was sliced from, None if this torch has no such method."""
    find = getattr(mesh, "_get_root_mesh", None)
    return find() if find is not None else None


def _common_root(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """Return the root mesh that has the ranks of all root meshes; None, for the whole world, if one is unknown."""
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
    """Return the agreement of `members`, None for a single rank; raise if a mesh has other ranks."""
    for mesh in meshes:
        missing = sorted(set(_mesh_ranks(mesh)) - set(members))
        if missing:
            raise ValueError(
                f"process_group must contain every rank of {mesh}, which shards a parameter, "
                f"got a group of ranks {sorted(members)} without {missing}"
            )
    return Agreement(groups, tuple(sorted(members))) if len(members) > 1 else None

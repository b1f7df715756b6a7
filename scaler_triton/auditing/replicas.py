"""Finds the parameters of which other ranks should hold equal copies, and hashes this rank's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.auditing.fingerprint import fingerprint
from scaler_triton.auditing.state import UNKNOWN, Copy
from scaler_triton.naming import named_parameters
from scaler_triton.optimizers import unwrap
from scaler_triton.placement import is_dtensor, is_fsdp1, local_tensor
from scaler_triton.text import one_line, ranges

FSDP1_SHARD = "FSDP1 shard (nothing tells which ranks hold the same)"
DTENSOR_SHARD = "DTensor shard (no other rank of its mesh holds a copy)"
ELSEWHERE = "DTensor (on a mesh without this rank)"
OPAQUE = "parameter (on meta, sparse, quantized, lazy, or of a class of its own: no bits to read)"
_LEFT_OUT = (FSDP1_SHARD, DTENSOR_SHARD, ELSEWHERE, OPAQUE)

Named = tuple[str, Tensor]


def hashed_copies(
    optimizers: Sequence[Any], model: nn.Module | None, ranks: Sequence[int], replicated: bool
) -> tuple[list[Copy], dict[str, int]]:
    """Return this rank's copies, hashed, and how many parameters were left out, by the reason.

    Args:
        optimizers: what is trained.
        model: names the parameters; from DDP and FSDP1's NO_SHARD follows which ranks hold the same.
        ranks: all of the audit.
        replicated: plain parameters should be equal on all of them.
    """
    shared = _shared_by_module(model) if model is not None else {}
    everybody = ranges(ranks) if replicated else UNKNOWN
    chosen: list[tuple[str, str, Tensor]] = []
    left_out: Counter[str] = Counter()
    for name, parameter in _named(optimizers, model):
        among = _among(parameter, shared, everybody)
        if among in _LEFT_OUT:
            left_out[among] += 1
        else:
            chosen.append((name, among, local_tensor(parameter)))
    digests = _digests([local for *_, local in chosen])
    return [Copy(name, among, digests[i]) for i, (name, among, _) in enumerate(chosen)], dict(left_out)


def _named(optimizers: Sequence[Any], model: nn.Module | None) -> Iterator[Named]:
    """Yield every parameter once: the model's by name, then those of optimizers only, by their position."""
    seen: set[int] = set()
    for name, parameter in [*(named_parameters(model) if model is not None else ()), *_by_place(optimizers)]:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield one_line(name), parameter


def _by_place(optimizers: Sequence[Any]) -> Iterator[Named]:
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer {number} " if len(optimizers) > 1 else ""
        for index, group in enumerate(unwrap(optimizer).param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"{prefix}group {index} parameter {place} {tuple(parameter.shape)}", parameter


def _among(parameter: Tensor, shared: dict[int, str], everybody: str) -> str:
    """Return the ranks whose copies should equal this one's, UNKNOWN, or the reason why there are none."""
    if is_dtensor(parameter):
        return _among_mesh(parameter)
    if _opaque(parameter):
        return OPAQUE
    if is_fsdp1(parameter):
        return shared.get(id(parameter), FSDP1_SHARD)
    return shared.get(id(parameter), everybody)


def _among_mesh(parameter: Any) -> str:
    """Return the ranks with the same coordinates in the sharded mesh dimensions, which hold the same shard."""
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return ELSEWHERE
    if _opaque(local_tensor(parameter)):
        return OPAQUE
    places = zip(parameter.placements, coordinates, strict=True)
    peers = mesh.mesh[tuple(slice(None) if p.is_replicate() else at for p, at in places)].flatten().tolist()
    return ranges(peers) if len(peers) > 1 else DTENSOR_SHARD


def _opaque(tensor: Tensor) -> bool:
    wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wrapper or nn.parameter.is_lazy(tensor):
        return True
    return tensor.is_quantized or tensor.layout is not torch.strided or tensor.device.type == "meta"


def _shared_by_module(model: nn.Module) -> dict[int, str]:
    """Return the ranks that hold the same parameter, by its id, for parameters of DDP and NO_SHARD modules."""
    shared: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            shared.update(dict.fromkeys(map(id, _parameters_of(module)), _ranks_of(module)))
    return shared | _shared_by_no_shard(model)


def _parameters_of(module: nn.parallel.DistributedDataParallel) -> Iterator[Tensor]:
    """Yield the parameters that DDP keeps equal; over tensor parallelism each forward replaces the module's."""
    yield from getattr(module, "_module_parameters", ())  # private to torch
    yield from (p for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore)


def _shared_by_no_shard(model: nn.Module) -> dict[int, str]:
    """Return the ranks of FSDP1's parameters if all its modules are NO_SHARD over the same ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, no module is FSDP1's
    wrapped = [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    among = {_ranks_of(module) for module in wrapped}
    if len(among) != 1 or any(m.sharding_strategy.name != "NO_SHARD" for m in wrapped):
        return {}
    return dict.fromkeys((id(p) for p in model.parameters() if is_fsdp1(p)), among.pop())


def _ranks_of(module: Any) -> str:
    return ranges(dist.get_process_group_ranks(module.process_group))


def _digests(tensors: Iterable[Tensor]) -> list[str]:
    """Return hashes in hexadecimal; the host waits once per device."""
    with torch.no_grad():
        found = [fingerprint(tensor) for tensor in tensors]
    values: dict[int, int] = {}
    for device in {each.device for each in found}:
        here = [index for index, each in enumerate(found) if each.device == device]
        values.update(zip(here, torch.stack([found[index] for index in here]).tolist(), strict=True))
    return [f"{values[index] % 2**64:016x}" for index in range(len(found))]

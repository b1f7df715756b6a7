"""Finds the parameters of which other ranks should hold equal copies, and hashes this rank's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton.auditing.fingerprint import fingerprint
from scaler_triton.auditing.report import UNKNOWN, Copy
from scaler_triton.core.gradients import is_dtensor, is_fsdp1, local_tensor
from scaler_triton.core.registry import unwrap
from scaler_triton.report.overflow import named_parameters
from scaler_triton.text import one_line, ranges

FSDP1_SHARD = "FSDP1 shard (nothing tells which ranks hold the same)"
DTENSOR_SHARD = "DTensor shard (no other rank of its mesh holds a copy)"
ELSEWHERE = "DTensor (on a mesh without this rank)"
OPAQUE = "parameter (on meta, sparse, quantized, lazy, or of a class of its own: no bits to read)"
_LEFT_OUT = (FSDP1_SHARD, DTENSOR_SHARD, ELSEWHERE, OPAQUE)


def hashed_copies(
    optimizers: Sequence[Any], model: nn.Module | None, ranks: Sequence[int], replicated: bool
) -> tuple[list[Copy], dict[str, int]]:
    """Return this rank's copies, hashed, and how many parameters were left out, by the reason.

    Args:
        optimizers: whose parameters count.
        model: names the parameters; its DDP and FSDP1 NO_SHARD modules tell which ranks hold the same.
        ranks: all ranks of the audit.
        replicated: plain parameters should be equal on all of them.
    """
    shared = _shared_by_module(model) if model is not None else {}
    everybody = ranges(ranks) if replicated else UNKNOWN
    copies: list[Copy] = []
    left_out: Counter[str] = Counter()
    for name, parameter in _named(optimizers, model):
        among = _among(parameter, shared, everybody)
        if among in _LEFT_OUT:
            left_out[among] += 1
        else:
            copies.append(Copy(name, among, fingerprint(local_tensor(parameter))))
    return copies, dict(left_out)


def _named(optimizers: Sequence[Any], model: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter once: the model's by name, then the rest of the optimizers', by their position."""
    pairs = [] if model is None else list(named_parameters(model))
    for number, optimizer in enumerate(optimizers):
        prefix = f"optimizer {number} " if len(optimizers) > 1 else ""
        for index, group in enumerate(unwrap(optimizer).param_groups):
            for place, parameter in enumerate(group["params"]):
                pairs.append((f"{prefix}group {index} parameter {place} {tuple(parameter.shape)}", parameter))
    seen: set[int] = set()
    for name, parameter in pairs:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield one_line(name), parameter


def _among(parameter: Any, shared: dict[int, str], everybody: str) -> str:
    """Return the ranks whose copies should equal this one's, UNKNOWN, or the reason why there are none."""
    if not is_dtensor(parameter):
        if _opaque(parameter):
            return OPAQUE
        return shared.get(id(parameter), FSDP1_SHARD if is_fsdp1(parameter) else everybody)
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return ELSEWHERE
    if _opaque(local_tensor(parameter)):
        return OPAQUE
    # Ranks with the same coordinates in all sharded dimensions of the mesh hold the same shard.
    places = zip(parameter.placements, coordinates, strict=True)
    peers = mesh.mesh[tuple(slice(None) if p.is_replicate() else at for p, at in places)].flatten().tolist()
    return ranges(peers) if len(peers) > 1 else DTENSOR_SHARD


def _opaque(tensor: Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or nn.parameter.is_lazy(tensor):
        return True
    return tensor.is_quantized or tensor.layout is not torch.strided or tensor.device.type == "meta"


def _shared_by_module(model: nn.Module) -> dict[int, str]:
    """Return the ranks that hold the same parameter, by its id, for parameters of DDP and NO_SHARD modules."""
    shared: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            held = [p for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore]
            # Private to torch: over tensor parallelism each forward replaces the module's own parameters.
            held += getattr(module, "_module_parameters", ())
            shared.update(dict.fromkeys(map(id, held), _ranks_of(module)))
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, no module is FSDP1's
    wrapped = [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    among = {_ranks_of(module) for module in wrapped}
    if len(among) == 1 and all(m.sharding_strategy.name == "NO_SHARD" for m in wrapped):
        shared.update(dict.fromkeys((id(p) for p in model.parameters() if is_fsdp1(p)), among.pop()))
    return shared


def _ranks_of(module: Any) -> str:
    return ranges(dist.get_process_group_ranks(module.process_group))

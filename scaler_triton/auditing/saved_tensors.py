"""The tensors in a saved file: hashed, where every rank should have saved the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from scaler_triton.auditing.fingerprint import fingerprint

UNASKED = "saved tensor (if they should be equal on all ranks, as under DDP, compare them with --replicated)"
UNHASHED = "saved tensor (on meta, sparse, a shard, or of a class of its own)"
STATISTIC = "running statistic (BatchNorm's differ between ranks)"


def hashed(tensors: Mapping[str, Tensor], limit: int) -> tuple[dict[str, str], dict[str, int]]:
    """Return a hash of each tensor's bits, and how many were left out, by the reason.

    Args:
        tensors: by name; from a file that anybody may have written; read.
        limit: bytes to be read at most; a memory that several tensors share is read once.

    Raises: ValueError if it takes more: a tensor can be larger than the memory it says it lies in.
    """
    hashes: dict[str, str] = {}
    known: dict[tuple[object, ...], str] = {}
    left_out: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if reason := _reason_against(name, tensor):
            left_out[reason] += 1
            continue
        view = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in known:
            limit -= tensor.nbytes
            if limit < 0:
                raise ValueError("its tensors are larger than the file")
            known[view] = str(fingerprint(tensor).item())
        hashes[name] = known[view]
    return hashes, left_out


def _reason_against(name: str, tensor: Tensor) -> str:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.is_cpu:
        return UNHASHED
    return STATISTIC if name.endswith(("running_mean", "running_var")) else ""

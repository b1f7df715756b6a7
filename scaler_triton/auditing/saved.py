"""Reads scaler and optimizer states from saved files, and hashes other tensors, without running code in the files."""

from __future__ import annotations

import logging
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaler_triton.auditing.fingerprint import fingerprint
from scaler_triton.auditing.report import Copy, RankState, Reading, scaler_readings, steps_reading
from scaler_triton.text import error_line, one_line

EVERYBODY = "all"  # the ranks whose copies should be equal
SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
OPTIMIZER = {"state", "param_groups"}
STRUCTURE_LIMIT = 2**28  # bytes of a file without its tensors; 100,000 parameters take a tenth of it
DEPTH = 8  # of nested dicts and lists
NAME, LEAF = 40, 160  # characters of a key, and of a tensor's key
UNASKED = "saved tensor (if they should be equal on all ranks, as under DDP, compare them with --replicated)"
UNHASHED = "saved tensor (on meta, sparse, a shard, or of a class of its own)"
STATISTIC = "running statistic (BatchNorm's differ between ranks)"


class Unreadable(ValueError):
    """Why a file is not read, on one line."""


def read_state(rank: int, label: str, path: Path, name: str, *, replicated: bool) -> RankState:
    """Return the scales, trackers and steps that are anywhere in a file of `torch.save`, or why it cannot be read.

    The file may be any file, also one made to do harm. The report calls its values `label`, and the file itself
    `name`. With `replicated` the state also has hashes of the floating-point tensors outside of optimizer states.
    """
    readings: dict[str, Reading] = {}
    tensors: dict[str, Tensor] = {}
    names: Counter[str] = Counter()  # long names are cut, and may become equal
    try:
        for place, found in _search(_load(path)):
            where = f"{label} {one_line(place)}".strip()
            if isinstance(found, Tensor):
                names[where] += 1
                tensors[f"{where} #{names[where]}" if names[where] > 1 else where] = found
            else:
                readings.update({f"{where} {column}": reading for column, reading in found.items()})
        if not replicated:
            return RankState(rank, readings, left_out={UNASKED: len(tensors)} if tensors else {})
        return RankState(rank, readings, *_hashed(tensors, path.stat().st_size))
    except Exception as error:  # torch raises anything on a broken or hostile file
        return RankState(rank, error=one_line(f"{name}: {_reason(error)}"))


def _load(path: Path) -> Any:
    """Unpickle tensors and plain values only, and map the tensors from the file instead of reading them."""
    if not zipfile.is_zipfile(path):
        raise Unreadable("not a zip archive, which is what torch.save writes")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):  # it may be far larger in memory
        raise Unreadable("its archive is compressed; torch.save's is not")
    structure = sum(record.file_size for record in records if record.filename.lower().endswith(".pkl"))
    if structure > STRUCTURE_LIMIT:
        raise Unreadable(f"its structure takes {structure} bytes; the limit is {STRUCTURE_LIMIT}")
    log = logging.getLogger("torch.distributed.device_mesh")  # complains that a DTensor's mesh has no process group
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    finally:
        log.setLevel(level)


def _search(content: Any) -> Iterator[tuple[str, dict[str, Reading] | Tensor]]:
    """Yield every scaler's and optimizer's readings, and every other tensor, with their place, e.g. "states.scaler"."""
    waiting = [("", content, 0)] if isinstance(content, (Mapping, list, tuple)) else []
    seen = {id(content)}
    while waiting:
        place, value, depth = waiting.pop()
        if isinstance(value, Tensor):
            yield place, value
        elif isinstance(value, Mapping) and value.keys() >= SCALER:
            tracker = _number(value["_growth_tracker"], "_growth_tracker")
            yield place, scaler_readings(_number(value["scale"], "scale"), int(tracker))
        elif isinstance(value, Mapping) and value.keys() >= OPTIMIZER and isinstance(value["state"], Mapping):
            groups = value["param_groups"] if isinstance(value["param_groups"], (list, tuple)) else []
            counting = [e for e in (*value["state"].values(), *groups) if isinstance(e, Mapping) and "step" in e]
            yield place, {"steps": steps_reading([_number(each["step"], "step") for each in counting])}
        elif depth < DEPTH:
            inner = [(name, each) for name, each in _inside(value) if id(each) not in seen]
            seen.update(id(each) for _, each in inner)  # a file can hold the same list in itself a million times
            waiting += [(f"{place}.{name}".strip("."), each, depth + 1) for name, each in reversed(inner)]


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dicts, lists, tuples and floating-point tensors in a container, with their names in it."""
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        is_tensor = isinstance(each, Tensor) and each.is_floating_point()
        if is_tensor or isinstance(each, (Mapping, list, tuple)):
            name = str(key) if isinstance(key, (str, int)) else "?"
            yield name[: LEAF if is_tensor else NAME], each


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unreadable(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def _hashed(tensors: Mapping[str, Tensor], limit: int) -> tuple[list[Copy], dict[str, int]]:
    """Return a hash of each tensor's bits, and how many tensors were left out, by the reason.

    Raises: Unreadable if it would read more than `limit` bytes: a tensor may claim to be larger than its file.
    """
    copies: list[Copy] = []
    known: dict[tuple[object, ...], str] = {}  # tied weights are read once
    left_out: Counter[str] = Counter()
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and tensor.is_cpu
        if not plain or name.endswith(("running_mean", "running_var")):
            left_out[STATISTIC if plain else UNHASHED] += 1
            continue
        view = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in known:
            limit -= tensor.nbytes
            if limit < 0:
                raise Unreadable("its tensors are larger than the file")
            known[view] = fingerprint(tensor)
        copies.append(Copy(name, EVERYBODY, known[view]))
    return copies, left_out


def _reason(error: Exception) -> str:
    """Return what was wrong, without torch's advice to load the file in an unsafe way."""
    if isinstance(error, Unreadable):
        return str(error)
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return one_line(f"holds {refused[1]}, not only tensors and plain values, so nothing of it was read")
    if "weights_only" in str(error):
        return "holds more than tensors and plain values, so nothing of it was read"
    return error_line(error)

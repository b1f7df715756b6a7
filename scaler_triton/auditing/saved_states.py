"""Reads scaler and optimizer states from a saved file, without running code in it; of other tensors hashes."""

from __future__ import annotations

import logging
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton.auditing.saved_tensors import UNASKED, hashed
from scaler_triton.auditing.state import Reading, scaler_readings, steps_reading
from scaler_triton.text import error_line, one_line

SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
OPTIMIZER = {"state", "param_groups"}
STRUCTURE_LIMIT = 2**28  # bytes of a file without its tensors; 100,000 parameters take a tenth of it
DEPTH = 8  # of nested dicts and lists
NAME, LEAF = 40, 160  # characters of a key, and of a tensor's

Found = dict[str, Reading]  # what a file says, by its place in the file and what it is


class Saved(NamedTuple):
    """What a file says of its rank.

    Args:
        readings: scale, tracker and steps, by their place in the file, such as "model.opt steps".
        hashes: of tensors, by their place.
        left_out: how many other tensors there are, by the reason.
    """

    readings: Found
    hashes: Mapping[str, str]
    left_out: Mapping[str, int]


class Unreadable(ValueError):
    """A file that cannot be read, with the reason on one line."""


def read_file(path: Path, *, replicated: bool) -> Saved:
    """Return the scale, tracker and steps that are anywhere in a file of `torch.save`.

    Args:
        path: a file that anybody may have written.
        replicated: hash the floating-point tensors outside of optimizers' states, too.

    Raises: Unreadable for every other file, and for values that are no numbers.
    """
    try:
        readings: Found = {}
        tensors: dict[str, Tensor] = {}
        names: Counter[str] = Counter()  # long ones are cut, and may become equal
        for place, found in _search(_load(path)):
            if isinstance(found, Tensor):
                name = one_line(place)
                names[name] += 1
                tensors[f"{name} #{names[name]}" if names[name] > 1 else name] = found
            else:
                readings.update({one_line(f"{place} {name}"): each for name, each in found.items()})
        if not replicated:
            return Saved(readings, {}, {UNASKED: len(tensors)} if tensors else {})
        return Saved(readings, *hashed(tensors, path.stat().st_size))
    except Unreadable:
        raise
    except Exception as error:  # torch's reader on a broken or hostile file
        raise Unreadable(_reason(error)) from error


def _load(path: Path) -> Any:
    """Unpickle tensors and plain values only, with the tensors left in the file."""
    _check_archive(path)
    log = logging.getLogger("torch.distributed.device_mesh")  # says that a DTensor's mesh has no process group here
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    finally:
        log.setLevel(level)


def _check_archive(path: Path) -> None:
    """Refuse what would be larger in memory than on disk."""
    if not zipfile.is_zipfile(path):
        raise Unreadable("not a zip archive, as torch.save writes")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise Unreadable("its archive is compressed; torch.save's is not")
    structure = sum(record.file_size for record in records if record.filename.lower().endswith(".pkl"))
    if structure > STRUCTURE_LIMIT:
        raise Unreadable(f"its structure takes {structure} bytes; the limit is {STRUCTURE_LIMIT}")


def _search(content: Any) -> Iterator[tuple[str, Found | Tensor]]:
    """Yield every scaler's and optimizer's readings, and every other tensor, with their place, e.g. "states.scaler"."""
    waiting = [("", content, 0)] if isinstance(content, (Mapping, list, tuple)) else []
    seen = {id(content)}
    while waiting:
        place, value, depth = waiting.pop()
        if isinstance(value, Tensor):
            yield place, value
        elif isinstance(value, Mapping) and value.keys() >= SCALER:
            yield place, _scaler(value)
        elif isinstance(value, Mapping) and value.keys() >= OPTIMIZER and isinstance(value["state"], Mapping):
            yield place, {"steps": steps_reading(list(_steps(value)))}
        elif depth < DEPTH:
            inner = [(name, each) for name, each in _inside(value) if id(each) not in seen]
            seen.update(id(each) for _, each in inner)  # a file can hold the same list in itself a million times
            waiting += [(f"{place}.{name}".strip("."), each, depth + 1) for name, each in reversed(inner)]


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dicts, lists, tuples and floating-point tensors in a container, with their names in it."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in pairs:
        is_tensor = isinstance(each, Tensor) and each.is_floating_point()
        if is_tensor or isinstance(each, (Mapping, list, tuple)):
            length = LEAF if is_tensor else NAME
            yield key[:length] if isinstance(key, str) else f"{key}" if isinstance(key, int) else "?", each


def _scaler(state: Mapping[str, Any]) -> Found:
    tracker = _number(state["_growth_tracker"], "_growth_tracker")
    return scaler_readings(_number(state["scale"], "scale"), int(tracker))


def _steps(state: Mapping[str, Any]) -> Iterator[float]:
    groups = state["param_groups"] if isinstance(state["param_groups"], (list, tuple)) else []
    for each in (*state["state"].values(), *groups):
        if isinstance(each, Mapping) and "step" in each:
            yield _number(each["step"], "step")


def _number(value: Any, name: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unreadable(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def _reason(error: Exception) -> str:
    """Say what was wrong; not in torch's words where those advise to load the file in an unsafe way."""
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return one_line(f"holds {refused[1]}, not only tensors and plain values, so nothing of it was read")
    if "weights_only" in str(error):
        return "holds more than tensors and plain values, so nothing of it was read"
    return error_line(error)

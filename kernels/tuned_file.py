"""A GPU's tuned file: its format, how it is validated, and how it is written. Imports no triton.

    {"schema": 1, "device": "NVIDIA H200", "capability": "9.0", "triton": "3.7.1", "kernels": "5b0c...",
     "chosen": [{"mode": "unscale", "itemsize": 2, "num_warps": 8, "vectors": 1, "unroll": 4}, ...],
     "provenance": {...}, "measured": [...]}

Only these fields are checked; `provenance` and `measured` are for people.
"""

import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scaler_triton.kernels.launch_config import LaunchConfig, check_pass

SCHEMA = 1
# A file with all measurements has about 20 KB.
SIZE_LIMIT = 256 * 1024
NAME_LIMIT = 200

_CONFIG_FIELDS = ("num_warps", "vectors", "unroll")


@dataclass(frozen=True)
class Origin:
    """Where a configuration was measured.

    Args:
        device: the GPU's name, as torch gives it.
        capability: "9.0" and the like.
        triton: Triton's version.
        kernels: the hash of the kernels' source.
    """

    device: str
    capability: str
    triton: str
    kernels: str


@dataclass(frozen=True)
class TunedFile:
    """A file's content: its origin, and a configuration for each mode and element size in bytes."""

    origin: Origin
    chosen: Mapping[tuple[str, int], LaunchConfig]


@functools.cache
def read(path: Path) -> TunedFile | None:
    """Read a file, cached: None if it cannot be read or, with one warning, if it is not valid.

    Args:
        path: absolute.
    """
    try:
        return parse(_content(path))
    except OSError:  # no file, or a home that may not be read
        return None
    except (ValueError, RecursionError) as error:
        warnings.warn(f"the tuned file {path} is ignored: {error}", RuntimeWarning, stacklevel=2)
        return None


def parse(content: bytes) -> TunedFile:
    """Validate a file's content.

    Raises: ValueError saying what is wrong with it.
    """
    data = json.loads(content, parse_constant=_refuse_constant)
    _check_type("the file", data, dict)
    if data.get("schema") != SCHEMA or type(data["schema"]) is not int:
        raise ValueError(f"schema must be {SCHEMA}, got {data.get('schema')!r}")
    origin = Origin(*(_name(data, field.name) for field in fields(Origin)))
    chosen: dict[tuple[str, int], LaunchConfig] = {}
    for entry in _check_type("chosen", data.get("chosen"), list):
        key, config = _entry(entry)
        if key in chosen:
            raise ValueError(f"chosen has two entries for {key}")
        chosen[key] = config
    return TunedFile(origin, chosen)


def write(path: Path, tuned: TunedFile, **figures: Any) -> None:
    """Write a file atomically.

    Args:
        path: in a folder that exists; what was there is replaced.
        tuned: what `read` will return.
        figures: more fields, of what JSON can hold.

    Raises: OSError, and nothing has changed.
    """
    chosen = [{"mode": mode, "itemsize": size, **asdict(config)} for (mode, size), config in tuned.chosen.items()]
    data = {"schema": SCHEMA, **asdict(tuned.origin), "chosen": chosen, **figures}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(_lines(data) + "\n")
            file.flush()
            os.chmod(file.name, 0o644)  # a temporary file is private to its owner
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def file_stem(name: str) -> str:
    """Return a GPU's name, or a version, as a file may be called: no blanks, no slashes."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)[:60]


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(SIZE_LIMIT + 1)
    if len(content) > SIZE_LIMIT:
        raise ValueError(f"it is larger than {SIZE_LIMIT} bytes")
    return content


def _entry(entry: Any) -> tuple[tuple[str, int], LaunchConfig]:
    _check_type("an entry of chosen", entry, dict)
    mode, itemsize = entry.get("mode"), entry.get("itemsize")
    check_pass(mode, itemsize)
    return (mode, itemsize), LaunchConfig(*(entry.get(field) for field in _CONFIG_FIELDS))


def _name(data: Mapping[str, Any], field: str) -> str:
    name: str = _check_type(field, data.get(field), str)
    if not 0 < len(name) <= NAME_LIMIT:
        raise ValueError(f"{field} must have 1 to {NAME_LIMIT} characters, got {len(name)}")
    return name


def _check_type(what: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _lines(data: Mapping[str, Any]) -> str:
    """Return JSON with one line an entry of a list: a change of one configuration is a change of one line."""
    parts = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}"

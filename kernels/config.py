"""LaunchConfig: the shape of one program; and which one a GPU gets for a pass. Imports no triton.

`python -m scaler_triton tune` measures and writes a GPU's file; nothing is tuned here. The user's own file comes before
the one in `tuned/`, that before the default. A file's form, with one entry for each pass, element size and workload:

    {"gpu": "NVIDIA H200",
     "configs": [{"mode": "check", "itemsize": 4, "workload": "mixed", "config": [8, 2, 4]}, ...],
     ...}                                     # whatever else is in it is for people
"""

import functools
import json
import operator
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# The lanes of a "warp" here, on every GPU: `launch` uses fewer warps on one whose warps are wider.
WARP_LANES = 32
# The widest access that one lane can make.
VECTOR_BYTES = 16

# The passes over a table, and the element sizes in bytes.
MODES = ("unscale", "check", "norm", "clip")
ITEMSIZES = (2, 4, 8)
# "span": the tensors of a list have this many bytes on average, 64 chunks of the default; "mixed": they have fewer, so
# that many chunks are partly filled.
WORKLOADS = ("span", "mixed")
SPAN_BYTES = 2**20

SHIPPED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of one program: `num_warps` warps, `unroll` steps, `vectors` 16-byte accesses per lane and step.

    By default a program processes 16 KB of gradients and, compiled for sm_90, takes at most 40 registers per lane: 48
    of a multiprocessor's 64 warps are resident, or all of them in passes that only read, with 32 registers.

    Args:
        num_warps: warps of 32 lanes; a power of 2, at most 32.
        vectors: a power of 2, at most 8.
        unroll: 1 to 16.

    Raises: ValueError for other numbers, for which Triton has no blocks.
    """

    num_warps: int = 8
    vectors: int = 2
    unroll: int = 2

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16, 32) or self.vectors not in (1, 2, 4, 8):
            raise ValueError(f"num_warps and vectors must be powers of 2, at most 32 and 8, got {self}")
        if self.unroll not in range(1, 17):
            raise ValueError(f"unroll must be an int from 1 to 16, got {self}")

    def __str__(self) -> str:
        return f"{self.num_warps} x {self.vectors} x {self.unroll}"

    def block_elements(self, itemsize: int) -> int:
        """Return how many elements of `itemsize` bytes a program processes in one step."""
        return WARP_LANES * self.num_warps * self.vectors * (VECTOR_BYTES // itemsize)

    def chunk_elements(self, itemsize: int) -> int:
        """Return how many elements of `itemsize` bytes a program processes in all its steps."""
        return self.block_elements(itemsize) * self.unroll


DEFAULT = LaunchConfig()

# What `tune` tries. tests/nightly/simulator/test_aot.py checks that none of them spills registers.
CANDIDATES = tuple(
    LaunchConfig(*numbers)
    for numbers in ((4, 1, 2), (4, 2, 1), (8, 1, 2), (8, 2, 1), (8, 1, 4), (8, 2, 2), (8, 4, 1), (16, 1, 2), (8, 2, 4))
)

Key = tuple[str, int, str]  # pass, element size, workload


def config_for(device: torch.device, mode: str, itemsize: int, numels: Sequence[int]) -> LaunchConfig:
    """Return the configuration to launch with.

    A chunk map is made for one configuration: passes with different ones need a GradTable each.

    Args:
        device: where the gradients lie, with its index; anything but a GPU gets the default.
        mode: one of MODES, or "measure", which is not tuned and gets the default.
        itemsize: bytes of an element: 2, 4 or 8.
        numels: the elements of each tensor.
    """
    if device.type != "cuda":
        return DEFAULT
    return tuned_for(_name_of(device), (mode, itemsize, workload_of(itemsize, numels)))[0]


def workload_of(itemsize: int, numels: Sequence[int]) -> str:
    """Return "span" for tensors that are large on average, else "mixed"."""
    return "span" if numels and sum(numels) * itemsize >= SPAN_BYTES * len(numels) else "mixed"


def tuned_for(gpu: str, key: Key) -> tuple[LaunchConfig, Path | None]:
    """Return a GPU's configuration by its name, and the file that it comes from; None for the default."""
    for path in (user_file(gpu), SHIPPED / file_name(gpu)):
        config = path and read(path, gpu).get(key)
        if config:
            return config, path
    return DEFAULT, None


@functools.cache
def read(path: Path, gpu: str) -> Mapping[Key, LaunchConfig]:
    """Return a file's configurations, read once: none if it is missing or, with a warning, broken or another GPU's."""
    try:
        data = json.loads(path.read_text())
        if data["gpu"] != gpu:
            raise ValueError(f"it was made for {data['gpu']!r}, and this is {gpu!r}")
        entries = data["configs"]
        return {
            (each["mode"], each["itemsize"], each["workload"]): LaunchConfig(*map(operator.index, each["config"]))
            for each in entries
        }
    except OSError:  # no file, or a home that may not be read
        return {}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"
        warnings.warn(f"the tuned file {path} is ignored: {said}", RuntimeWarning, stacklevel=2)
        return {}


def user_file(gpu: str) -> Path | None:
    """Return the path of the user's file for a GPU, which may not exist; None for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if not cache.is_absolute():  # the XDG standard: a relative one is not to be used
            cache = Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "scaler_triton" / "tuned" / file_name(gpu)


def file_name(gpu: str) -> str:
    """Return the name of a GPU's file: no blanks, no slashes."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", gpu)[:100] + ".json"


def describe(device: torch.device) -> list[str]:
    """Return a line for each pass and workload: a GPU's configurations, and the file that each comes from."""
    lines = []
    for mode in MODES:
        for workload in WORKLOADS:
            found: dict[tuple[LaunchConfig, Path | None], list[str]] = {}
            for itemsize in ITEMSIZES:
                found.setdefault(tuned_for(_name_of(device), (mode, itemsize, workload)), []).append(str(itemsize))
            for (config, path), sizes in found.items():
                source = "the default" if path is None else f"from {path}"
                lines.append(f"{mode}, {workload}, {', '.join(sizes)} bytes: {config}, {source}")
    return lines


_name_of = functools.cache(torch.cuda.get_device_name)

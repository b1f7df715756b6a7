"""A CUDA driver that computes nothing: Triton's own dispatch and launcher run on it, without a GPU.

What is above the driver can be tested and timed there; CPU tensors stand in for a GPU's. A process has one driver for
life: start it with the variables of `environment`, and have it call `activate` before its first launch.
"""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

SOURCE = Path(__file__).with_name("libcuda.c")
LIBRARY = "libcuda.so.1"


class Launch(NamedTuple):
    """What the driver was asked to run."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    params: tuple[int, ...]  # the bytes of each, as one integer; see `note_params`


class _Launch(ctypes.Structure):
    """`Launch` in libcuda.c."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("n_params", ctypes.c_uint32),
        ("params", ctypes.c_uint64 * 16),
    ]


def build(folder: Path) -> Path:
    """Compile the driver, unless `folder` has it already; return its path. Needs gcc, on Linux."""
    headers = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "include"
    key = hashlib.sha256(SOURCE.read_bytes() + str(headers).encode()).hexdigest()[:16]
    library = folder / key / LIBRARY
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_name(f"{LIBRARY}.{os.getpid()}")  # another process may be building too
        flags = ["-shared", "-fPIC", "-O2", f"-Wl,-soname,{LIBRARY}"]
        subprocess.run(["gcc", *flags, f"-I{headers}", "-o", unfinished, SOURCE], check=True)
        unfinished.replace(library)
    return library


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that a process needs from its start to run on the driver; builds it in `folder`."""
    home = str(build(folder).resolve().parent)  # the first is for the linker
    search = os.pathsep.join(filter(None, [home, os.environ.get("LD_LIBRARY_PATH")]))
    return {"TRITON_LIBCUDA_PATH": home, "LD_LIBRARY_PATH": search, "TRITON_INTERPRET": "0"}


def activate() -> None:
    """Make this process launch on the driver. Imports triton, which must not have another driver by then."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    active = CudaDriver()
    active.get_current_target = lambda: GPUTarget("cuda", 90, 32)  # torch would be asked for these four
    active.get_device_capability = lambda device=0: (9, 0)
    active.get_current_device = lambda: 0
    active.get_current_stream = lambda device: 0
    driver.set_active(active)


def launches() -> int:
    """Return how many launches there were."""
    return int(_library().stub_launches())


def launch(number: int) -> Launch:
    """Return the launch of that number, negative from the end; the driver remembers the last 256."""
    count = launches()
    found = _library().stub_launch(number + count if number < 0 else number)
    if not found:
        raise IndexError(f"launch {number} of {count} is not remembered")
    it = found.contents
    grids = tuple(it.grid), tuple(it.block)
    return Launch(it.kernel.decode(), *grids, it.shared, it.stream, tuple(it.params[: it.n_params]))


def note_params(count: int) -> None:
    """From now on note the first `count` parameters, at most 16, of every launch, 8 bytes of each.

    The kernel must have that many; to its own, constexprs left out, Triton adds two scratch pointers.
    """
    _library().stub_note_params(count)


@contextmanager
def as_gpu() -> Iterator[None]:
    """Let the kernels' host code take CPU tensors for those of GPU 0: all that knows its insides is here."""
    from scaler_triton.kernels import launch, trial

    with (
        mock.patch.multiple(trial, unscaling=mock.DEFAULT, clipping=mock.DEFAULT),  # nothing is computed
        mock.patch.object(launch, "check_device"),
        mock.patch.object(launch, "_on", return_value=nullcontext()),
    ):
        yield


@cache
def _library() -> Any:
    """Return the driver that this process has, found as Triton finds it."""
    library = ctypes.CDLL(LIBRARY)
    library.stub_launch.restype = ctypes.POINTER(_Launch)
    library.stub_launch.argtypes = [ctypes.c_uint64]
    library.stub_launches.restype = ctypes.c_uint64
    library.stub_note_params.argtypes = [ctypes.c_uint32]
    return library

"""Finds a GPU's launch configuration: in the user's own tuned file, else in a shipped one, else the default.

Looked up when a table is built; nothing is tuned here. Imports triton only for its version, and only if there is a
GPU.
"""

import functools
import hashlib
import operator
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from scaler_triton.kernels import tuned_file
from scaler_triton.kernels.launch_config import DEFAULT, LaunchConfig, check_pass
from scaler_triton.kernels.tuned_file import Origin

HERE = Path(__file__).parent
SHIPPED = HERE / "tuned"
# The files on which a configuration's speed depends.
SOURCES = ("common.py", "nonfinite.py", "unscale.py")


class Found(NamedTuple):
    """A launch configuration and the file that it comes from; None: it is the default."""

    config: LaunchConfig
    file: Path | None


@functools.cache
def config_for(device: torch.device, mode: str, itemsize: int) -> LaunchConfig:
    """Return the configuration to launch with, looked up once a process.

    A chunk map is made for one configuration: modes with different configurations need a GradTable each.

    Args:
        device: where the gradients lie, with its index; anything but a GPU gets the default.
        mode: "unscale", which writes, or "check", which only reads.
        itemsize: bytes an element: 2, 4 or 8.

    Raises: ValueError naming an unknown mode or element size.
    """
    check_pass(mode, itemsize)
    if device.type != "cuda":
        return DEFAULT
    return lookup(origin_of(device), mode, itemsize).config


def lookup(origin: Origin, mode: str, itemsize: int) -> Found:
    """Return the configuration for a GPU, and where it comes from.

    A user's file must have been made with just this origin; a shipped one for a GPU of this name.
    """
    for path, same in ((user_file(origin), operator.eq), (shipped_file(origin), _same_device)):
        tuned = tuned_file.read(path) if path else None
        if not path or not tuned:
            continue
        if not same(tuned.origin, origin):
            _warn_of_foreign(path, tuned.origin, origin)
        elif (mode, itemsize) in tuned.chosen:
            return Found(tuned.chosen[mode, itemsize], path)
    return Found(DEFAULT, None)


def origin_of(device: torch.device) -> Origin:
    """Return the origin of measurements on a GPU in this process."""
    import triton

    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return Origin(torch.cuda.get_device_name(device), capability, triton.__version__, kernel_hash())


def user_file(origin: Origin) -> Path | None:
    """Return the path of the user's file: one for each GPU, Triton version and version of the kernels."""
    folder = cache_folder()
    stems = map(tuned_file.file_stem, (origin.device, f"triton{origin.triton}", origin.kernels))
    return folder / f"{'-'.join(stems)}.json" if folder else None


def shipped_file(origin: Origin) -> Path:
    """Return the path of a GPU's file in this package."""
    return SHIPPED / f"{tuned_file.file_stem(origin.device)}.json"


def cache_folder() -> Path | None:
    """Return the folder of the user's tuned files, which may not exist; None for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the XDG standard: a relative one is not to be used
        return named / "scaler_triton" / "tuned"
    try:
        return Path.home() / ".cache" / "scaler_triton" / "tuned"
    except RuntimeError:
        return None


@functools.cache
def kernel_hash() -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the kernels' source."""
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


def forget() -> None:
    """Clear the caches, after a file was written."""
    for once in (tuned_file.read, config_for, _warn_of_foreign):
        once.cache_clear()


@functools.cache
def _warn_of_foreign(path: Path, theirs: Origin, ours: Origin) -> None:
    pairs = zip(asdict(theirs).items(), asdict(ours).values(), strict=True)
    apart = ", ".join(f"{name} {its!r}, here {here!r}" for (name, its), here in pairs if its != here)
    warnings.warn(f"the tuned file {path} is ignored, it was made elsewhere: {apart}", RuntimeWarning, stacklevel=2)


def _same_device(theirs: Origin, ours: Origin) -> bool:
    return theirs.device == ours.device

"""The versions of each framework that its integration was tested with."""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion

from scaler_triton.dispatch import stacklevel

# Package -> the oldest and the newest version, with which `make test-oldest` and `make test-frameworks` run.
TESTED = {
    "accelerate": ("1.13.0", "1.15.0"),
    "lightning": ("2.5.0", "2.6.6"),
    "pytorch-lightning": ("2.5.0", "2.6.6"),
    "transformers": ("4.56.0", "5.24.0"),
}

# What PyPI also has by itself, in the same versions.
_PARTS = {"pytorch-lightning": ("lightning-fabric",)}

_warned: set[str] = set()


def check(package: str) -> None:
    """Warn, once a process, if the installed version of `package` is none that was tested.

    Args:
        package: its name on PyPI, one of `TESTED`. A copy that does not tell its version passes.
    """
    for name in (package, *_PARTS.get(package, ())):
        with suppress(PackageNotFoundError):
            _compare(name, version(name), *TESTED[package])
            return


def _compare(name: str, installed: str, oldest: str, newest: str) -> None:
    public = TorchVersion(installed.partition("+")[0])  # who built it, such as +cu130, changes nothing
    if oldest <= public <= newest or name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"{name} {installed} is installed; scaler_triton was tested with {name} {oldest} to {newest}",
        UserWarning,
        stacklevel=stacklevel(),
    )

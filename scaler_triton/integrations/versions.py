"""The versions of each framework that its integration was tested with."""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion

from scaler_triton.core.dispatch import stacklevel

# Package -> the oldest and the newest version, with which `make test-oldest` and `make test-frameworks` run.
TESTED = {
    "accelerate": ("1.13.0", "1.15.0"),
    "lightning": ("2.5.0", "2.6.6"),
    "pytorch-lightning": ("2.5.0", "2.6.6"),
    "transformers": ("4.56.0", "5.24.0"),
}

# Parts that PyPI also has by themselves, in the same versions.
_PARTS = {"pytorch-lightning": ("lightning-fabric",)}

_warned: set[str] = set()


def check(package: str) -> None:
    """Warn, once a process, if the installed version of `package` is not one that was tested.

    Args:
        package: its name on PyPI, one of `TESTED`. A copy without a version passes.
    """
    for name in (package, *_PARTS.get(package, ())):
        with suppress(PackageNotFoundError):
            installed = version(name)
            break
    else:
        return
    oldest, newest = TESTED[package]
    public = TorchVersion(installed.partition("+")[0])  # a build's name, such as +cu130, changes nothing
    if oldest <= public <= newest or name in _warned:
        return
    _warned.add(name)
    text = f"{name} {installed} is installed; scaler_triton was tested with {name} {oldest} to {newest}"
    warnings.warn(text, UserWarning, stacklevel=stacklevel())

"""`patch_torch`: our classes under torch's names, for frameworks that build the scaler themselves."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from scaler_triton import grad_scaler, policy
from scaler_triton.core import ranks
from scaler_triton.core.warning import warn


def _deprecated(kind: str) -> type:
    """Return GradScaler as `torch.cuda.amp` and `torch.cpu.amp` have it: without `device`, and deprecated."""

    class GradScaler(grad_scaler.GradScaler):
        """A GradScaler without `device`, which gives torch's FutureWarning."""

        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
        ) -> None:
            warnings.warn(
                f"`torch.{kind}.amp.GradScaler(args...)` is deprecated. "
                f"Please use `torch.amp.GradScaler('{kind}', args...)` instead.",
                FutureWarning,
                stacklevel=2,
            )
            super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

        def __reduce__(self) -> tuple[Any, ...]:
            # As a plain GradScaler: pickle could not find this class by its name.
            plain = grad_scaler.GradScaler if type(self) is GradScaler else type(self)
            return object.__new__, (plain,), self.__getstate__()

    GradScaler.__qualname__ = "GradScaler"  # as torch's: Composer keys its checkpoints by it
    GradScaler.__init__.__qualname__ = "GradScaler.__init__"  # which Python names in its errors
    return GradScaler


# torch's class -> ours. Taken from our bases, as torch's names may have been replaced by hand already.
_OURS: dict[type[Any], type[Any]] = {
    grad_scaler.GradScaler.__bases__[-1]: grad_scaler.GradScaler,
    torch.cuda.amp.grad_scaler.GradScaler: _deprecated("cuda"),
    torch.cpu.amp.grad_scaler.GradScaler: _deprecated("cpu"),
}
if torch.distributed.is_available():  # else there is no FSDP
    from scaler_triton import ShardedGradScaler

    _OURS[ShardedGradScaler.__bases__[-1]] = ShardedGradScaler

_patches: set[_Patch] = set()  # torch stays patched while there is any


class _Patch(AbstractContextManager[None]):
    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def __enter__(self) -> None:
        if not _patches:
            _rebind(_OURS)
        _hold(_patches | {self})

    def __exit__(self, *exception: object) -> None:
        _end({self})


def patch_torch(*, strict: bool = False) -> AbstractContextManager[None]:
    """Replace torch's gradient scalers by ours, for the whole process.

    `torch.amp.GradScaler`, `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler` and every module of torch
    that re-exports them then refer to `scaler_triton.GradScaler` and `ShardedGradScaler`; `torch.cuda.amp.GradScaler`
    and `torch.cpu.amp.GradScaler` refer to subclasses without `device`, which give torch's FutureWarning. Scalers made
    before keep working, but until the end they cannot be pickled and are not instances of torch's names.

    It lasts until `unpatch_torch` or the end of a `with` block; torch's classes are back when the last of several
    calls has ended. Every process must patch for itself, before it imports what takes torch's classes.

    Args:
        strict: True: as long as this call lasts, a `GradScaler` without `process_group` that finds FSDP1 parameters
            in a world of several ranks raises a RuntimeError naming the fix; False: it warns once.

    Returns: the context manager.

    Raises: TypeError if `strict` is not a bool.

    Warns: ScalerWarning naming the modules outside torch that have imported torch's classes already; they keep them.
    """
    policy.check_bool(strict, "strict")
    if not _patches and (importers := sorted(_importers())):
        warn(
            "ST14",
            f"torch's gradient scalers were imported before patch_torch() by {', '.join(importers)}, and stay there. "
            "Call patch_torch() before importing what imports them.",
        )
    patch = _Patch(strict)
    patch.__enter__()
    return patch


def unpatch_torch() -> None:
    """Restore torch's classes, however often `patch_torch` was called; modules imported meanwhile keep ours."""
    _end(_patches)


def _end(ended: set[_Patch]) -> None:
    if _patches and _patches <= ended:
        _rebind({ours: theirs for theirs, ours in _OURS.items()})
    _hold(_patches - ended)


def _hold(patches: set[_Patch]) -> None:
    global _patches
    _patches = patches
    ranks.strict = any(patch.strict for patch in patches)


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and variables of the imported modules; `vars` would load a lazy one."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            yield name, object.__getattribute__(module, "__dict__")


def _rebind(successors: Mapping[type, type]) -> None:
    """Rebind every name in torch's modules that refers to one of these classes to its successor."""
    known = {id(old): new for old, new in successors.items()}
    for module, names in _modules():
        if module.split(".")[0] == "torch":
            names.update({name: known[id(value)] for name, value in list(names.items()) if id(value) in known})


def _importers() -> set[str]:
    """Return the modules outside torch that have a name for torch's classes, or that define subclasses of them."""
    known = set(map(id, _OURS))
    importers = {module for module, names in _modules() if not known.isdisjoint(map(id, list(names.values())))}
    importers.update(subclass.__module__ for theirs in _OURS for subclass in theirs.__subclasses__())
    return {name for name in importers if name.split(".")[0] not in ("torch", "scaler_triton", "__mp_main__")}

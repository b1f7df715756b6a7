"""`patch_torch`: our classes under torch's names, for frameworks that build the scaler themselves."""

from __future__ import annotations

import copyreg
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import Any

import torch

from scaler_triton import callers, grad_scaler, policy
from scaler_triton.patching import cpu_amp, cuda_amp, stand_in

# torch's class -> ours, by our bases: torch's names may have been replaced by hand already.
_STAND_INS: dict[type, type] = {
    grad_scaler.GradScaler.__bases__[-1]: grad_scaler.GradScaler,
    torch.cuda.amp.grad_scaler.GradScaler: cuda_amp.GradScaler,
    torch.cpu.amp.grad_scaler.GradScaler: cpu_amp.GradScaler,
}
if torch.distributed.is_available():  # else there is no FSDP
    from scaler_triton import sharded

    _STAND_INS[sharded.ShardedGradScaler.__bases__[-1]] = sharded.ShardedGradScaler

_NOT_NAMED = ("torch", "scaler_triton", "__mp_main__")  # the last is multiprocessing's alias of __main__
_LARGEST_TABLE = 100  # entries of a table that are looked through: of a larger one it would take too long

_lock = threading.RLock()  # re-entrant: a warning may run other code
_holds: set[_Hold] = set()


class _Hold(AbstractContextManager[None]):
    """One call of `patch_torch`: torch stays patched while there is any."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def __enter__(self) -> None:
        with _lock:
            if not _holds:
                _warn_of_takers()
            _holds.add(self)
            _settle()

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _holds.discard(self)
            _settle()


def patch_torch(*, strict: bool = False) -> AbstractContextManager[None]:
    """Replace torch's classes by ours, for the whole process.

    `torch.amp.GradScaler`, `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler` and whatever module of
    torch re-exports them become `scaler_triton.GradScaler` and `ShardedGradScaler`; `torch.cuda.amp.GradScaler` and
    `torch.cpu.amp.GradScaler` become subclasses without `device`, which give torch's FutureWarning. Scalers of
    torch's that exist already keep working, can be pickled, and are instances of the new classes.

    Lasts until `unpatch_torch`, or as a context manager until its end: calls may be repeated, nested and made by
    several threads, and torch's classes are back when the last of them has ended. Imports FSDP, which takes half a
    second. Every process patches for itself, and before it imports what takes torch's classes.

    Args:
        strict: True: as long as this call lasts, a `GradScaler` without `process_group` that meets FSDP1
            parameters in a world of several ranks raises a RuntimeError naming the fix; False: it warns once.

    Returns: the context manager.

    Raises: TypeError for another `strict`.

    Warns: UserWarning naming the modules outside torch that have taken torch's classes already; they keep them.
    """
    hold = _Hold(policy.check_bool(strict, "strict"))
    hold.__enter__()
    return hold


def unpatch_torch() -> None:
    """Restore torch's classes, however often `patch_torch` was called; modules imported meanwhile keep ours."""
    with _lock:
        _holds.clear()
        _settle()


def _settle() -> None:
    """Patch or restore torch, according to the calls in force."""
    stand_in.strict = any(hold.strict for hold in _holds)
    if _holds and not stand_in.originals:
        stand_in.originals.update({ours: theirs for theirs, ours in _STAND_INS.items()})
        _rename(_STAND_INS)
        for theirs in _STAND_INS:
            copyreg.pickle(theirs, _reduce)
    elif stand_in.originals and not _holds:
        _rename(stand_in.originals)
        stand_in.originals.clear()
        for theirs in _STAND_INS:
            copyreg.dispatch_table.pop(theirs, None)


def _rename(successors: Mapping[type, type]) -> None:
    """Rebind every name in torch's modules that refers to one of these classes to its successor."""
    known = {id(old): new for old, new in successors.items()}
    for module, names in _modules():
        if module.split(".")[0] == "torch":
            names.update({name: known[id(value)] for name, value in list(names.items()) if id(value) in known})


def _warn_of_takers() -> None:
    takers = sorted(set(filter(_is_named, _takers())))
    if takers:
        warnings.warn(
            f"torch's gradient scalers were taken before patch_torch() by {', '.join(takers)}, and stay there. "
            "Call patch_torch() before importing what takes them.",
            UserWarning,
            stacklevel=callers.stacklevel(),
        )


def _takers() -> Iterator[str]:
    """Yield the names of the modules outside torch that hold torch's classes, or subclasses of them."""
    known = set(map(id, _STAND_INS))
    for module, names in _modules():
        if _is_named(module) and any(id(held) in known for v in list(names.values()) for held in _held_by(v, module)):
            yield module
    for theirs in _STAND_INS:
        subclasses: list[type] = type.__subclasses__(theirs)
        yield from (subclass.__module__ for subclass in subclasses)


def _is_named(module: str) -> bool:
    return module.split(".")[0] not in _NOT_NAMED


def _held_by(value: Any, module: str) -> Iterator[Any]:
    """Yield a value of a module; also a small table's entries, a function's defaults, a class's attributes.

    By the exact type: isinstance() would wake proxies.
    """
    yield value
    kind = type(value)
    if kind in (dict, list, tuple):
        if len(value) <= _LARGEST_TABLE:
            yield from list(value.values() if kind is dict else value)
    elif kind is FunctionType:
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif type in kind.__mro__ and type.__getattribute__(value, "__module__") == module:
        yield from list(type.__getattribute__(value, "__dict__").values())


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            # vars() would load a lazy module.
            yield name, object.__getattribute__(module, "__dict__")


def _reduce(scaler: Any) -> tuple[Any, ...]:
    """Pickle a scaler of torch's own class, whose name refers to ours meanwhile."""
    return _new_original, (type(scaler).__module__,), scaler.__getstate__()


def _new_original(module: str) -> Any:
    theirs = next(cls for cls in _STAND_INS if cls.__module__ == module)
    return object.__new__(theirs)

"""`patch_torch`: our classes under torch's names, for frameworks that build the scaler themselves."""

from __future__ import annotations

import copyreg
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from scaler_triton import callers, grad_scaler, policy
from scaler_triton.patching import cpu_amp, cuda_amp, stand_in, takers

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
    for module, names in takers.modules():
        if module.split(".")[0] == "torch":
            names.update({name: known[id(value)] for name, value in list(names.items()) if id(value) in known})


def _warn_of_takers() -> None:
    named = sorted(set(filter(_is_named, _takers())))
    if named:
        warnings.warn(
            f"torch's gradient scalers were taken before patch_torch() by {', '.join(named)}, and stay there. "
            "Call patch_torch() before importing what takes them.",
            UserWarning,
            stacklevel=callers.stacklevel(),
        )


def _takers() -> Iterator[str]:
    """Yield the names of the modules outside torch that hold torch's classes, or subclasses of them."""
    known = set(map(id, _STAND_INS))
    for module, names in takers.modules():
        if _is_named(module) and takers.holds(names, module, known):
            yield module
    for theirs in _STAND_INS:
        subclasses: list[type] = type.__subclasses__(theirs)
        yield from (subclass.__module__ for subclass in subclasses)


def _is_named(module: str) -> bool:
    return module.split(".")[0] not in _NOT_NAMED


def _reduce(scaler: Any) -> tuple[Any, ...]:
    """Pickle a scaler of torch's own class, whose name refers to ours meanwhile."""
    return _new_original, (type(scaler).__module__,), scaler.__getstate__()


def _new_original(module: str) -> Any:
    theirs = next(cls for cls in _STAND_INS if cls.__module__ == module)
    return object.__new__(theirs)

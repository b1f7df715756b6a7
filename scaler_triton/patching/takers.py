"""Which modules hold a class: by a name of theirs, or within a table, a function, a partial or a class of their own."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import Field
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

_LARGEST_TABLE = 100  # entries of a table that are looked through: of a larger one it would take too long
_DEPTH = 3  # such as a class, its fields, one of them, its factory


def modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the variables of the modules that are loaded."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            # vars() would load a lazy module.
            yield name, object.__getattribute__(module, "__dict__")


def holds(variables: dict[str, Any], module: str, classes: Collection[int]) -> bool:
    """Tell whether a module's variables lead to a class.

    Args:
        classes: the ids of those that count.
    """
    return any(_leads_to(classes, value, module, _DEPTH) for value in list(variables.values()))


def _leads_to(classes: Collection[int], value: Any, module: str, depth: int) -> bool:
    if id(value) in classes:
        return True
    return depth > 0 and any(_leads_to(classes, part, module, depth - 1) for part in _parts(value, module))


def _parts(value: Any, module: str) -> Iterable[Any]:
    """Return what a value of a module holds. By the exact type: isinstance() would wake proxies."""
    kind = type(value)
    if kind in (dict, list, tuple):
        return list(value.values() if kind is dict else value) if len(value) <= _LARGEST_TABLE else ()
    if kind is FunctionType:
        return (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_closed_over(value))
    if kind is partial:
        return (value.func, *value.args, *value.keywords.values())
    if kind in (staticmethod, classmethod):
        return (value.__func__,)
    if kind is Field:
        return (value.default_factory,)
    if type in kind.__mro__ and type.__getattribute__(value, "__module__") == module:
        return list(type.__getattribute__(value, "__dict__").values())
    return ()


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents

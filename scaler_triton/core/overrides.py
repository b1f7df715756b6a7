"""Which of torch's private methods a subclass replaces: those are called where torch's class calls them."""

from __future__ import annotations

from typing import Any

OVERRIDABLE = frozenset(("unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step"))
_own: set[Any] = set()  # our own functions of these names
_by_class: dict[type, frozenset[str]] = {}


def overrides(scaler: Any) -> frozenset[str]:
    """Return which of the overridable methods a scaler's class, as it was when first asked, or the object replaces."""
    cls = type(scaler)
    if cls not in _by_class:
        _by_class[cls] = frozenset(name for name in OVERRIDABLE if getattr(cls, name) not in _own)
    if OVERRIDABLE.isdisjoint(vars(scaler)):
        return _by_class[cls]
    return _by_class[cls].union(OVERRIDABLE.intersection(vars(scaler)))


def own(cls: type) -> None:
    """Note the overridable methods of one of our classes."""
    _own.update(vars(cls)[name] for name in OVERRIDABLE & vars(cls).keys())

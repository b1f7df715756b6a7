"""What a scaler reads from optimizers: the one in a wrapper, the parameters, whether `step` unscales by itself."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WRAPPERS = 32  # around one optimizer at most; more are taken for a cycle

_takes_scaler: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers that keep it as `.optimizer` and share its `param_groups`."""
    outermost = optimizer
    for _ in range(_WRAPPERS):
        try:
            inner = getattr(optimizer, "optimizer", None)
            if inner is None or inner is optimizer or not _same_groups(inner.param_groups, optimizer.param_groups):
                return optimizer
        except Exception:  # an unrelated property
            return optimizer
        optimizer = inner
    return outermost


def _same_groups(groups: Any, others: Any) -> bool:
    """Tell whether the groups hold the same lists of parameters.

    A container of optimizers puts its groups into a new list each time; `load_state_dict` keeps only the parameters'.
    """
    if groups is others:
        return True
    pairs = itertools.zip_longest(groups, others)
    return all(mine is theirs or mine["params"] is theirs["params"] for mine, theirs in pairs)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in order; the list may be the optimizer's own, do not write it."""
    groups = optimizer.param_groups
    if type(groups) is list and len(groups) == 1 and type(groups[0]["params"]) is list:
        return groups[0]["params"]
    return [parameter for group in groups for parameter in group["params"]]


def checked_parameters(parameters: list[Tensor]) -> list[Tensor]:
    """Return `parameters`.

    Raises: AssertionError with torch's text if one is not a tensor.
    """
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
    return parameters


def weak(optimizer: Any, forget: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """Return a weak reference, or a strong one to an object that has no weak ones."""
    try:
        return weakref.ref(optimizer, forget)
    except TypeError:
        return lambda: optimizer


def skip_would_corrupt(optimizer: Any) -> bool:
    """Tell whether a skipped fused step would leave garbage behind: SGD's first one with momentum.

    torch's fused SGD allocates momentum buffers without initialising them, its kernel then skips, and the next step
    reads them. Such a step must not be called.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("fused") and group.get("momentum")  # a subclass may have other options
        for parameter in group["params"]
    )


def supports_amp_scaling(optimizer: Any) -> bool:
    """Tell whether `optimizer.step` unscales and skips by itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_factor(optimizer: Any) -> bool:
    """Tell whether `optimizer.step` divides gradients by its attribute `grad_scale`, whatever that is."""
    return supports_amp_scaling(optimizer) and not takes_scaler(optimizer)


def takes_scaler(optimizer: Any) -> bool:
    """Tell whether `optimizer.step` takes the scaler as an argument `grad_scaler`, the older way; cached."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        known = _takes_scaler.get(step)
    except TypeError:  # a callable without weak references
        return _has_grad_scaler(step)
    if known is None:
        known = _takes_scaler[step] = _has_grad_scaler(step)
    return known


def _has_grad_scaler(function: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(function).parameters

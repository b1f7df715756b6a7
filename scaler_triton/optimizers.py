"""What optimizers do with a scaler: wrappers around them, scale and flag lent to fused ones, one trap."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers that keep it as `.optimizer` and share its `param_groups`."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer or getattr(inner, "param_groups", None) is not optimizer.param_groups:
            return optimizer
        optimizer = inner


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of everything with `param_groups`, in order.

    Raises: AssertionError with torch's text if one is not a tensor.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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


@contextmanager
def lent(optimizer: Any, scale: Tensor | None, found_inf: Tensor) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` on a fused optimizer while it steps.

    A `grad_scale` of the user's is multiplied in, and used up by the step: it is put back only if the step raised.

    Args:
        scale: fp32, one element; None if the gradients are unscaled already.
        found_inf: fp32, shape (), 0.0 or 1.0.
    """
    own = getattr(optimizer, "grad_scale", None)
    had_own = hasattr(optimizer, "grad_scale")
    if scale is not None:
        optimizer.grad_scale = scale.reshape(()) if own is None else scale.reshape(()) * own
    elif not had_own:
        optimizer.grad_scale = None
    optimizer.found_inf = found_inf
    try:
        yield
    except BaseException:
        _take_back(optimizer)
        if had_own:
            optimizer.grad_scale = own
        raise
    _take_back(optimizer)


def skip_would_corrupt(optimizer: Any) -> bool:
    """Tell whether a skipped fused step would leave garbage behind: SGD's first one with momentum.

    torch's fused SGD makes its momentum buffers uninitialised before the kernel decides to skip, and uses them in
    the next step. Such a step must not be called at all.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
    )


def _take_back(optimizer: Any) -> None:
    for name in ("grad_scale", "found_inf"):
        if hasattr(optimizer, name):
            delattr(optimizer, name)

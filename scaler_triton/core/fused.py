"""The step of a fused optimizer, which divides and skips by itself.

Newer ones, such as torch's with `fused=True`, read `grad_scale` and `found_inf` from their attributes. Older ones, such
as apex's, take the scaler as an argument and ask it for both.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from scaler_triton.core.dispatch import stacklevel
from scaler_triton.core.flag import any_flag
from scaler_triton.core.step import UNSCALED, OptimizerStep

CLAIM = "_step_supports_amp_scaling"  # what an optimizer has that divides and skips by itself
_CPU = torch.device("cpu")
_torchs: Any = sys.modules["torch.optim.optimizer"]  # `torch.optim.optimizer` is shadowed


def step_fused(
    step: OptimizerStep,
    optimizer: Any,
    scale: Tensor,
    exposed: bool,
    stream: Callable[[], int | None],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call the step of an optimizer whose gradients are checked, without a host wait.

    Args:
        step: the optimizer's; `outcome` is written, and the flag's reader.
        optimizer: divides its gradients, unless they are UNSCALED, and skips by the flag.
        scale: one element, read by the optimizer.
        exposed: whether other code may have written the flag.
        stream: returns the handle of the current stream; None where no kernel updates the scale.
        args, kwargs: for the optimizer's step.
    """
    divides = step.phase is not UNSCALED  # by its own kernels
    flag, flags = step.own_flag() if exposed else step.flag, step["found_inf_per_device"]
    # Other code may have written it, such as a sum over ranks: make it 0 or 1 again.
    found_inf = any_flag(flags.values(), scale.device) if flag is None or exposed else flag.found_inf
    inner = step.owner()
    if isinstance(inner, SGD) and _skip_would_corrupt(inner) and found_inf.item():
        remove_scale(optimizer, inner)
        step.outcome = True if flag is None else flag
        return None
    if flag is not None:
        flag.reader = stream()
    on_host = not scale.is_cpu and _CPU in flags
    factor = (scale.reshape(()) if scale.ndim else scale) if divides else None
    step.outcome = found_inf if flag is None else flag  # hooks of the optimizer may ask for it
    return _step_with_scale(optimizer, inner, factor, found_inf, on_host, args, kwargs)


def step_by_argument(scaler: Any, step: OptimizerStep, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Step an older optimizer, which gets the `scaler` itself and asks it for the flag of the check that was made."""
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the passed "
        "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them directly.",
        FutureWarning,
        stacklevel=stacklevel(),
    )
    result = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    flags = step["found_inf_per_device"]
    step.outcome = step.own_flag() or any_flag(flags.values(), scaler._scale.device)
    return result


def way_of(step: OptimizerStep, optimizer: Any) -> str:
    """Return how an optimizer that claims to be fused gets scale and flag; "": not at all, as the claim is not its own.

    "attributes": it reads `grad_scale` and `found_inf`. "argument": older ones are given the scaler. A wrapper may
    forward the claim of an optimizer that is hidden in it.
    """
    function = getattr(optimizer.step, "__func__", optimizer.step)
    seen_function, way = step.notes.get("function", (_nothing, ""))
    if seen_function() is not function:
        is_its_own = CLAIM in getattr(optimizer, "__dict__", {}) or hasattr(type(optimizer), CLAIM)
        if not is_its_own and step.owner() is optimizer:
            way = ""
        else:
            way = "argument" if "grad_scaler" in inspect.signature(function).parameters else "attributes"
        with suppress(TypeError):  # no weak references to it: it is inspected in each step
            step.notes["function"] = weakref.ref(function), way  # it may hold the optimizer
    return str(way)


def _nothing() -> None:
    """Stand for a function that is not known."""


def _skip_would_corrupt(optimizer: SGD) -> bool:
    """Return whether a skipped fused step would corrupt later ones, as SGD's first one with momentum does.

    torch's fused SGD allocates momentum buffers without initialising them; the next step reads them after a skip.
    """
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("fused") and group.get("momentum")  # a subclass may have other options
        for parameter in group["params"]
    )


def _step_with_scale(
    optimizer: Any, inner: Any, scale: Tensor | None, found_inf: Tensor, on_host: bool, args: Any, kwargs: Any
) -> Any:
    """Call `optimizer.step(*args, **kwargs)` with `grad_scale` and `found_inf` set on both optimizers.

    A `grad_scale` that the user has set is multiplied in and removed after the step; it is restored if the step raised.
    An optimizer with parameters on the CPU gets copies there, after a wait (`on_host`): torch's fused ones copy both to
    each device without waiting, and their CPU kernels would read before the copy has arrived.
    """
    own = getattr(optimizer, "grad_scale", None)
    if own is scale:  # left behind by an interrupted step
        own = None
    product = own if scale is None else scale if own is None else scale * own
    if on_host or not _only_reads(inner):
        copied = Tensor.cpu if on_host else Tensor.clone
        product, found_inf = copied(product) if isinstance(product, Tensor) else product, copied(found_inf)
    try:
        for target in (optimizer,) if optimizer is inner else (optimizer, inner):
            target.grad_scale, target.found_inf = product, found_inf
        result = optimizer.step(*args, **kwargs)
        own = None  # it was for this step
    finally:
        remove_scale(optimizer, inner)
        if own is not None:
            inner.grad_scale = own
    return result


def remove_scale(optimizer: Any, inner: Any) -> None:
    """Delete `grad_scale` and `found_inf`; the user's `grad_scale`, too, is for one step, even if that is skipped."""
    for target in (optimizer,) if optimizer is inner else (optimizer, inner):
        attributes = getattr(target, "__dict__", {})  # a wrapper may forward the inner one's, and a class have some
        attributes.pop("grad_scale", None)
        attributes.pop("found_inf", None)


def _only_reads(optimizer: Any) -> bool:
    """Return whether a fused step only reads its scale and flag: one of torch's own, without hooks."""
    try:  # these names are private to torch
        return type(optimizer).__module__.startswith("torch.optim.") and not (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _torchs._global_optimizer_pre_hooks
            or _torchs._global_optimizer_post_hooks
        )
    except AttributeError:
        return False

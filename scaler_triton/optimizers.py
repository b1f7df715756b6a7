"""What a scaler asks of optimizers: what is in a wrapper, which parameters; how fused ones get scale and flag."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_WRAPPERS = 32  # around one optimizer; if there seem to be more, they hold each other

_takes_scaler: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer behind wrappers that keep it as `.optimizer` and share its `param_groups`."""
    outermost = optimizer
    for _ in range(_WRAPPERS):
        try:
            inner = getattr(optimizer, "optimizer", None)
        except Exception:  # a property of another meaning
            return optimizer
        if inner is None or inner is optimizer or getattr(inner, "param_groups", None) is not optimizer.param_groups:
            return optimizer
        optimizer = inner
    return outermost


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of everything with `param_groups`, in order; not to be written."""
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


@contextmanager
def lent(
    optimizers: Sequence[Any], scale: Tensor | None, found_inf: Tensor, *, on_host: bool = False
) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` on a fused optimizer while it steps.

    A `grad_scale` of the user's is multiplied in, and used up by the step: it is put back only if the step raised.

    Args:
        optimizers: the one that is stepped and, if that is a wrapper, the one inside: either may look.
        scale: fp32, shape (); None if the gradients are unscaled already.
        found_inf: fp32, shape (), 0.0 or 1.0. Like `scale` lent itself only to who does not write into it.
        on_host: lend copies on the CPU, waited for, as an optimizer with parameters there needs them: torch's fused
            ones copy both to every device they step on, and their CPU kernels read before such a copy is there.
    """
    own = getattr(optimizers[0], "grad_scale", None)
    factors = [factor for factor in (scale, own) if factor is not None]
    product = _product(factors)
    if on_host:
        product, found_inf = product.cpu() if isinstance(product, Tensor) else product, found_inf.cpu()
    elif not _only_reads(optimizers[-1]):
        product, found_inf = product.clone() if isinstance(product, Tensor) else product, found_inf.clone()
    _set(optimizers, grad_scale=product, found_inf=found_inf)
    try:
        yield
    except BaseException:
        take_back(optimizers)
        if own is not None:
            optimizers[-1].grad_scale = own
        raise
    take_back(optimizers)


def _only_reads(optimizer: Any) -> bool:
    """Tell whether a fused step leaves what it is lent as it is: one of torch's own, without anybody's hooks."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    everywhere = sys.modules["torch.optim.optimizer"]  # its name in torch.optim is something else
    return not (  # torch promises none of these names: without one nobody knows
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(everywhere, "_global_optimizer_pre_hooks", True)
        or getattr(everywhere, "_global_optimizer_post_hooks", True)
    )


def take_back(optimizers: Sequence[Any]) -> None:
    """Drop what optimizers were lent, and a `grad_scale` of the user's: a step uses it up, also one that is skipped."""
    for optimizer in optimizers:
        for name in ("grad_scale", "found_inf"):
            try:
                delattr(optimizer, name)
            except AttributeError:  # the other one's, seen through the wrapper, or a class attribute
                continue


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


def supports_amp_scaling(optimizer: Any) -> bool:
    """Tell whether `optimizer.step` unscales and skips by itself, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_factor(optimizer: Any) -> bool:
    """Tell whether `optimizer.step` divides gradients by whatever `grad_scale` it is lent; not by the scaler's own."""
    return supports_amp_scaling(optimizer) and not takes_scaler(optimizer)


def takes_scaler(optimizer: Any) -> bool:
    """Tell whether `optimizer.step` wants the scaler as `grad_scaler`, the older way; asked of each function once."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        known = _takes_scaler.get(step)
    except TypeError:  # a callable that nothing can refer to weakly
        return _has_grad_scaler(step)
    if known is None:
        known = _takes_scaler[step] = _has_grad_scaler(step)
    return known


def _product(factors: Sequence[Tensor]) -> Tensor | None:
    if not factors:
        return None
    return factors[0] if len(factors) == 1 else factors[0] * factors[1]


def _set(optimizers: Sequence[Any], **attributes: Any) -> None:
    for optimizer in optimizers:
        for name, value in attributes.items():
            try:  # `suppress` would cost more than all the rest
                setattr(optimizer, name, value)
            except AttributeError:  # a wrapper with slots: the one inside has them
                continue


def _has_grad_scaler(function: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(function).parameters

"""Sets `grad_scale` and `found_inf` on a fused optimizer for the duration of its step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def lent(
    optimizers: Sequence[Any], scale: Tensor | None, found_inf: Tensor, *, on_host: bool = False
) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` on a fused optimizer while it steps.

    A `grad_scale` that the user has set is multiplied in and removed after the step; it is restored if the step raised.

    Args:
        optimizers: the one that is stepped and, if that is a wrapper, the one inside: either may read them.
        scale: fp32, shape (); None if the gradients are unscaled already.
        found_inf: fp32, shape (), 0.0 or 1.0. Like `scale`, cloned unless the optimizer is known not to write it.
        on_host: lend copies on the CPU, waited for, to an optimizer with parameters there: torch's fused ones copy both
            to each device without waiting, and their CPU kernels read before the copy has arrived.
    """
    own = getattr(optimizers[0], "grad_scale", None)
    product = own if scale is None else scale if own is None else scale * own
    if on_host:
        product, found_inf = product.cpu() if isinstance(product, Tensor) else product, found_inf.cpu()
    elif not _only_reads(optimizers[-1]):
        product, found_inf = product.clone() if isinstance(product, Tensor) else product, found_inf.clone()
    try:
        _set(optimizers, grad_scale=product, found_inf=found_inf)
        yield
    except BaseException:
        take_back(optimizers)
        if own is not None:
            optimizers[-1].grad_scale = own
        raise
    take_back(optimizers)


def _only_reads(optimizer: Any) -> bool:
    """Tell whether a fused step does not write what it is lent: one of torch's own, without hooks."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    everywhere = sys.modules["torch.optim.optimizer"]  # torch.optim.optimizer is shadowed
    return not (  # private to torch: if one is missing, there may be hooks
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(everywhere, "_global_optimizer_pre_hooks", True)
        or getattr(everywhere, "_global_optimizer_post_hooks", True)
    )


def take_back(optimizers: Sequence[Any]) -> None:
    """Delete `grad_scale` and `found_inf`, also a `grad_scale` of the user's: it is for one step, even if skipped."""
    for optimizer in optimizers:
        for name in ("grad_scale", "found_inf"):
            try:
                delattr(optimizer, name)
            except AttributeError:  # the inner one's, seen through the wrapper, or a class attribute
                continue


def _set(optimizers: Sequence[Any], **attributes: Any) -> None:
    for optimizer in optimizers:
        for name, value in attributes.items():
            try:  # `suppress` would cost more than the rest of this function
                setattr(optimizer, name, value)
            except AttributeError:  # a wrapper with slots: the one inside has them
                continue

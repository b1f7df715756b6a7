"""What `clip_grad_norm_` was given, checked before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from scaler_triton.clipping import norms


def checked_optimizers(optimizers: Any) -> list[Any]:
    """Return one optimizer or several as a list.

    Raises: TypeError naming `optimizers` for what has no `param_groups`.
    """
    if hasattr(optimizers, "param_groups"):
        return [optimizers]
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in several:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizers must be an optimizer or several of them, got {type(each).__name__}")
    return several


def chosen_ids(parameters: Iterable[Tensor] | Tensor | None) -> set[int] | None:
    """Return the ids of the parameters, None for None: all of them.

    Raises: TypeError naming `parameters` for what is no tensor.
    """
    if parameters is None:
        return None
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters must be tensors, such as those of {type(parameters).__name__}.parameters()")
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for each in chosen:
        if not isinstance(each, Tensor):  # such as the pairs of named_parameters()
            raise TypeError(f"parameters must be tensors, got {type(each).__name__}")
    return {id(each) for each in chosen}


def check_model(model: Any) -> None:
    """Raise TypeError naming `model` for what is neither a module nor None."""
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a module, got {type(model).__name__}")


def checked_norm_type(max_norm: float, norm_type: float) -> float:
    """Return the order of the norm as a float.

    Raises: ValueError or TypeError naming `max_norm` or `norm_type` for what is no bound or no order.
    """
    try:
        is_bound = bool(max_norm >= 0)  # False for NaN
    except (TypeError, ValueError, RuntimeError):  # the last two: of several numbers
        raise TypeError(f"max_norm must be a number, got {max_norm!r}") from None
    if not is_bound:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    order = norms.order_of(norm_type)
    if math.isnan(order) or order <= 0:
        raise ValueError(f"norm_type must be > 0, got {norm_type!r}")
    return order

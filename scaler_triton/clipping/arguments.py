"""The arguments of `clip_grad_norm_`, checked before any gradient is written."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

from torch import Tensor, nn

from scaler_triton import callers, policy
from scaler_triton.optimizers import parameters_of, unwrap
from scaler_triton.text import one_line

_NOT_HELD = (
    "No optimizer holds any of `parameters`, no gradient clipping will occur. Were they taken before FSDP replaced "
    "the model's?"
)


class Request(NamedTuple):
    """A checked call of `clip_grad_norm_`.

    Args:
        max_norm, norm_type, error_if_nonfinite, model: as `clip_grad_norm_` takes them.
        chosen: the ids of the parameters that are clipped; None: all.
    """

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    model: nn.Module | None
    chosen: set[int] | None

    @property
    def is_whole(self) -> bool:
        """Whether the 2-norm of all gradients is asked for, which the checking pass can compute."""
        return self.chosen is None and self.norm_type == 2.0


def checked_optimizers(optimizers: Any) -> list[Any]:
    """Return one optimizer or several as a list.

    Raises: TypeError naming `optimizers` for what has no `param_groups`; ValueError for none, or one of them twice.
    """
    if hasattr(optimizers, "param_groups"):
        return [optimizers]
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in several:
        if not hasattr(each, "param_groups"):
            hint = "; to clip some parameters only, pass parameters=" if isinstance(each, Tensor) else ""
            raise TypeError(f"optimizers must be an optimizer or several of them, got {type(each).__name__}{hint}")
    if len({id(unwrap(each)) for each in several}) != len(several) or not several:
        raise ValueError(f"optimizers must be one or more, none of them twice, got {len(several)}")
    return several


def checked_request(
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    model: nn.Module | None,
    parameters: Iterable[Tensor] | Tensor | None,
    optimizers: Sequence[Any],
) -> Request:
    """Return the request; warn if `parameters` are none of the optimizers'.

    Raises: ValueError or TypeError naming what cannot be.
    """
    chosen = _chosen_ids(parameters, optimizers)
    bound, order = _checked_bound(max_norm), policy.check_norm_type(norm_type, positive=True)
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    return Request(bound, order, error_if_nonfinite, model, chosen)


def _chosen_ids(parameters: Iterable[Tensor] | Tensor | None, optimizers: Sequence[Any]) -> set[int] | None:
    if parameters is None:
        return None
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters must be tensors, such as those of {type(parameters).__name__}.parameters()")
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    chosen: list[Any] = list(parameters) if several else [parameters]
    for each in chosen:
        if not isinstance(each, Tensor):  # such as the pairs of named_parameters()
            raise TypeError(f"parameters must be tensors, got {type(each).__name__}")
    if not chosen and isinstance(parameters, GeneratorType):  # probably consumed before
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=callers.stacklevel()
        )
    ids = {id(each) for each in chosen}
    trained = any(each.requires_grad for each in chosen)  # frozen ones are in no optimizer
    held = (id(parameter) for each in optimizers for parameter in parameters_of(unwrap(each)))
    if trained and ids.isdisjoint(held):
        warnings.warn(_NOT_HELD, stacklevel=callers.stacklevel())
    return ids


def _checked_bound(max_norm: float) -> float:
    try:
        is_bound = bool(max_norm >= 0)  # False for NaN
        bound = float(max_norm)  # raises for arrays and huge ints
    except (TypeError, ValueError, RuntimeError):  # the last two: of several numbers
        raise TypeError(f"max_norm must be a number, got {one_line(repr(max_norm))}") from None
    if not is_bound:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    return bound

"""The quickest way to tell that this step's gradients look like those that were checked before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_Check = Callable[..., bool]

# How often a guard is made anew. Some fail for reasons that do not matter here, at every step perhaps, and making one
# costs more than a comparison by hand.
_PATIENCE = 16


def _guard(tensors: Sequence[Tensor]) -> _Check | None:
    """Return a check for type, dtype, device, sizes and strides of as many tensors; None where torch has none.

    torch's own, private guards take 40 ns a tensor, the public way 500.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        check: _Check = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None


class KnownForms:
    """The forms that gradients had when they were checked; keeps no gradient.

    It may say no to gradients of a known form, and always does where torch's guards are missing: then they are
    compared by hand.

    Args:
        size: how many gradients there are, those that are missing counted in.
    """

    def __init__(self, size: int) -> None:
        self._all: _Check | None = None
        self._each: list[_Check | None] = [None] * size
        self._patience = _PATIENCE

    def all_there(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tell that none of the gradients is missing and each has the form it had."""
        return self._all is not None and bool(gradients) and self._all(*gradients)

    def hold(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tell that each gradient has the form it had, or is missing."""
        for gradient, check in zip(gradients, self._each, strict=True):
            if gradient is not None and (check is None or not check(gradient)):
                return False
        return True

    def learn(self, gradients: Sequence[Tensor | None]) -> None:
        """Take these gradients' forms, which were checked, for known."""
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            if self._has_patience():
                self._all = _guard(present)
            return
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._learn_one(index, gradient)

    def forget(self) -> None:
        """Take no form for known."""
        self._all, self._each, self._patience = None, [None] * len(self._each), _PATIENCE

    def _learn_one(self, index: int, gradient: Tensor) -> None:
        check = self._each[index]
        if check is None or (not check(gradient) and self._has_patience()):
            self._each[index] = _guard([gradient])

    def _has_patience(self) -> bool:
        self._patience = max(0, self._patience - 1)
        return self._patience > 0

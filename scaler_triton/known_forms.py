"""KnownForms: a quick check, by torch's guards, that gradients have the types, shapes and strides checked before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_Check = Callable[..., bool]

# How often a guard is made anew. Some fail for reasons that do not matter here, perhaps at every step, and making one
# costs more than comparing without.
_PATIENCE = 16


def _guard(tensors: Sequence[Tensor]) -> _Check | None:
    """Return a check of type, dtype, device, sizes and strides of a list of tensors; None where torch has none.

    torch's own, private guards take 40 ns a tensor, the public way 500.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        check: _Check = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None


class KnownForms:
    """The forms (type, dtype, device, shape, strides) that gradients had when they were checked; keeps no gradient.

    A match is reliable. A mismatch may be wrong, and is the only answer where torch's guards are missing: the plan then
    compares the forms itself.

    Args:
        size: the number of gradients, missing ones included.
    """

    def __init__(self, size: int) -> None:
        self._all: _Check | None = None
        self._each: list[_Check | None] = [None] * size
        self._patience = _PATIENCE

    def match_all(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tell whether no gradient is missing and all have the forms that they had."""
        return self._all is not None and bool(gradients) and self._all(*gradients)

    def match_present(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tell whether every gradient is missing or has the form that it had."""
        for gradient, check in zip(gradients, self._each, strict=True):
            if gradient is not None and (check is None or not check(gradient)):
                return False
        return True

    def learn(self, gradients: Sequence[Tensor | None]) -> None:
        """Remember the forms of these gradients, which were checked."""
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            if self._has_patience():
                self._all = _guard(present)
            return
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._learn_one(index, gradient)

    def forget(self) -> None:
        """Forget all forms."""
        self._all, self._each, self._patience = None, [None] * len(self._each), _PATIENCE

    def _learn_one(self, index: int, gradient: Tensor) -> None:
        check = self._each[index]
        if check is None or (not check(gradient) and self._has_patience()):
            self._each[index] = _guard([gradient])

    def _has_patience(self) -> bool:
        self._patience = max(0, self._patience - 1)
        return self._patience > 0

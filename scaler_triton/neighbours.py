"""Tensors that touch in memory, merged: an op on a list pays for each of its tensors, however small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

# Among so many tensors neighbours show if there are any: buckets hold whole runs of them.
_FEW = 4
# Where there are none, they are looked for again after so many calls: DDP makes its buckets anew after the first step.
_PAUSE = 15


class Neighbours:
    """Which of a list's tensors touch, remembered from step to step by how far apart they lie.

    DDP's bucket views and FSDP1's views of a flat gradient are such neighbours, in whatever order. Only exact
    adjacency counts: a gap belongs to somebody. Where the first few have no neighbours, none are looked for.

    An object serves one list: sizes, strides and dtype of its tensors, one dtype in all, stay what they were.
    """

    def __init__(self) -> None:
        self._pause = 0
        self._offsets: np.ndarray | None = None
        self._runs: list[tuple[int, int]] = []  # the position of its first tensor, and its elements in all

    def merged(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the same memory in fewer tensors: neighbours in one storage become one flat view."""
        if self._pause:
            self._pause -= 1
            return tensors
        if self._offsets is None and not self._first_few_touch(tensors):
            return tensors
        starts = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        offsets = starts - starts[0]
        if self._offsets is None or not np.array_equal(offsets, self._offsets):
            self._find(tensors)
            self._offsets = offsets
        try:
            return [_flat(tensors[first], numel) for first, numel in self._runs]
        except RuntimeError:  # as far apart as before, but not in one storage
            self._offsets = None
            return tensors

    def _first_few_touch(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether there are neighbours among the first few; without any, some calls will not look."""
        found = len(tensors) > 1 and bool(_joints(sorted(tensors[:_FEW], key=Tensor.data_ptr)))
        self._pause = 0 if found else _PAUSE
        return found

    def _find(self, tensors: Sequence[Tensor]) -> None:
        order = sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr())
        inner = _joints([tensors[index] for index in order])
        begins = [place for place in range(len(order)) if place not in inner]
        numels = [tensors[index].numel() for index in order]
        spans = pairwise([*begins, len(order)])
        # The elements of a lone tensor are left to it: it need not be contiguous.
        self._runs = [(order[begin], sum(numels[begin:end]) if end > begin + 1 else -1) for begin, end in spans]


def _flat(first: Tensor, numel: int) -> Tensor:
    return first if numel < 0 else first.detach().as_strided((numel,), (1,), first.storage_offset())


def _joints(tensors: Sequence[Tensor]) -> set[int]:
    """Return the positions of tensors that begin where the one before them ends."""
    itemsize = tensors[0].element_size()
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [start + tensor.numel() * itemsize for start, tensor in zip(starts, tensors, strict=True)]
    touching = [index for index in range(1, len(tensors)) if starts[index] == ends[index - 1]]
    return {index for index in touching if _same_span(tensors[index - 1], tensors[index])}


def _same_span(left: Tensor, right: Tensor) -> bool:
    return left.is_contiguous() and right.is_contiguous() and left.numel() > 0 and _storage(left) == _storage(right)


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()

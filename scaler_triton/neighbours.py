"""Merges tensors that are adjacent in memory: a foreach op costs something for each tensor, however small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor

# If any tensors are adjacent, some among the first few are: buckets are filled in order.
_FEW = 4
# Where there are none, calls until the next search: DDP rebuilds its buckets after the first step.
_PAUSE = 15


class Neighbours:
    """Which tensors of a list are adjacent, cached for as long as their distances in memory stay the same.

    DDP's bucket views and FSDP1's views of a flat gradient are adjacent, in whatever order. Only exact adjacency
    counts: a gap may be another tensor. If none of the first few are adjacent, the rest is not searched.

    Each object is for one list: its tensors have one dtype, and sizes and strides that do not change.
    """

    def __init__(self) -> None:
        self._pause = 0
        self._offsets: np.ndarray | None = None
        self._runs: list[tuple[int, int]] = []  # of each: the index of its first tensor, and its number of elements

    def merged(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the same memory as fewer tensors: adjacent ones in one storage become one flat view."""
        if self._pause:
            self._pause -= 1
            return tensors
        if self._offsets is None and not self._first_few_touch(tensors):
            return tensors
        starts = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        offsets = starts - starts[0]
        if self._offsets is None or not np.array_equal(offsets, self._offsets):
            self._offsets = None  # if the search is interrupted, the runs are not those of the offsets before
            self._find(tensors)
            self._offsets = offsets
        try:
            return [_flat(tensors[first], numel) for first, numel in self._runs]
        except RuntimeError:  # same distances, but not one storage any more
            self._offsets = None
            return tensors

    def _first_few_touch(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether any of the first few are adjacent; if not, pause the search for some calls."""
        found = len(tensors) > 1 and bool(_joints(sorted(tensors[:_FEW], key=Tensor.data_ptr)))
        self._pause = 0 if found else _PAUSE
        return found

    def _find(self, tensors: Sequence[Tensor]) -> None:
        order = sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr())
        inner = _joints([tensors[index] for index in order])
        begins = [place for place in range(len(order)) if place not in inner]
        numels = [tensors[index].numel() for index in order]
        spans = pairwise([*begins, len(order)])
        # -1: a tensor by itself, which need not be contiguous and stays as it is.
        self._runs = [(order[begin], sum(numels[begin:end]) if end > begin + 1 else -1) for begin, end in spans]


def _flat(first: Tensor, numel: int) -> Tensor:
    return first if numel < 0 else first.detach().as_strided((numel,), (1,), first.storage_offset())


def _joints(tensors: Sequence[Tensor]) -> set[int]:
    """Return the indices of tensors that start where the one before them ends."""
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

"""Batch: gradients of one device and dtype, for one launch; and Layout, the part of it that is kept between steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton.inverse import Inverse
from scaler_triton.neighbours import Neighbours

if TYPE_CHECKING:
    from scaler_triton.dispatch import Backend
    from scaler_triton.kernels.norm import NormTable


class LayoutKey(NamedTuple):
    """What all tensors of a batch share."""

    device: torch.device
    dtype: torch.dtype
    dense: bool  # the elements fill one span of memory without gaps or overlap, in any order
    plain: bool  # not a tensor subclass


@dataclass
class Layout:
    """The part of a batch that is kept between steps: one slot for each tensor, and what backends cache."""

    key: LayoutKey
    numels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # each slot's parameter, by its index in the optimizer
    backends: dict[tuple[str, bool], Backend] = field(default_factory=dict)  # by `choose`'s requested and clips
    tables: dict[str, NormTable] = field(default_factory=dict)  # for kernels, by mode
    generation: Tensor | None = None  # for OverflowMarks: the skip count that kernels record, on the device
    weights: tuple[Any, list[float] | None] | None = None  # replica counts, and each slot's weight in a norm from them
    neighbours: Neighbours = field(default_factory=Neighbours)  # of a complete batch
    inverse: Inverse = field(default_factory=Inverse)  # of the scale


class Batch(NamedTuple):
    """Gradients for one launch, at least one: `tensors[i]` fills slot i of `layout`, None where one is missing."""

    layout: Layout
    tensors: Sequence[Tensor | None]
    complete: bool = False  # known to hold no None
    is_partial: bool = False  # unreduced (Partial) gradients, each times its number of terms: to be checked only

    @property
    def present(self) -> Sequence[Tensor]:
        """The gradients without the missing ones, in slot order."""
        if self.complete:
            return self.tensors  # type: ignore[return-value]  # a cast is a call
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def neighbours(self) -> Neighbours | None:
        """What is known from earlier steps; None if a gradient is missing, as the list differs each time then."""
        return self.layout.neighbours if self.complete else None


def first_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the first tensor's device, where results are put; the CPU if there is none."""
    return tensors[0].device if len(tensors) and isinstance(tensors[0], Tensor) else torch.device("cpu")


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether elements fill one span of memory without gaps or overlap, in any order of dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_plain(kind: type) -> bool:
    """Tell whether a type is torch's own Tensor or Parameter, not a subclass that may override ops."""
    return kind in (Tensor, torch.nn.Parameter)


def layout_key(tensor: Tensor) -> LayoutKey:
    """Return the key of the batch that `tensor` belongs to."""
    plain = is_plain(type(tensor))
    # Ten times as quick as looking at sizes and strides.
    dense = plain and (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()))
    return LayoutKey(tensor.device, tensor.dtype, dense, plain)


def group(tensors: Iterable[Tensor], positions: Iterable[int] | None = None) -> list[Batch]:
    """Return `tensors` (local, already checked) as batches, one for each layout key, in order of appearance.

    Args:
        positions: each tensor's parameter, by its index; None: the tensor's own index in the list.
    """
    groups: dict[LayoutKey, tuple[list[int], list[Tensor]]] = {}
    for index, tensor in zip(itertools.count() if positions is None else positions, tensors, strict=False):
        places, members = groups.setdefault(layout_key(tensor), ([], []))
        places.append(index)
        members.append(tensor)
    return [Batch(Layout(key, [t.numel() for t in ts], places), ts, True) for key, (places, ts) in groups.items()]

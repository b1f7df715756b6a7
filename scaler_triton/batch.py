"""Gradients as an op sees them: local tensors of one device and one dtype, and what stays of them from step to step."""

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
    from scaler_triton.kernels.table import GradTable


class LayoutKey(NamedTuple):
    """What all tensors of a batch share."""

    device: torch.device
    dtype: torch.dtype
    dense: bool  # every element of memory between first and last belongs to the tensor, once
    plain: bool  # not a tensor subclass


@dataclass
class Layout:
    """The part of a batch that stays from step to step: one slot a tensor, and what a backend knows of them."""

    key: LayoutKey
    numels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # the position of each one's parameter, where there is one
    backends: dict[tuple[str, bool], Backend] = field(default_factory=dict)  # by the last arguments of `choose`
    tables: dict[str, GradTable] = field(default_factory=dict)  # the kernels', by mode
    generation: Tensor | None = None  # the number that tables mark with what they see, on the device
    weights: tuple[Any, list[float] | None] | None = None  # each tensor's share in a global norm, and of what copies
    neighbours: Neighbours = field(default_factory=Neighbours)  # of all its tensors
    inverse: Inverse = field(default_factory=Inverse)  # of the scale they are divided by


class Batch(NamedTuple):
    """One launch's worth of gradients: `tensors[i]` fills slot i of `layout`, None where there is no gradient."""

    layout: Layout
    tensors: Sequence[Tensor | None]
    complete: bool = False  # known to be without None

    @property
    def present(self) -> Sequence[Tensor]:
        """The gradients there are, in slot order."""
        if self.complete:
            return self.tensors  # type: ignore[return-value]  # a cast is a call
        return [tensor for tensor in self.tensors if tensor is not None]

    @property
    def neighbours(self) -> Neighbours | None:
        """What is known of the tensors from earlier steps; None if one is missing: the list is another each time."""
        return self.layout.neighbours if self.complete else None


def home_of(tensors: Sequence[Tensor]) -> torch.device:
    """Return where what becomes of tensors is wanted: on the first one's device, the CPU if there is none."""
    return tensors[0].device if len(tensors) and isinstance(tensors[0], Tensor) else torch.device("cpu")


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether elements fill one span of memory without gaps or overlap, in any order."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_plain(kind: type) -> bool:
    """Tell whether a tensor of this type is no subclass with a meaning of its own."""
    return kind in (Tensor, torch.nn.Parameter)


def layout_key(tensor: Tensor) -> LayoutKey:
    """Return what `tensor` must share with others to enter the same batch."""
    plain = is_plain(type(tensor))
    # A contiguous one is known without its sizes, ten times as quickly.
    dense = plain and (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()))
    return LayoutKey(tensor.device, tensor.dtype, dense, plain)


def group(tensors: Iterable[Tensor], positions: Iterable[int] | None = None) -> list[Batch]:
    """Return `tensors` (local, already checked) as batches, one for each layout key, in order of appearance.

    Args:
        positions: the position of the parameter that each belongs to; None: its own in the list.
    """
    groups: dict[LayoutKey, tuple[list[int], list[Tensor]]] = {}
    for index, tensor in zip(itertools.count() if positions is None else positions, tensors, strict=False):
        places, members = groups.setdefault(layout_key(tensor), ([], []))
        places.append(index)
        members.append(tensor)
    return [Batch(Layout(key, [t.numel() for t in ts], places), ts, True) for key, (places, ts) in groups.items()]

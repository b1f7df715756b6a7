"""Gradients as an op sees them: local tensors of one device and one dtype, checked before any is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton.inverse import Inverse
from scaler_triton.neighbours import Neighbours
from scaler_triton.placement import is_dtensor, partial_terms

if TYPE_CHECKING:
    from scaler_triton.dispatch import Backend
    from scaler_triton.kernels.table import GradTable

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the tensor's elements fill one span of memory without gaps or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
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
    return LayoutKey(tensor.device, tensor.dtype, plain and is_dense(tensor), plain)


def is_acceptable(gradient: Tensor) -> bool:
    """Tell whether `check_gradient` lets a gradient pass."""
    try:
        check_gradient(gradient, "")
    except (ValueError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def check_gradient(gradient: Tensor, name: str) -> None:
    """Raise if `gradient` (local, strided or sparse COO) cannot be unscaled; nothing is written.

    Raises: torch's own error for overlapping memory; NotImplementedError naming dtype or layout, ValueError naming
        the device, for what no backend serves.
    """
    if gradient.dtype not in DTYPES:
        raise NotImplementedError(f"{name} has dtype {gradient.dtype}; only {_names(DTYPES)} can be unscaled")
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise NotImplementedError(
            f"{name} has layout {gradient.layout}; only strided and sparse COO gradients can be unscaled"
        )
    if gradient.is_nested:  # the strided kind has no strides to look at
        raise NotImplementedError(f"{name} is a nested tensor; only strided and sparse COO gradients can be unscaled")
    if gradient.device.type == "meta":
        raise ValueError(f"{name} is on device {gradient.device}, where there is nothing to unscale")
    if gradient.layout is torch.strided:
        check_overlap(gradient)
    elif gradient.dtype is not torch.float16:  # those are replaced by ones that can be written
        check_overlap(sparse_values(gradient))


def overlaps(tensor: Tensor) -> bool:
    """Tell whether elements of `tensor` share memory by an expanded dimension."""
    expanded = (stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.numel() > 0 and any(expanded)


def check_overlap(tensor: Tensor) -> None:
    """Raise torch's RuntimeError if elements of `tensor` share memory by an expanded dimension."""
    if overlaps(tensor):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def sparse_values(gradient: Tensor) -> Tensor:
    """Return the values of a sparse COO gradient, sharing its memory: what an op reads and writes."""
    values: Tensor = gradient._values()
    return values


def coalesce_fp16(gradient: Tensor) -> Tensor:
    """Return a sparse fp16 gradient with its duplicates summed in fp32, itself if it has none; sums may overflow."""
    is_ready = gradient.is_coalesced() and not overlaps(sparse_values(gradient))
    return gradient if is_ready else gradient.float().coalesce().half()


def is_yet_a_sum(gradient: Tensor) -> bool:
    """Tell whether a gradient is terms still to be added up: a Partial DTensor, or sparse with duplicates."""
    if is_dtensor(gradient):
        return partial_terms(gradient) > 1
    return gradient.layout is torch.sparse_coo and not gradient.is_coalesced()


def summed(gradient: Tensor) -> Tensor:
    """Return the sum that `is_yet_a_sum` told of; for a Partial DTensor all ranks of its mesh must take part."""
    if not is_dtensor(gradient):
        return coalesce_fp16(gradient) if gradient.dtype is torch.float16 else gradient.coalesce()
    from torch.distributed.tensor import Replicate

    placements = gradient.placements  # type: ignore[attr-defined]
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    result: Tensor = gradient.redistribute(placements=whole)  # type: ignore[attr-defined]
    return result


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


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

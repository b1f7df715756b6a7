"""Lists of gradients that callers of the public functions pass again and again: checked and grouped once.

A later call with a list of the same form (types, dtypes, devices, shapes, strides) finds the layouts of its batches,
with the kernels' tables, without a look at each tensor in Python. Nothing here keeps a tensor alive, and none is taken
for another: each call compares the forms of its own tensors, and writes their addresses into the tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from scaler_triton.dispatch import check_backend, kernels
from scaler_triton.gradients import check_gradient, check_overlap, local_tensor, sparse_values
from scaler_triton.plan import Batch, Layout, choose_backends, form_guard, group
from scaler_triton.torch_ops import is_plain

Key = tuple[str, str, int, int | None]  # the op and its backend; of the list only what is quickly found
Op = Callable[[Batch, Tensor], None]  # on a batch, with a flag on its device


class Known(NamedTuple):
    """What calls of one op use of a list that was seen before."""

    guard: Callable[..., bool]  # of the form of the scalars and the gradients
    layouts: list[Layout]
    streams: list[int]  # for each layout that of its kernels
    on_cpu: bool  # whether the list is one batch for an op of torch's on the CPU


_MOST = 64
_NO_STREAM = -1
_known: OrderedDict[Key, Known] = OrderedDict()


def recall(op: str, grads: list[Tensor], backend: str | None, *scalars: Tensor) -> tuple[Key, Known | None]:
    """Return the key of a call of `op`, and what is known of its list; None if it has to be looked at."""
    first = grads[0].numel() if grads and type(grads[0]) is Tensor else None
    key = op, check_backend(backend), len(grads), first
    known = _known.get(key)
    return key, known if known is not None and known.guard(*scalars, *grads) else None


def run(key: Key, known: Known | None, op: Op, grads: list[Tensor], **scalars: Tensor) -> None:
    """Run `op` on each batch of `grads`, and combine the flags in `found_inf`, one of the `scalars`."""
    # Taken out for as long as its tables are used: another thread makes its own.
    if known is not None and _known.pop(key, None) is known and _is_free(known):
        for layout in known.layouts:
            every = len(layout.positions) == len(grads)
            tensors = grads if every else [grads[index] for index in layout.positions]
            _run_one(op, Batch(layout, tensors, tensors), scalars["found_inf"])
    else:
        known = _run_unknown(key, op, grads, scalars)
    if known is not None:
        _known[key] = known
        if len(_known) > _MOST:
            _known.popitem(last=False)


def _run_unknown(key: Key, op: Op, grads: list[Tensor], scalars: dict[str, Tensor]) -> Known | None:
    """Check everything, run `op`, and return what later calls use, None if they have to look at each tensor, too."""
    for name, scalar in scalars.items():
        check_scalar(scalar, name)
    found_inf = scalars["found_inf"]
    if found_inf.is_meta:
        raise ValueError(f"found_inf is on device {found_inf.device}, where it cannot be set")
    with torch.no_grad():
        locals_ = _checked(grads)
        batches = group(locals_, count())
        choose_backends(batches, key[1], clips=key[0] == "norm")
        for batch in batches:
            _run_one(op, batch, found_inf)
    every = [*scalars.values(), *grads]
    # A guard does not look into DTensors and sparse tensors, and a known list is used without `no_grad`.
    simple = all(map(is_, locals_, grads)) and all(is_plain(each) and not each.requires_grad for each in every)
    guard = form_guard(every) if simple else None
    if guard is None:
        return None
    layouts = [batch.layout for batch in batches]
    on_cpu = all(each.is_cpu for each in every) and [layout.backend for layout in layouts] == ["torch"]
    return Known(guard, layouts, [_stream(layout) for layout in layouts], on_cpu)


def _run_one(op: Op, batch: Batch, found_inf: Tensor) -> None:
    device = batch.layout.key.device
    if device == found_inf.device:
        op(batch, found_inf)
        return
    flag = torch.zeros((), dtype=torch.float32, device=device)
    op(batch, flag)
    found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def _is_free(known: Known) -> bool:
    """Return whether a call may write the tables: no graph does, nor may another stream still read them.

    A capture writes those of the call before it, and of earlier captures.
    """
    for layout, stream in zip(known.layouts, known.streams, strict=True):
        if stream == _NO_STREAM or kernels().launch.capture_query(layout.key.device)():
            continue
        if stream != _stream(layout) or any(table.is_in_a_graph for table in layout.tables.values()):
            return False
    return True


def _stream(layout: Layout) -> int:
    """Return the current stream of a layout's kernels; `_NO_STREAM` if torch's ops or the interpreter serve it."""
    if layout.backend != "triton" or layout.key.device.type == "cpu":
        return _NO_STREAM
    stream: int = kernels().launch.current_stream(layout.key.device)
    return stream


def _checked(grads: list[Tensor]) -> list[Tensor]:
    locals_ = []
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"grads[{index}] must be a Tensor, got {type(grad).__name__}")
        local = local_tensor(grad)
        check_gradient(local, f"grads[{index}]")
        if local.layout is torch.sparse_coo:
            local = sparse_values(local)
            check_overlap(local)  # of fp16, too, which only a plan coalesces
        locals_.append(local)
    return locals_


def check_scalar(tensor: Tensor, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Raise if `tensor` is not one element of `dtype`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.numel() != 1 or tensor.dtype is not dtype:
        raise ValueError(f"{name} must be one {dtype} element, got shape {tuple(tensor.shape)}, {tensor.dtype}")

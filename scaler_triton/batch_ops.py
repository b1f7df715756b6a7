"""The ops on batches, each run by one backend, and the tables that kernels run over."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton import reference
from scaler_triton.batch import Batch, Layout
from scaler_triton.dispatch import Backend, choose, choose_for_subclasses

if TYPE_CHECKING:
    from scaler_triton.kernels.norm import NormTable


def choose_backends(batches: Sequence[Batch], requested: str, *, clips: bool = False) -> list[tuple[Batch, Backend]]:
    """Pair every batch with its backend; a kernel that does not compile or load fails here, before any write.

    Args:
        requested, clips: as `dispatch.choose` takes them.
    """
    key = requested, clips
    return [(b, b.layout.backends.get(key) or _backend(b.layout, *key)) for b in batches]


def unscale_batch_(batch: Batch, factor: Tensor, found_inf: Tensor, backend: Backend, *, inverse: bool) -> None:
    """`unscale_` for one batch.

    Args:
        factor: fp32, one element, the batch's device: `inv_scale` if `inverse`, else the scale itself.
        found_inf: fp32, one element, the batch's device.
    """
    if backend == "torch":
        inv_scale = factor if inverse else batch.layout.inverse.of(factor)
        if batch.layout.key.plain:
            reference.unscale_(batch.present, inv_scale, found_inf, batch.neighbours)
        else:
            _unscale_subclasses_(batch, inv_scale, found_inf)
        return
    dense = dense_batch(batch)
    kernels().unscale.launch_unscale(filled_table(dense, "unscale"), factor, found_inf, inverse=inverse)
    copy_back(dense, batch)


def check_batch(batch: Batch, found_inf: Tensor, backend: Backend, *, unscaled: bool = False) -> None:
    """`check_nonfinite` for one batch, `found_inf` on its device.

    Args:
        unscaled: `unscale_batch_` has just run on it.
    """
    if backend == "torch":
        if batch.layout.key.plain:
            reference.check_nonfinite(batch.present, found_inf, batch.neighbours)
        else:
            _unscale_subclasses_(batch, torch.ones_like(found_inf), found_inf)
        return
    dense = dense_batch(batch)  # a reference until the launch: an address keeps nothing alive
    table = filled_table(dense, "check", after="unscale" if unscaled and dense is batch else None)
    kernels().nonfinite.launch_check_nonfinite(table, found_inf)


def dense_batch(batch: Batch) -> Batch:
    """Return the batch itself, or dense copies of tensors with gaps, as kernels read one span of memory per tensor."""
    if batch.layout.key.dense:
        return batch
    return Batch(batch.layout, [None if tensor is None else tensor.contiguous() for tensor in batch.tensors])


def copy_back(dense: Batch, batch: Batch) -> None:
    """Copy what kernels wrote into `dense_batch(batch)` back into the batch."""
    if dense is not batch:
        for original, copy in zip(batch.present, dense.present, strict=True):
            original.copy_(copy)


def filled_table(dense: Batch, mode: str, *, after: str | None = None) -> NormTable:
    """Return the kernels' table of a layout, created once, with this step's addresses.

    Args:
        mode: of the launch configuration: "unscale" for passes that write, "check" for those that only read.
        after: the mode of a pass that has just run on the same memory. If both share a table, it is filled already: a
            captured step may copy addresses only a few times.
    """
    layout = dense.layout
    table = layout.tables.get(mode)
    if table is None:
        table = layout.tables[mode] = _new_table(layout, mode)
    if after is not None and table is layout.tables.get(after):
        return table
    if layout.generation is not None:
        table.generation = layout.generation
    if dense.complete:
        table.set_addresses(list(map(Tensor.data_ptr, dense.present)))
    else:
        table.set_addresses([0 if tensor is None else tensor.data_ptr() for tensor in dense.tensors])
    return table


@functools.cache
def kernels() -> Any:
    """Return the kernels' modules, imported on first use: triton is slow to import, and may be missing."""
    from scaler_triton.kernels import clip, launcher, nonfinite, norm, unscale, update_scale

    modules = {"clip": clip, "launcher": launcher, "nonfinite": nonfinite, "norm": norm, "unscale": unscale}
    return SimpleNamespace(**modules, update_scale=update_scale)


def _backend(layout: Layout, requested: str, clips: bool) -> Backend:
    key = layout.key
    if key.plain:
        backend = choose(key.device, key.dtype, requested, clips=clips)
    else:
        backend = choose_for_subclasses(key.device, key.dtype)
    layout.backends[requested, clips] = backend
    return backend


def _unscale_subclasses_(batch: Batch, inv_scale: Tensor, found_inf: Tensor) -> None:
    # Tensor subclasses implement torch's op themselves.
    torch._amp_foreach_non_finite_check_and_unscale_(list(batch.present), found_inf, inv_scale)


def _new_table(layout: Layout, mode: str) -> NormTable:
    """Return a table for this mode's launch configuration; modes with equal configurations share one."""
    from scaler_triton.kernels.lookup import config_for
    from scaler_triton.kernels.norm import NormTable

    device, dtype = layout.key.device, layout.key.dtype
    config = config_for(device, mode, dtype.itemsize)
    shared = [table for table in layout.tables.values() if table.config == config]
    return shared[0] if shared else NormTable(layout.numels, dtype, device, config)

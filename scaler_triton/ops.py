"""The ops of a gradient scaler on lists of tensors: checked, grouped by device and dtype, run by one backend each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton import batch as batching
from scaler_triton import policy, reference
from scaler_triton.batch import Batch, Layout
from scaler_triton.dispatch import Backend, check_backend, choose
from scaler_triton.neighbours import Neighbours

if TYPE_CHECKING:
    from scaler_triton.kernels.table import GradTable

__all__ = ["check_nonfinite", "grad_norm", "unscale_", "update_scale_"]


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, backend: str | None = None) -> None:
    """Multiply gradients by `inv_scale` in place and set `found_inf` to 1 if one held NaN or Inf before.

    Equivalent PyTorch: `torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)`, for
    tensors of any mix of devices and dtypes. Products are taken in fp32 (fp64 for fp64) and rounded once.

    Args:
        grads: fp16, bf16, fp32 or fp64 tensors, strided or sparse COO (values as they are, duplicates not summed),
            DTensors as their local shards; written.
        inv_scale: fp32, one element, any device; read.
        found_inf: fp32, one element, any device; set to 1.0 on overflow, else left as it is.
        backend: "auto", "triton" or "torch"; default: SCALER_TRITON_BACKEND, else "auto".

    Raises: NotImplementedError naming the dtype or layout of `grads[i]`, ValueError its device, torch's RuntimeError
        for overlapping memory; TypeError or ValueError for wrong scalars. Nothing is written then.
    """
    if torch.compiler.is_compiling():
        from scaler_triton import compiled

        compiled.unscale_(_shards(grads), inv_scale, found_inf, backend)
        return
    _check_scalar(inv_scale, "inv_scale")
    _check_scalar(found_inf, "found_inf")

    def unscale_one(batch: Batch, flag: Tensor, name: Backend) -> None:
        unscale_batch_(batch, inv_scale.to(batch.layout.key.device), flag, name, inverse=True)

    _run(grads, found_inf, backend, unscale_one)


def check_nonfinite(grads: Sequence[Tensor], found_inf: Tensor, *, backend: str | None = None) -> None:
    """Set `found_inf` to 1 if a gradient holds NaN or Inf; gradients are read, not written.

    Equivalent PyTorch: `if not all(g.isfinite().all() for g in grads): found_inf.fill_(1)`.

    Args and raises: as `unscale_`.
    """
    if torch.compiler.is_compiling():
        from scaler_triton import compiled

        compiled.check_nonfinite(_shards(grads), found_inf, backend)
        return
    _check_scalar(found_inf, "found_inf")
    _run(grads, found_inf, backend, check_batch)


def grad_norm(
    grads: Sequence[Tensor],
    found_inf: Tensor | None = None,
    *,
    inv_scale: Tensor | None = None,
    norm_type: float = 2.0,
    backend: str | None = None,
) -> Tensor:
    """Return the norm that all gradients together have once they are unscaled; they are read, not written.

        torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]) * inv_scale, norm_type)

    in one pass for the 2-norm, with a relative error below 1e-6; other norms are torch's, in fp64. Gradients are not
    rounded to their dtype between.

    Args:
        grads: fp16, bf16, fp32 or fp64 tensors of any mix of devices, strided or sparse COO (values as they are),
            DTensors as their local shards; read.
        found_inf: fp32, one element, any device; set to 1.0 if a gradient holds NaN or Inf, else left as it is.
        inv_scale: fp32, one element, any device; None: 1.
        norm_type: the norm's order; inf is the largest absolute value.
        backend: as `unscale_`.

    Returns: fp64, `()`, on the first gradient's device; 0 for no gradients.

    Raises: as `unscale_`; TypeError or ValueError for a `norm_type` that is no number, or 0.
    """
    if torch.compiler.is_compiling():
        from scaler_triton import compiled

        shards = _shards(grads)
        if found_inf is None:  # inductor takes no None where an op that returns something may write
            found_inf = torch.zeros((), dtype=torch.float32, device=shards[0].device if shards else "cpu")
        norm: Tensor = compiled.grad_norm(shards, found_inf, inv_scale, norm_type, backend)
        return norm
    from scaler_triton.clipping import norms

    return norms.grad_norm(grads, found_inf, inv_scale=inv_scale, norm_type=norm_type, backend=backend)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    backend: str | None = None,
) -> None:
    """Back the scale off after an overflow, let it grow after `growth_interval` good steps.

    On a GPU it waits for the device when factors or interval are new, which no capture can, and never else.

    Equivalent PyTorch: `torch._amp_update_scale_`, but the tracker is compared by >= and the scale stays in
    [2^-126, fp32 max].

    Args:
        scale: fp32, one element; written.
        growth_tracker: int32, one element, same device, counts good steps; written.
        found_inf: fp32, one element, same device; anything but 0 is an overflow.
        growth_factor: finite, >= 1.
        backoff_factor: in (0, 1].
        growth_interval: steps, >= 1.
        backend: as `unscale_`.

    Raises: TypeError or ValueError naming a wrong argument.
    """
    if torch.compiler.is_compiling():
        from scaler_triton import compiled

        numbers = growth_factor, backoff_factor, growth_interval
        compiled.update_scale_(scale, growth_tracker, found_inf, *numbers, backend)
        return
    _check_scalar(scale, "scale")
    _check_scalar(growth_tracker, "growth_tracker", torch.int32)
    _check_scalar(found_inf, "found_inf")
    for name, other in (("growth_tracker", growth_tracker), ("found_inf", found_inf)):
        if other.device != scale.device:
            raise ValueError(f"{name} must be on the scale's device, {scale.device}, got {other.device}")
    growth_factor = policy.check_growth_factor(growth_factor)
    backoff_factor = policy.check_backoff_factor(backoff_factor)
    growth_interval = policy.check_growth_interval(growth_interval)
    on_torch = choose(scale.device, scale.dtype, check_backend(backend)) == "torch"
    update = reference.update_scale_ if on_torch else _kernels().update_scale.launch_update_scale
    update(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)


def update_by_rows_(
    scale: Tensor,
    growth_tracker: Tensor,
    flags: Tensor,
    policy: Tensor,
    counters: Tensor,
    rows: int = 1,
    *,
    clear: bool = False,
) -> None:
    """`update_scale_` on Triton by several flags at once, within limits and counted.

    Args: see `kernels.update_scale.launch_update_rows`; by default `flags` is one flag, which is left as it is.
    """
    _kernels().update_scale.launch_update_rows(scale, growth_tracker, flags, policy, counters, rows, clear=clear)


def choose_backends(batches: Sequence[Batch], requested: str, *, clips: bool = False) -> list[tuple[Batch, Backend]]:
    """Pair every batch with its backend; whatever fails to compile or load shows here, before any write.

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
        inv_scale = factor if inverse else reference.inverse(factor)
        _reference_unscale_(batch, inv_scale, found_inf)
        return
    dense = _dense(batch)
    _kernels().unscale.launch_unscale(_table(batch.layout, dense, "unscale"), factor, found_inf, inverse=inverse)
    if dense is not batch:
        for original, copy in zip(batch.present, dense.present, strict=True):
            original.copy_(copy)


def check_batch(batch: Batch, found_inf: Tensor, backend: Backend, *, unscaled: bool = False) -> None:
    """`check_nonfinite` for one batch, `found_inf` on its device.

    Args:
        unscaled: `unscale_batch_` had it just now: a table that both share is filled.
    """
    if backend == "torch":
        if batch.layout.key.plain:
            reference.check_nonfinite(batch.present, found_inf, _neighbours(batch))
        else:
            _reference_unscale_(batch, torch.ones_like(found_inf), found_inf)
        return
    dense = _dense(batch)  # kept until the launch: an address keeps nothing alive
    tables = batch.layout.tables
    if unscaled and dense is batch and tables.get("check") is tables["unscale"]:
        table = tables["check"]  # a capture has room for one copy of its addresses
    else:
        table = _table(batch.layout, dense, "check")
    _kernels().nonfinite.launch_check_nonfinite(table, found_inf)


def _shards(grads: Sequence[Tensor]) -> list[Tensor]:
    return [batching.local_tensor(grad) for grad in grads]


@functools.cache
def _kernels() -> Any:
    """Return the kernels' modules, imported when the first one is needed: triton is heavy, and not everywhere."""
    from scaler_triton.kernels import clip, nonfinite, norm, unscale, update_scale

    return SimpleNamespace(clip=clip, nonfinite=nonfinite, norm=norm, unscale=unscale, update_scale=update_scale)


def _backend(layout: Layout, requested: str, clips: bool) -> Backend:
    key = layout.key
    backend = choose(key.device, key.dtype, requested, clips=clips) if key.plain else "torch"
    layout.backends[requested, clips] = backend
    return backend


def _neighbours(batch: Batch) -> Neighbours | None:
    return batch.layout.neighbours if batch.complete else None  # else the list is another one each time


def _reference_unscale_(batch: Batch, inv_scale: Tensor, found_inf: Tensor) -> None:
    if batch.layout.key.plain:
        reference.unscale_(batch.present, inv_scale, found_inf, _neighbours(batch))
    else:  # a tensor subclass knows itself what torch's op means for it
        torch._amp_foreach_non_finite_check_and_unscale_(list(batch.present), found_inf, inv_scale)


def _dense(batch: Batch) -> Batch:
    """Return the batch itself, or dense copies of tensors with gaps: kernels walk one span of memory a tensor."""
    if batch.layout.key.dense:
        return batch
    return Batch(batch.layout, [None if tensor is None else tensor.contiguous() for tensor in batch.tensors])


def _table(layout: Layout, dense: Batch, mode: str) -> GradTable:
    """Return the kernels' table of a layout, filled with this step's addresses; the layout keeps it."""
    table = layout.tables.get(mode)
    if table is None:
        table = layout.tables[mode] = _new_table(layout, mode)
    if layout.epoch is not None:
        table.epoch = layout.epoch
    if dense.complete:
        table.set_addresses(list(map(Tensor.data_ptr, dense.present)))
    else:
        table.set_addresses([0 if tensor is None else tensor.data_ptr() for tensor in dense.tensors])
    return table


def _new_table(layout: Layout, mode: str) -> GradTable:
    """Return a table for the configuration that is best here; modes whose configurations are equal share one."""
    from scaler_triton.kernels.lookup import config_for
    from scaler_triton.kernels.table import GradTable

    device, dtype = layout.key.device, layout.key.dtype
    config = config_for(device, mode, dtype.itemsize)
    shared = [table for table in layout.tables.values() if table.config == config]
    return shared[0] if shared else GradTable(layout.numels, dtype, device, config)


def _run(
    grads: Sequence[Tensor], found_inf: Tensor, backend: str | None, op: Callable[[Batch, Tensor, Backend], None]
) -> None:
    """Check and group `grads`, run `op` on each batch with a flag on its device, gather the flags."""
    requested = check_backend(backend)
    with torch.no_grad():
        batches = choose_backends(batching.group(_checked(grads)), requested)
        for batch, name in batches:
            device = batch.layout.key.device
            if device == found_inf.device:
                op(batch, found_inf, name)
            else:
                flag = torch.zeros((), dtype=torch.float32, device=device)
                op(batch, flag, name)
                found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def _checked(grads: Sequence[Tensor]) -> list[Tensor]:
    locals_ = []
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"grads[{index}] must be a Tensor, got {type(grad).__name__}")
        local = batching.local_tensor(grad)
        batching.check_gradient(local, f"grads[{index}]")
        if local.layout is torch.sparse_coo:
            local = batching.sparse_values(local)
            batching.check_overlap(local)  # of fp16, too: a plan would coalesce it
        locals_.append(local)
    return locals_


def _check_scalar(tensor: Tensor, name: str, dtype: torch.dtype = torch.float32) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.numel() != 1 or tensor.dtype is not dtype:
        raise ValueError(f"{name} must be one {dtype} element, got shape {tuple(tensor.shape)}, {tensor.dtype}")

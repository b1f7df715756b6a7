"""The public functions on lists of tensors: lists of one form are looked at once; custom ops for compiled callers.

A list that is passed again and again costs less if it is prepared: see `prepare`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton import policy
from scaler_triton.clipping.norm import norm_batch
from scaler_triton.clipping.torch_ops import sum_of_squares
from scaler_triton.core import passes, torch_ops
from scaler_triton.core.dispatch import check_backend, choose_for_scale, kernels
from scaler_triton.core.gradients import local_tensor
from scaler_triton.core.plan import Batch, Layout, Matcher, choose_backends, form_matcher, group, unknown
from scaler_triton.core.torch_ops import increment_version, is_plain
from scaler_triton.core.update import DevicePolicy, Numbers, update_by_ops_, update_on_host_
from scaler_triton.kernels.abi import COUNTERS, SQUARES
from scaler_triton.ops_prepared import Prepared, check_scalar, checked, first_device, prepare, run_on

__all__ = ["Prepared", "check_nonfinite", "grad_norm", "prepare", "unscale_", "update_scale_"]


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, backend: str | None = None) -> None:
    """Multiply gradients by `inv_scale` in place and set `found_inf` to 1 if one held NaN or Inf before.

    Equivalent PyTorch: `torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)`, for
    tensors of any mix of devices and dtypes. Products are taken in fp32 (fp64 for fp64) and rounded once.

    Args:
        grads: fp16, bf16, fp32 or fp64 tensors of any shape on any devices, strided or sparse COO (values as they are,
            duplicates not summed), DTensors as their local shards; written.
        inv_scale: fp32, one element, any device; read.
        found_inf: fp32, one element, any device; set to 1.0 on overflow, else left as it is.
        backend: "auto", "triton" or "torch"; default: SCALER_TRITON_BACKEND, else "auto".

    Raises: NotImplementedError naming the dtype or layout of `grads[i]`, ValueError its device, torch's RuntimeError
        for overlapping memory; TypeError or ValueError for wrong scalars; RuntimeError with the cause if "triton" was
        asked for and does not work there. Nothing is written then.
    """
    if torch.compiler.is_compiling():
        _unscale_op([*map(local_tensor, grads)], inv_scale, found_inf, backend=backend)
        return
    grads = list(grads)
    if len(grads) == 1 and _unscaled_by_torch(grads, inv_scale, found_inf, backend):
        return
    key, known = _look_up("unscale", grads, backend, inv_scale, found_inf)
    if known is not None and known.on_cpu:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    else:

        def unscale_one(batch: Batch, flag: Tensor) -> None:
            passes.unscale_batch_(batch, inv_scale, flag, inverse=True)

        _run(key, known, unscale_one, grads, inv_scale=inv_scale, found_inf=found_inf)


def check_nonfinite(grads: Sequence[Tensor], found_inf: Tensor, *, backend: str | None = None) -> None:
    """Set `found_inf` to 1 if a gradient holds NaN or Inf; gradients are read, not written.

    Equivalent PyTorch: `if not all(g.isfinite().all() for g in grads): found_inf.fill_(1)`.

    Args and raises: as `unscale_`.
    """
    if torch.compiler.is_compiling():
        _check_op([*map(local_tensor, grads)], found_inf, backend=backend)
        return
    grads = list(grads)
    key, known = _look_up("check", grads, backend, found_inf)
    if known is not None and known.on_cpu:
        torch_ops.check(grads, found_inf)
    else:
        _run(key, known, passes.check_batch, grads, found_inf=found_inf)


def grad_norm(
    grads: Sequence[Tensor],
    found_inf: Tensor | None = None,
    *,
    inv_scale: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the 2-norm of all gradients together as if they were unscaled; they are read, not written.

        torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]) * inv_scale)

    in one pass, with a relative error below 1e-6. Unscaled values are not rounded to the gradients' dtype.

    Args:
        grads: fp16, bf16, fp32 or fp64 tensors of any shape on any devices, strided or sparse COO (values as they
            are), DTensors as their local shards; read.
        found_inf: fp32, one element, any device; set to 1.0 if a gradient holds NaN or Inf, else left as it is.
        inv_scale: fp32, one element, any device; None: 1.
        backend: as `unscale_`.

    Returns: fp64, `()`, on the first gradient's device; fp32 if that has no fp64; 0 for no gradients.

    Raises: as `unscale_`.
    """
    grads = list(grads)  # read twice
    home = first_device(grads)
    flag = torch.zeros((), dtype=torch.float32, device=home) if found_inf is None else found_inf
    if torch.compiler.is_compiling():  # inductor refuses None for an argument that an op with a result mutates
        norm: Tensor = _norm_op([*map(local_tensor, grads)], flag, inv_scale, backend)
        return norm
    factor = torch.ones((), dtype=torch.float32, device=home) if inv_scale is None else inv_scale
    key, known = _look_up("norm", grads, backend, factor, flag)
    if known is not None and known.on_cpu:
        squares = sum_of_squares(grads, flag, None)
    else:
        parts: list[Tensor] = []

        def add(batch: Batch, bad: Tensor) -> None:
            one = torch_ops.constants(bad, torch.float32, 1.0)
            parts.append(torch_ops.wide_on(home, norm_batch(batch, one, bad, None, key[1])[SQUARES]))

        _run(key, known, add, grads, inv_scale=factor, found_inf=flag)
        if not parts:
            return torch.zeros((), dtype=torch_ops.wide_dtype(home), device=home)
        squares = torch.stack(parts).sum()
    return squares.sqrt() * factor.detach().to(home).abs().reshape(())


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
    """Reduce the scale after an overflow, and let it grow after `growth_interval` good steps.

    On a GPU it waits for the device only if factors or interval are new, which cannot be captured.

    Equivalent PyTorch: `torch._amp_update_scale_`, but the tracker is compared by >= and the scale stays in
    [2^-126, fp32 max].

    Args:
        scale: fp32, one element, any device; written.
        growth_tracker: int32, one element, same device, counts good steps; written.
        found_inf: fp32, one element, same device; anything but 0 is an overflow; read.
        growth_factor: finite, >= 1.
        backoff_factor: in (0, 1].
        growth_interval: steps, >= 1.
        backend: as `unscale_`.

    Raises: TypeError or ValueError naming a wrong argument; RuntimeError as `unscale_` for "triton".
    """
    if torch.compiler.is_compiling():
        _update_op(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, backend=backend)
        return
    check_scalar(scale, "scale")
    check_scalar(growth_tracker, "growth_tracker", torch.int32)
    check_scalar(found_inf, "found_inf")
    for name, other in (("growth_tracker", growth_tracker), ("found_inf", found_inf)):
        if other.device != scale.device:
            raise ValueError(f"{name} must be on the scale's device, {scale.device}, got {other.device}")
    growth_factor = policy.check_number("growth_factor", growth_factor)
    backoff_factor = policy.check_number("backoff_factor", backoff_factor)
    growth_interval = policy.check_number("growth_interval", growth_interval)
    numbers = growth_factor, backoff_factor, growth_interval
    if choose_for_scale(scale, check_backend(backend)) == "triton":
        held, counters = _kept_policy(scale.device, numbers)
        launch = kernels().update_scale.bind_update(found_inf, found_inf, held, counters, clear=False)
        launch(scale, growth_tracker, 1)
        increment_version((scale,))
    elif scale.is_cpu and type(scale) is Tensor:
        memory = torch_ops.host_memory(growth_tracker.view(-1))
        update_on_host_(scale, memory, found_inf.item() != 0, numbers, policy.NO_LIMITS, policy.no_counters())
    else:
        counters = torch.zeros(COUNTERS, dtype=torch.int64, device=scale.device)
        update_by_ops_(scale, growth_tracker, found_inf, numbers, policy.NO_LIMITS, counters)


@functools.cache  # never freed: a graph may read and write them at each replay
def _kept_policy(device: torch.device, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Return the numbers on the device, and counters that nobody reads."""
    held = DevicePolicy(device).hold(numbers, policy.NO_LIMITS)
    ignored = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
    torch.get_device_module(device).synchronize(device)  # the next call may be on another stream
    return held, ignored


# Lists that callers pass again and again are checked and grouped once. A later call with a list of the same form
# (types, dtypes, devices, shapes, strides) finds the layouts of its batches, with the kernels' tables, without a look
# at each tensor in Python. Nothing here keeps a tensor alive, and none is taken for another: each call compares the
# forms of its own tensors, and writes their addresses into the tables.

_Key = tuple[str, str, int, Any]  # the op and its backend; of the list only what is quickly found
_Op = Callable[[Batch, Tensor], None]  # on a batch, with a flag on its device


class _Known(NamedTuple):
    """What calls of one op use of a list that was seen before."""

    matches: Matcher  # of the form of the scalars and the gradients
    layouts: list[Layout]
    streams: list[int | None]  # for each layout that of its kernels
    on_cpu: bool  # whether the list is one batch for an op of torch's on the CPU


_MOST = 64
_known: OrderedDict[_Key, _Known] = OrderedDict()


def _unscaled_by_torch(grads: list[Tensor], inv_scale: Tensor, found_inf: Tensor, backend: str | None) -> bool:
    """Unscale one gradient by torch's op if that serves the CPU; return False if not, or if something is wrong.

    Of several the op would have written some before it finds that another one is wrong.
    """
    grad = grads[0]
    if not type(grad) is type(inv_scale) is type(found_inf) is Tensor or check_backend(backend) == "triton":
        return False
    if grad.requires_grad or not (grad.is_cpu and inv_scale.is_cpu and found_inf.is_cpu):
        return False
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    except RuntimeError:  # without a name
        return False
    return True


def _look_up(op: str, grads: list[Tensor], backend: str | None, *scalars: Tensor) -> tuple[_Key, _Known | None]:
    """Return the key of a call of `op`, and what is known of its list; None if it has to be looked at."""
    first = (grads[0].numel(), grads[0].dtype) if grads and type(grads[0]) is Tensor else None
    key = op, check_backend(backend), len(grads), first
    known = _known.get(key)
    return key, known if known is not None and known.matches(*scalars, *grads) else None


def _run(key: _Key, known: _Known | None, op: _Op, grads: list[Tensor], **scalars: Tensor) -> None:
    """Run `op` on each batch of `grads`, and combine the flags in `found_inf`, one of the `scalars`."""
    # Taken out for as long as its tables are used: another thread makes its own.
    if known is not None and _known.pop(key, None) is known and _is_free(known):
        for layout in known.layouts:
            every = len(layout.positions) == len(grads)
            tensors = grads if every else [grads[index] for index in layout.positions]
            run_on(Batch(layout, tensors, tensors), scalars["found_inf"], op)
    else:
        known = _run_unknown(key, op, grads, scalars)
    if known is not None:
        _known[key] = known
        if len(_known) > _MOST:
            _known.popitem(last=False)


def _run_unknown(key: _Key, op: _Op, grads: list[Tensor], scalars: dict[str, Tensor]) -> _Known | None:
    """Check everything, run `op`, and return what later calls use, None if they have to look at each tensor, too."""
    for name, scalar in scalars.items():
        check_scalar(scalar, name)
    found_inf = scalars["found_inf"]
    if found_inf.is_meta:
        raise ValueError(f"found_inf is on device {found_inf.device}, where it cannot be set")
    with torch.no_grad():
        locals_ = checked(grads)
        batches = group(dict(enumerate(locals_)))
        choose_backends(batches, key[1])
        for batch in batches:
            run_on(batch, found_inf, op)
    every = [*scalars.values(), *grads]
    # A matcher does not look into DTensors and sparse tensors, and a known list is used without `no_grad`.
    simple = all(map(is_, locals_, grads)) and all(is_plain(each) and not each.requires_grad for each in every)
    matches = form_matcher(*every) if simple else unknown
    if matches is unknown:
        return None
    layouts = [batch.layout for batch in batches]
    on_cpu = all(each.is_cpu for each in every) and [layout.backend for layout in layouts] == ["torch"]
    return _Known(matches, layouts, [_stream(layout) for layout in layouts], on_cpu)


def _is_free(known: _Known) -> bool:
    """Return whether a call may write the tables: no graph does, nor may another stream still read them.

    A capture writes those of the call before it, and of earlier captures.
    """
    for layout, stream in zip(known.layouts, known.streams, strict=True):
        if stream is None or kernels().launch.capture_query(layout.device)():
            continue
        if stream != _stream(layout) or any(table.captured for table in layout.tables.values()):
            return False
    return True


def _stream(layout: Layout) -> int | None:
    """Return the current stream of a layout's kernels; None if torch's ops or the interpreter serve it."""
    if layout.backend != "triton" or layout.device.type == "cpu":
        return None
    stream: int = kernels().launch.stream_query(layout.device)()
    return stream


# Dynamo puts custom ops into its graph without tracing into them, and eager callers do not pay their host costs. A call
# may write a table of addresses, so inductor must not capture it in its own CUDA graphs.
_op, _TAGS = torch.library.custom_op, (torch.Tag.cudagraph_unsafe,)
_unscale_op = _op("scaler_triton::unscale_", unscale_, mutates_args=("grads", "found_inf"), tags=_TAGS)
_check_op = _op("scaler_triton::check_nonfinite", check_nonfinite, mutates_args=("found_inf",), tags=_TAGS)
_update_op = _op("scaler_triton::update_scale_", update_scale_, mutates_args=("scale", "growth_tracker"), tags=_TAGS)


@_op("scaler_triton::grad_norm", mutates_args=("found_inf",), tags=_TAGS)
def _norm_op(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor | None, backend: str | None) -> Tensor:
    return grad_norm(grads, found_inf, inv_scale=inv_scale, backend=backend)


@_norm_op.register_fake
def _(grads: Sequence[Tensor], *_others: Any) -> Tensor:
    home = first_device(grads)
    return torch.empty((), dtype=torch_ops.wide_dtype(home), device=home)

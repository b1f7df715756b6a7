"""`ops.prepare`: a list of tensors that is checked and grouped once, for callers that pass the same one many times.

unscale_, check     CPU: torch's op, nothing before it     GPU: addresses compared, one launch for each dtype
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from scaler_triton import policy
from scaler_triton.clipping.norm import clip_batch_, norm_batch
from scaler_triton.core import passes, torch_ops
from scaler_triton.core.dispatch import check_backend, kernels, skip_tracing
from scaler_triton.core.gradients import check_gradient, check_overlap, local_tensor
from scaler_triton.core.plan import Batch, choose_backends, group
from scaler_triton.kernels.abi import OVERFLOWS, SQUARES, TOTALS

_Pass = Callable[[bool, Batch, Tensor], None]  # whether its table is filled; a batch, with a flag on its device


class Prepared:
    """Tensors that were checked and grouped once, for passes over all of them; made by `ops.prepare`.

    It keeps the tensors alive. Each call takes them as they are then, of which only the addresses are looked at again:
    if one has other memory than in the last call (after `t.data = other`, `set_` or a `resize_` that moved it), all are
    checked and grouped anew, and the call raises as `ops.prepare` does if one is illegal by now. Whether a tensor that
    has become a part of its own memory (`t.data = t.data[:3]`) is taken whole or as that part is not defined. On the
    CPU torch's op looks at each tensor itself; if one has become illegal, those before it may be written.

    On a GPU make its calls in one thread and on one stream, or let each wait for the one before: they share memory.
    They may be captured in a CUDA graph after one call of that method outside it; a replay takes the addresses of the
    capture. Under `torch.compile` the graph breaks at each call, which runs uncompiled: in one graph call the functions
    of `ops` on lists.

    Attributes:
        tensors: the list; it is not to be written.
    """

    def __init__(self, tensors: Iterable[Tensor], requested: str) -> None:
        self.tensors, self._requested = list(tensors), requested
        self._members: dict[int, Tensor] = {}  # the tensors' own memory, in which kernels read and write
        self._grouped: list[Batch] = []
        # By the method: as in `ops`, each has tables of its own, so that a capture may call all of them.
        self._batches: dict[str, list[Batch]] = {}
        self._filled: set[str] = set()  # methods whose tables have the addresses of now
        self._addresses: list[int] | None = None
        self._is_capturing: Callable[[], bool] = bool
        self._mode: Callable[[], Any] = torch.no_grad
        self._on_cpu = False
        self._group()

    def __len__(self) -> int:
        return len(self.tensors)

    def unscale_(self, inv_scale: Tensor, found_inf: Tensor) -> None:
        """Multiply the tensors by `inv_scale` in place and set `found_inf` to 1 if one held NaN or Inf before.

        Equivalent PyTorch: `torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)`, as of
        `ops.unscale_`, to the bit.

        Args:
            inv_scale: fp32, one element, any device; read.
            found_inf: fp32, one element, any device; set to 1.0 on overflow, else left as it is.

        Raises: TypeError or ValueError naming a wrong argument; of tensors that changed see the class.
        """
        try:
            if self._on_cpu and inv_scale.is_cpu and found_inf.is_cpu:
                torch._amp_foreach_non_finite_check_and_unscale_(self.tensors, found_inf, inv_scale)
                return
        except (AttributeError, RuntimeError):  # the former of what is no tensor
            self._explain(inv_scale=inv_scale, found_inf=found_inf)
            raise

        def unscale(filled: bool, batch: Batch, flag: Tensor) -> None:
            passes.unscale_batch_(batch, inv_scale, flag, inverse=True, filled=filled)

        check_scalar(inv_scale, "inv_scale")
        self._run("unscale", unscale, found_inf)

    def check(self, found_inf: Tensor) -> None:
        """Set `found_inf` to 1 if a tensor holds NaN or Inf; the tensors are read, not written.

        Equivalent PyTorch: `if not all(t.isfinite().all() for t in tensors): found_inf.fill_(1)`.

        Args and raises: as `unscale_`.
        """
        try:
            if self._on_cpu and found_inf.is_cpu:
                torch_ops.check(self.tensors, found_inf)
                return
        except (AttributeError, RuntimeError):
            self._explain(found_inf=found_inf)
            raise

        def check(filled: bool, batch: Batch, flag: Tensor) -> None:
            passes.check_batch(batch, flag, filled=filled)

        self._run("check", check, found_inf)

    def norm(self, found_inf: Tensor | None = None, *, inv_scale: Tensor | None = None) -> Tensor:
        """Return the 2-norm of all tensors together as if they were unscaled; they are read, not written.

            torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]) * inv_scale)

        in one pass, with a relative error below 1e-6, as of `ops.grad_norm`.

        Args:
            found_inf: fp32, one element, any device; set to 1.0 if a tensor holds NaN or Inf, else left as it is.
            inv_scale: fp32, one element, any device; None: 1.

        Returns: fp64, `()`, on the first tensor's device; fp32 if that has no fp64; 0 for no tensors.

        Raises: as `unscale_`.
        """
        if inv_scale is not None:
            check_scalar(inv_scale, "inv_scale")
        norm = self._totals("norm", found_inf)[SQUARES].sqrt()
        return norm if inv_scale is None else norm * inv_scale.detach().to(norm.device).abs().reshape(())

    def clip_(self, max_norm: float, found_inf: Tensor | None = None) -> Tensor:
        """Scale the tensors down in place to a 2-norm of at most `max_norm`, unless one holds NaN or Inf.

            norm = self.norm(found_inf).float()
            coef = 1 if found_inf else min(1, max_norm / (norm + 1e-6))
            t *= coef for t in tensors                                  # in fp32 (fp64: in fp64), rounded once

        Equivalent PyTorch: `torch.nn.utils.clip_grad_norm_(tensors' parameters, max_norm)`, whose norm is rounded to
        the tensors' dtype, and which multiplies by NaN. Nothing is written either if `found_inf` is set before.

        Args:
            max_norm: >= 0.
            found_inf: as of `norm`; None: one of its own.

        Returns: the norm before, fp32, `()`, on the first tensor's device.

        Raises: as `unscale_`.
        """
        bound = policy.check_number("max_norm", max_norm)
        totals = self._totals("clip", found_inf)
        norm: Tensor | None = None
        with torch.no_grad():
            for batch in self._batches["clip"]:
                device = batch.layout.device
                local = totals if device == totals.device else torch_ops.wide_on(device, totals)
                one = torch_ops.constants(local, torch.float32, 1.0)
                got, _ = clip_batch_(batch, one, local, bound, None, 0)
                norm = got if device == totals.device and norm is None else norm
        return totals[SQUARES].sqrt().float() if norm is None else norm

    def _totals(self, mode: str, found_inf: Tensor | None) -> Tensor:
        """Return the totals of all batches on the first tensor's device, the flag among them."""
        home = first_device(self.tensors)
        flag = torch.zeros((), dtype=torch.float32, device=home) if found_inf is None else found_inf
        every: list[Tensor] = []

        def add(filled: bool, batch: Batch, bad: Tensor) -> None:
            one = torch_ops.constants(bad, torch.float32, 1.0)
            every.append(torch_ops.wide_on(home, norm_batch(batch, one, bad, None, self._requested, filled=filled)))

        self._run(mode, add, flag)
        if len(every) == 1 and flag.device == home:
            return every[0]
        totals = torch.stack([*every, torch.zeros(TOTALS, dtype=torch_ops.wide_dtype(home), device=home)]).sum(0)
        totals[OVERFLOWS] += flag.detach().to(home).reshape(())  # perhaps set before, where none of the tensors is
        return totals

    def _explain(self, **scalars: Tensor) -> None:
        """Raise our error, which names what is wrong, in place of torch's."""
        for name, scalar in scalars.items():
            check_scalar(scalar, name)
        self._group()

    def _run(self, mode: str, run: _Pass, found_inf: Tensor) -> None:
        """Run a pass on each batch, and combine their flags in `found_inf`."""
        check_scalar(found_inf, "found_inf")
        if found_inf.is_meta:
            raise ValueError(f"found_inf is on device {found_inf.device}, where it cannot be set")
        if self._addresses is None or [*map(Tensor.data_ptr, self.tensors)] != self._addresses:
            self._group()
        batches = self._batches.get(mode)
        if batches is None:
            batches = self._batches[mode] = self._new_batches()
        captured = self._is_capturing()
        run = partial(run, mode in self._filled and not captured)
        with self._mode():
            for batch in batches:
                run_on(batch, found_inf, run)
        if captured:  # its tables have the addresses of the graph
            self._filled.discard(mode)
        else:
            self._filled.add(mode)

    def _group(self) -> None:
        """Check the tensors, and group them anew unless they have the forms of before."""
        before = self._grouped
        with torch.no_grad():
            found = checked(self.tensors)
            self._members = {index: each.detach() for index, each in enumerate(found)}
        self._grouped = self._new_batches()
        is_plain = all(map(is_, found, self.tensors)) and all(map(torch_ops.is_plain, found))
        # DTensors and sparse tensors are looked into in each call.
        self._addresses = [*map(Tensor.data_ptr, self.tensors)] if is_plain else None
        self._filled.clear()
        if [*map(_form, before)] == [*map(_form, self._grouped)]:
            for batches in self._batches.values():
                batches[:] = [
                    now._replace(layout=batch.layout) for now, batch in zip(self._grouped, batches, strict=True)
                ]
            return
        self._batches.clear()
        layouts = [each.layout for each in self._grouped]
        by_kernels = [each.device for each in layouts if each.backend == "triton"]
        self._mode = nullcontext if len(by_kernels) == len(layouts) else torch.no_grad
        self._is_capturing = kernels().launch.capture_query(by_kernels[0]) if by_kernels else bool
        # One batch that is torch's own to serve: its op takes the tensors as they are.
        on_cpu = [each.device.type == "cpu" and each.backend == "torch" for each in layouts] == [True]
        free = not any(each.requires_grad for each in self.tensors)
        self._on_cpu = on_cpu and is_plain and free and {*map(type, self.tensors)} == {Tensor}

    def _new_batches(self) -> list[Batch]:
        batches = group(self._members)
        choose_backends(batches, self._requested)
        return batches


def _form(batch: Batch) -> tuple[object, ...]:
    layout = batch.layout
    return layout.key, *layout.positions, *layout.numels


def run_on(batch: Batch, found_inf: Tensor, run: Callable[[Batch, Tensor], None]) -> None:
    """Run a pass on a batch, with `found_inf` or, for another device, a flag of its own that is added to it."""
    device = batch.layout.device
    if device == found_inf.device:
        run(batch, found_inf)
        return
    flag = torch.zeros((), dtype=torch.float32, device=device)
    run(batch, flag)
    found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def checked(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return what kernels can take of gradients, which is in their memory; raise if one is illegal."""
    locals_ = []
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"grads[{index}] must be a Tensor, got {type(grad).__name__}")
        local = local_tensor(grad)
        check_gradient(local, f"grads[{index}]")
        if local.layout is torch.sparse_coo:
            local = local._values()
            check_overlap(local)  # of fp16, too, which only a plan coalesces
        locals_.append(local)
    return locals_


def check_scalar(tensor: Tensor, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Raise if `tensor` is not one element of `dtype`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.numel() != 1 or tensor.dtype is not dtype:
        raise ValueError(f"{name} must be one {dtype} element, got shape {tuple(tensor.shape)}, {tensor.dtype}")


def first_device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the first tensor's device, the CPU if there is no tensor."""
    return tensors[0].device if len(tensors) and isinstance(tensors[0], Tensor) else torch.device("cpu")


def prepare(tensors: Iterable[Tensor], *, backend: str | None = None) -> Prepared:
    """Return a handle to tensors that are checked and grouped once: for a list that is passed again and again.

        prepared = ops.prepare([parameter.grad for parameter in model.parameters()])
        prepared.unscale_(inv_scale, found_inf)                # as ops.unscale_(the list, inv_scale, found_inf)

    Worth it for tensors that stay where they are, such as flat buffers or gradients that are set to zero in place;
    it keeps them alive.

    Args:
        tensors: fp16, bf16, fp32 or fp64 tensors of any shape on any devices, strided or sparse COO (values as they
            are, duplicates not summed), DTensors as their local shards; none is read or written yet.
        backend: "auto", "triton" or "torch"; default: SCALER_TRITON_BACKEND, else "auto".

    Raises: TypeError naming `grads[i]` if it is no tensor, NotImplementedError its dtype or layout, ValueError its
        device; torch's RuntimeError for overlapping memory; RuntimeError with the cause if "triton" was asked for and
        does not work there.
    """
    return Prepared(tensors, check_backend(backend))


skip_tracing(Prepared)

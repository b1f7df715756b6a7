"""Launch: starts one kernel on its device, with little host time. What Triton keeps private is used only here."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from scaler_triton.kernels.config import WARP_LANES

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
if _VERSION < (3, 6):
    raise ImportError(f"the kernels need triton 3.6 or newer, got {triton.__version__}: pip install 'triton>=3.6'")

# `@triton.jit` reads TRITON_INTERPRET when a kernel is defined: changing it later changes nothing.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_DTYPES = ("float16", "bfloat16", "float32", "float64")
TRITON_DTYPES: dict[torch.dtype, Any] = {getattr(torch, name): getattr(tl, name) for name in _DTYPES}

_data_ptr = Tensor.data_ptr
_runtime = triton.knobs.runtime


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if kernels in this process cannot take tensors on `device`."""
    if INTERPRETED and device.type != "cpu":
        raise RuntimeError(f"under TRITON_INTERPRET=1 the kernels take tensors on cpu, got {device}")
    if not INTERPRETED and device.type == "cpu":
        raise RuntimeError(f"without TRITON_INTERPRET=1 the kernels take tensors on a GPU, got {device}")


def capture_query(device: torch.device) -> Callable[[], bool]:
    """Return a function that returns whether the current stream of `device` is being captured into a graph."""
    if device.type == "cpu":
        return bool
    query: Callable[[], bool] = getattr(
        torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
    )
    return query


def refuse_first_in_capture(device: torch.device) -> None:
    """Raise RuntimeError during a capture, before something that allocates, compiles or waits."""
    if capture_query(device)():
        raise RuntimeError(
            "the first step of an optimizer or of a kind of gradients cannot be captured: take one step like it before"
        )


@functools.cache
def stream_query(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the handle of a GPU's current stream, 0 for its default one."""
    query = getattr(driver.active, "get_current_stream", None)  # quicker than making an object of it
    if query is None:
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    return functools.partial(query, device.index)


def stream(device: torch.device, handle: int) -> torch.cuda.Stream:
    """Return a GPU's stream of that handle."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


class Launch:
    """One kernel with its constants on one device, launched on the device's current stream.

    The first call goes through Triton's dispatch, which compiles. Later ones start the compiled kernel directly, in a
    fraction of the host time. That uses attributes of the compiled kernel and the driver which Triton does not
    document; without them, and while a profiler has launch hooks, the dispatch is used.

    Args:
        kernel: a `@triton.jit` function: pointers, then numbers, which it does not specialise on, then constexprs.
        device: where all its tensors lie, with its index.
        fixed: its first arguments, which are the same tensors, at the same addresses, in every call.
        num_warps: warps of 32 lanes in a program.
        enable_fp_fusion: whether a product and a sum may be rounded once.
        constants: its constexprs, by name, in its own order.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        *,
        fixed: Sequence[Tensor] = (),
        num_warps: int,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        check_device(device)
        self._kernel = kernel
        self._fixed, self._pointers = fixed, tuple(map(_data_ptr, fixed))
        self._device, self._index = device, device.index
        self._current_device = _current_device_query(device)
        # Triton 3.9 warns where fusion is not given, and 3.10 flips its default.
        options = {"num_warps": _native_warps(num_warps, device), "enable_fp_fusion": enable_fp_fusion}
        self._options = {**options, **constants}
        self._placeholders = (None,) * len(constants)  # ignored: constants are compiled in
        self._compiled: tuple[Any, ...] | None = None  # what `_handles` returned; None: use Triton's dispatch
        self._is_first = True
        self._n_tensors = 0  # of a call's arguments, before the numbers
        self._streams: set[int] = set()  # those that the allocator knows to use the tensors

    def __call__(self, n_programs: int, *args: Tensor | float) -> None:
        """Run `n_programs` programs, at least one.

        Args:
            args: the kernel's other tensors and its numbers, in its own order; a float arrives as the kernel's fp32.
        """
        compiled = self._compiled
        try:  # a profiler has installed hooks, which the dispatch calls
            hooked = _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls
        except AttributeError:  # something else stands where Triton keeps its chains of hooks
            hooked = True
        if compiled is None or hooked:
            self._dispatch(n_programs, args)
            return
        if self._current_device() != self._index:
            with _on(self._device):
                self(n_programs, *args)
            return
        start, before, as_one, current_stream, _ = compiled
        stream = current_stream()
        if stream not in self._streams and self._tell_allocator(args):
            self._streams.add(stream)
        count = self._n_tensors
        pointers = map(_data_ptr, args[:count])  # type: ignore[arg-type]
        params = (*self._pointers, *pointers, *args[count:], *self._placeholders)
        try:
            if as_one:
                start(n_programs, 1, 1, stream, *before, params)
            else:
                start(n_programs, 1, 1, stream, *before, *params)
        except TypeError:  # this Triton has another signature; nothing was launched
            self._compiled = None
            self._dispatch(n_programs, args)

    def _dispatch(self, n_programs: int, args: Sequence[Tensor | float]) -> None:
        if self._is_first:
            refuse_first_in_capture(self._device)
        with _on(self._device):
            compiled = self._kernel[(n_programs,)](*self._fixed, *args, **self._options)
        self._tell_allocator(args)
        if self._is_first:
            self._n_tensors = sum(isinstance(arg, Tensor) for arg in args)
            self._compiled = _handles(compiled, self._device)
            self._is_first = False

    def _tell_allocator(self, args: Sequence[Tensor | float]) -> bool:
        """Have it give the tensors' memory to others, once they are freed, only when the current stream is done.

        Else it regards the stream on which they were made, while launches on this one may still be waiting. A stream's
        first launch stands for all: what belongs to a table is among its arguments each time.

        Returns: False in a capture; what graphs read is kept for ever.
        """
        if capture_query(self._device)():
            return False
        if self._device.type != "cpu":
            stream = torch.cuda.current_stream(self._device)
            for arg in (*self._fixed, *args):
                if isinstance(arg, Tensor):
                    arg.record_stream(stream)
        return True


def _handles(compiled: Any, device: torch.device) -> tuple[Any, ...] | None:
    """Return what starts a kernel, or None if this Triton lacks a part of it.

    Returns: a function, what it takes before the kernel's arguments, and whether it takes these as one tuple; the query
        of the stream; the owner of all this.
    """
    run, function, metadata = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    if None in (run, function, metadata):  # as under the interpreter, where there may be no driver to ask
        return None
    if getattr(driver.active, "get_current_stream", None) is None:
        return None
    usual = run, (function, metadata, None, None, None), False
    return *(_in_c(run, function, metadata) or usual), stream_query(device), compiled


def _in_c(run: Any, function: Any, metadata: Any) -> tuple[Any, ...] | None:
    """Return the same three for the function in C that `run` of Triton 3.6 or 3.7 calls; None of another Triton."""
    cooperative, dependent = (getattr(run, f"launch_{name}", None) for name in ("cooperative_grid", "pdl"))
    needs_scratch = any(getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
    if needs_scratch or None in (cooperative, dependent) or not inspect.isbuiltin(getattr(run, "launch", None)):
        return None
    options, nothing = (function, cooperative, dependent), (None, None, None)
    if hasattr(run, "arg_annotations") and hasattr(run, "kernel_signature"):
        return run.launch, (*options, metadata, *nothing, None, None, run.arg_annotations, run.kernel_signature), True
    return (run.launch, (*options, None, None, metadata, *nothing), False) if _VERSION == (3, 6) else None


def _current_device_query(device: torch.device) -> Callable[[], int | None]:
    """Return a function that returns the index of the current GPU."""
    if device.type == "cpu":
        return lambda: None
    query: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
    return query


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if INTERPRETED:
        # Silences numpy's warnings for Inf * 0 and overflowing casts, which are intended.
        with np.errstate(all="ignore"):
            yield
    else:
        with torch.get_device_module(device).device(device):
            yield


def _native_warps(num_warps: int, device: torch.device) -> int:
    """Return how many of the device's warps have the lanes of `num_warps` warps of 32."""
    if INTERPRETED or torch.version.hip is None:
        return num_warps
    lanes: int = torch.cuda.get_device_properties(device).warp_size
    return max(1, num_warps * WARP_LANES // lanes)

"""Launch: starts a compiled kernel on its device, with little host time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from scaler_triton.kernels.launch_config import WARP_LANES

# `@triton.jit` reads TRITON_INTERPRET when a kernel is defined: changing it later changes nothing.
INTERPRETED = bool(triton.knobs.runtime.interpret)

TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if kernels in this process cannot take tensors on `device`."""
    if INTERPRETED and device.type != "cpu":
        raise RuntimeError(f"under TRITON_INTERPRET=1 the kernels take tensors on cpu, got {device}")
    if not INTERPRETED and device.type == "cpu":
        raise RuntimeError(f"without TRITON_INTERPRET=1 the kernels take tensors on a GPU, got {device}")


def indexed(device: torch.device) -> torch.device:
    """Return a GPU device with its index; without one it is the current GPU."""
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def capture_query(device: torch.device) -> Callable[[], bool]:
    """Return a function that tells whether the current stream of `device` is being captured into a graph."""
    query: Callable[[], bool] = getattr(torch.get_device_module(device), "is_current_stream_capturing", lambda: False)
    return query


def current_stream(device: torch.device) -> int:
    """Return the handle of a GPU's current stream, 0 for its default one."""
    query = getattr(driver.active, "get_current_stream", None)  # quicker than making an object of it
    handle: int = torch.cuda.current_stream(device).cuda_stream if query is None else query(device.index)
    return handle


def stream(device: torch.device, handle: int) -> torch.cuda.Stream:
    """Return a GPU's stream of that handle."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def refuse_first_in_capture(device: torch.device) -> None:
    """Raise RuntimeError during a capture, before something that allocates, compiles or waits."""
    if capture_query(device)():
        raise RuntimeError(
            "the first step of an optimizer or of a kind of gradients cannot be captured: take one step like it before"
        )


class Launch:
    """One kernel with its constants on one device, launched on the device's current stream.

    The first call goes through Triton's dispatch, which compiles. Later ones launch the compiled kernel directly, in a
    quarter of the host time (perf/host_stub.py times both). That uses attributes of the compiled kernel and the driver
    which Triton does not document; without them, and while a profiler has launch hooks, every call is dispatched.

    Args:
        kernel: a `@triton.jit` function: pointers and integers first, which it does not specialise on, then constexprs.
        device: where all its tensors lie, with its index.
        fixed: its first tensor arguments, the same in every launch.
        num_warps: warps of 32 lanes in a program.
        constants: its constexprs, by name, in its own order.
    """

    def __init__(
        self, kernel: Any, device: torch.device, *, fixed: Sequence[Tensor] = (), num_warps: int, **constants: Any
    ) -> None:
        check_device(device)
        self._kernel = kernel
        self._device = device
        self._current_device = torch.get_device_module(device).current_device
        self._fixed = tuple(fixed)
        self._addresses = tuple(tensor.data_ptr() for tensor in fixed)
        # enable_fp_fusion: Triton 3.9 warns where it is not given, and 3.10 flips its default.
        self._options = {"num_warps": _native_warps(num_warps, device), "enable_fp_fusion": True, **constants}
        self._placeholders = (None,) * len(constants)  # ignored: constants are compiled in
        self._compiled: tuple[Any, ...] | None = None  # what `_handles` returned for it; (): use Triton's dispatch
        self._streams: set[int] = set()  # those that the allocator knows to use the tensors

    def __call__(self, n_programs: int, *args: Tensor | int) -> None:
        """Run `n_programs` programs, at least one.

        Args:
            args: the kernel's tensors and integers after the fixed ones, in its own order.
        """
        if not self._compiled or _hooked():
            self._dispatch(n_programs, args)
        elif self._current_device() == self._device.index:
            self._start(n_programs, args)
        else:
            with _on(self._device):
                self._start(n_programs, args)

    def _dispatch(self, n_programs: int, args: Sequence[Tensor | int]) -> None:
        if self._compiled is None:
            refuse_first_in_capture(self._device)
        with _on(self._device):
            compiled = self._kernel[(n_programs,)](*self._fixed, *args, **self._options)
        self._tell_allocator(args)
        if self._compiled is None:
            self._compiled = _handles(compiled)

    def _start(self, n_programs: int, args: Sequence[Tensor | int]) -> None:
        assert self._compiled
        run, function, metadata, current_stream, _ = self._compiled
        stream = current_stream(self._device.index)
        if stream not in self._streams and self._tell_allocator(args):
            self._streams.add(stream)
        addresses = [arg if type(arg) is int else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
        try:
            run(
                n_programs, 1, 1, stream, function, metadata, None, None, None,
                *self._addresses, *addresses, *self._placeholders,
            )  # fmt: skip
        except TypeError:  # this Triton has another signature; nothing was launched
            self._compiled = ()
            self._kernel[(n_programs,)](*self._fixed, *args, **self._options)

    def _tell_allocator(self, args: Sequence[Tensor | int]) -> bool:
        """Have it give the tensors' memory to others, once they are freed, only when the current stream is done.

        Else it regards the stream on which they were made, while launches on this one may still be waiting. Of `args`,
        those of a stream's first launch: what belongs to a table is among them each time.

        Returns: False in a capture; what graphs read is kept for ever.
        """
        if capture_query(self._device)():
            return False
        stream = torch.get_device_module(self._device).current_stream(self._device)
        for tensor in (*self._fixed, *args):
            if isinstance(tensor, Tensor) and not tensor.is_cpu:
                tensor.record_stream(stream)
        return True


def _handles(compiled: Any) -> tuple[Any, ...]:
    """Return launch function, kernel, metadata, the query of the stream, and the owner of the first three.

    Returns: () if this Triton lacks one of them.
    """
    handles = tuple(getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    if None in handles:  # as under the interpreter, where there may be no driver to ask
        return ()
    current_stream = getattr(driver.active, "get_current_stream", None)
    return () if current_stream is None else (*handles, current_stream, compiled)


def _hooked() -> bool:
    """Tell whether a profiler has installed launch hooks."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


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

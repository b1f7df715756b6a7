"""The one way to launch a kernel: the right backend, the right device, the same options for every op."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

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
    """Raise RuntimeError where this process's kernels cannot take tensors on `device`."""
    if INTERPRETED and device.type != "cpu":
        raise RuntimeError(f"under TRITON_INTERPRET=1 the kernels take tensors on cpu, got {device}")
    if not INTERPRETED and device.type == "cpu":
        raise RuntimeError(f"without TRITON_INTERPRET=1 the kernels take tensors on a GPU, got {device}")


def launch(kernel: Any, n_programs: int, device: torch.device, *args: Any, num_warps: int, **constants: Any) -> None:
    """Run `n_programs` programs of a kernel on the current stream of `device`; 0 programs are no launch.

    Args:
        kernel: a `@triton.jit` function.
        args: its pointers and scalars, in its own order; tensors lie on `device`.
        num_warps: warps of 32 lanes in a program.
        constants: its constexprs, by name.
    """
    if n_programs == 0:
        return
    check_device(device)
    with _on(device):
        # enable_fp_fusion: Triton 3.9 warns where it is not given, and 3.10 flips its default.
        kernel[(n_programs,)](*args, num_warps=_native_warps(num_warps, device), enable_fp_fusion=True, **constants)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if INTERPRETED:
        # numpy warns of Inf * 0 and of a cast that overflows: here both are meant.
        with np.errstate(all="ignore"):
            yield
    else:
        with torch.get_device_module(device).device(device):
            yield


def _native_warps(num_warps: int, device: torch.device) -> int:
    """Warps as wide as the card's that have the lanes of `num_warps` warps of 32."""
    if INTERPRETED or torch.version.hip is None:
        return num_warps
    lanes: int = torch.cuda.get_device_properties(device).warp_size
    return max(1, num_warps * WARP_LANES // lanes)

"""The passes over gradients in plain torch: for devices without Triton, and the tests' reference for the kernels.

Each takes tensors of one device and dtype (fp16, bf16, fp32 or fp64; any shape and strides), at least one. Products are
taken in fp32 (fp64 for fp64) and rounded once. `inv_scale`, `coef` and `found_inf` are fp32 tensors of one element on
the same device; `found_inf` is written only to become 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import refuse_capture, sync_allowed

# Tells autograd of writes to a sequence of tensors; this is what torch's Python calls.
increment_version: Any = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: fp64, or fp32 where it has none, as Apple's GPUs."""
    if device.type in ("cpu", "cuda", "meta"):
        return torch.float64
    try:
        torch.ones((), dtype=torch.float64, device=device).reciprocal()  # some fail at the first op only
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def wide_on(device: torch.device, numbers: Tensor, *, non_blocking: bool = False) -> Tensor:
    """Return sums on `device`, in its `wide_dtype`."""
    return numbers.to(device, wide_dtype(device), non_blocking=non_blocking)


def serves(on_cpu: bool, dtype: torch.dtype) -> bool:
    """Return whether torch's op of `unscale_` is right there: on GPUs it takes no bf16, and checks fp64 in fp32."""
    return on_cpu or dtype in (torch.float16, torch.float32)


def unscale_(tensors: Sequence[Any], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply every gradient by `inv_scale` and set `found_inf` to 1 if one held NaN or Inf before.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, where it `serves`. Tensor subclasses implement that
    op, and perhaps no other.
    """
    first = tensors[0]
    if serves(first.is_cpu, first.dtype) or not is_plain(first):
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)  # type: ignore[arg-type]
    else:
        check(tensors, found_inf)
        # inv_scale as a bf16 operand would be rounded: multiply in fp32, round once.
        wide = torch.promote_types(first.dtype, torch.float32)
        factor = inv_scale.to(wide).reshape(())  # shape (1,) does not broadcast into a scalar in place
        for tensor in tensors:
            tensor.copy_(tensor.to(wide) * factor)


def check(tensors: Sequence[Any], found_inf: Tensor) -> None:
    """Set `found_inf` to 1 if a gradient holds NaN or Inf; gradients keep their bits."""
    first = tensors[0]
    if first.dtype in (torch.bfloat16, torch.float64) and not first.is_cpu and is_plain(first):
        found_inf.masked_fill_(~torch.stack([tensor.isfinite().all() for tensor in tensors]).all(), 1.0)
    else:
        unscale_(tensors, constants(found_inf, torch.float32, 1.0), found_inf)


def exponent_of(number: Tensor) -> Tensor:
    """Return floor(log2(number)) of positive numbers, fp64 or fp32; at least -127 of fp32."""
    if number.dtype is torch.float64:
        return torch.frexp(number)[1] - 1
    return (number.view(torch.int32) >> 23) - 127  # Apple's GPUs have no frexp


def times_power_of_2(number: Tensor, exponent: Tensor) -> Tensor:
    """Return number * 2**exponent, fp64 or fp32, for an exponent within the range of that dtype."""
    if number.dtype is torch.float64:
        return torch.ldexp(number, exponent.clamp(-1022, 1023).int())
    return number * ((exponent.clamp(-126, 127).int() + 127) << 23).view(torch.float32)


def inverse(scale: Tensor) -> Tensor:
    """Return float(1 / double(scale)), the factor that torch multiplies by; on the CPU kept, and not to be written."""
    if scale.is_cpu and type(scale) is Tensor:  # fake tensors cannot be read
        return _kept_inverse(scale.item())
    return scale.to(wide_dtype(scale.device)).reciprocal().float()


@functools.lru_cache
@torch.inference_mode(False)
def _kept_inverse(scale: float) -> Tensor:
    return torch.tensor(scale, dtype=torch.float64, device="cpu").reciprocal().float()


def host_memory(tensor: Tensor) -> memoryview[Any]:
    """Return a CPU tensor's memory for Python to read and write; writes do not change the tensor's version."""
    return tensor.numpy().data


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is torch's own Tensor or Parameter, not of a subclass that may override ops."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def constants(beside: Tensor, dtype: torch.dtype, *numbers: float) -> Tensor:
    """Return `numbers` on the device of `beside`, kept unless it is a fake tensor, valid in its mode only."""
    make = kept_constants if type(beside) is Tensor else kept_constants.__wrapped__
    return make(beside.device, dtype, *numbers)


@functools.cache
def kept_constants(device: torch.device, dtype: torch.dtype, *numbers: float) -> Tensor:
    """Return `numbers` on `device`; they are kept, and must not be written."""
    refuse_capture(device, "a first step or call of its kind")
    with sync_allowed(device), torch.inference_mode(False):
        # A copy from the host is waited for: the next use may be on another stream.
        return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)

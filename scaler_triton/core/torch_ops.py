"""The passes over gradients in plain torch: for devices without Triton, and the tests' reference for the kernels.

Each takes tensors of one device and dtype (fp16, bf16, fp32 or fp64; any shape and strides), at least one. Products are
taken in fp32 (fp64 for fp64) and rounded once. `inv_scale`, `coef` and `found_inf` are fp32 tensors of one element on
the same device; `found_inf` is written only to become 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.dispatch import refuse_capture, sync_allowed
from scaler_triton.kernels.abi import LARGEST, SEEN, SMALLEST_NORMAL, SQUARES, SUBNORMAL, ZEROS

# Tells autograd of writes to a sequence of tensors; this is what torch's Python calls.
increment_version: Any = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)

_ROW, _BLOCK = 2048, 256  # elements of a row, rows of a block
_SMALLEST = 2.0**-126  # normal number of fp32
_LOW_SQUARE = 2.0**-120  # if the mean of the squares is below this, some of them may have become 0


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums and norms on a device: fp64, or fp32 where it has none, as Apple's GPUs."""
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
    """Return sums or norms on `device`, in its `wide_dtype`."""
    return numbers.to(device, wide_dtype(device), non_blocking=non_blocking)


def unscale_(tensors: Sequence[Any], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply every gradient by `inv_scale` and set `found_inf` to 1 if one held NaN or Inf before.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, which on GPUs does not take bf16, and checks fp64 in
    fp32. Tensor subclasses implement that op, and perhaps no other.
    """
    first = tensors[0]
    if first.is_cpu or first.dtype in (torch.float16, torch.float32) or not is_plain(first):
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


def sum_of_squares(tensors: Sequence[Tensor], found_inf: Tensor, weights: Sequence[float] | None) -> Tensor:
    """Return `sum(weight * (tensor.double() ** 2).sum())`, and set `found_inf` to 1 if a tensor holds NaN or Inf.

    torch rounds norms to the gradients' dtype, and on the CPU fp32 sums of millions of squares drift: this sums in fp64
    without a host wait; on the CPU only the squares of each row of `_ROW` elements are summed in fp32, with a relative
    error below 1e-6. `weights` holds one for each tensor; None: 1 for all.
    """
    if type(found_inf) is type(tensors[0]) is Tensor and found_inf.is_cpu and tensors[0].dtype is not torch.float64:
        total = _sum_by_rows(tensors, weights)
        # In fp32, large squares are infinite and small ones 0: both are summed again, and so are NaN and Inf.
        if sum(map(Tensor.numel, tensors)) * _LOW_SQUARE <= total.item() < math.inf:
            return total
    norms = torch._foreach_norm(list(tensors), 2, torch.float64)
    squares = torch._foreach_mul(norms, norms)
    if tensors[0].dtype is torch.float64 or not is_plain(tensors[0]):  # fp64 squares overflow where all is finite
        check(tensors, found_inf)
    else:
        found_inf.masked_fill_(~torch.stack(squares).isfinite().all(), 1.0)
    if weights is not None:
        torch._foreach_mul_(squares, list(weights))  # as numbers: a copy to the device could not be captured
    return torch.stack(squares).sum()


def sum_of_squares_in_fp32(
    tensors: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, weights: Sequence[float] | None
) -> Tensor:
    """Do what `sum_of_squares` does, of `tensor * inv_scale` and in fp32, for a device without fp64."""
    check(tensors, found_inf)  # the squares of large gradients are infinite
    norms = torch.stack(torch._foreach_norm(list(tensors), 2, torch.float32)) * inv_scale.reshape(())
    squares = norms.square()
    if weights is not None:
        squares = torch.stack(torch._foreach_mul(squares.unbind(), list(weights)))
    return squares.sum()


def _sum_by_rows(tensors: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
    short, rows, row_weights = [], [], []
    wide: Tensor | None = None  # fits the cache, as what is converted at once does not
    for position, tensor in enumerate(tensors):
        numel, rest = tensor.numel(), tensor.numel() % _ROW
        if numel > rest:
            flat = tensor.reshape(-1)
            whole = flat[: numel - rest].view(-1, _ROW)
            if tensor.dtype is torch.float32:
                rows.append(torch.linalg.vector_norm(whole, dim=1))
            else:
                wide = torch.empty(_BLOCK, _ROW, dtype=torch.float32, device="cpu") if wide is None else wide
                for block in whole.split(_BLOCK):  # type: ignore[no-untyped-call]
                    rows.append(torch.linalg.vector_norm(wide[: len(block)].copy_(block), dim=1))
            tensor = flat[numel - rest :]
            if weights is not None:
                row_weights += [weights[position]] * (numel // _ROW)
        short.append(tensor)
    rows.append(torch.stack(torch._foreach_norm(short, 2, torch.float32)))
    squares = torch.cat(rows).double().square_()
    if weights is not None:
        squares.mul_(torch.tensor([*row_weights, *weights], dtype=torch.float64, device="cpu"))
    return squares.sum()


def measure(tensors: Sequence[Tensor], measured: Tensor) -> None:
    """Add to `measured` (`wide_dtype`, [MEASURED_ROW]) the largest finite value, zeros, fp16 subnormals, all elements.

    largest = max(largest, abs(g) for all g that are finite)
    zeros, subnormal, seen += (g == 0).sum(), (0 < abs(g) < 2**-14).sum(), g.numel()
    """
    for tensor in tensors:
        if tensor.numel():
            size = tensor.abs()
            largest = torch.where(size.isfinite(), size, 0.0).amax().to(measured.dtype)
            measured[LARGEST] = torch.maximum(measured[LARGEST], largest)
            zeros = (size == 0).sum()
            small = (size < SMALLEST_NORMAL).sum() - zeros
            measured[ZEROS] += zeros
            measured[SUBNORMAL] += small
            measured[SEEN] += tensor.numel()


def combine_(into: Any, other: Any) -> None:
    """Add what another pass has measured, on the same device, to `into`."""
    into[LARGEST] = torch.maximum(into[LARGEST], other[LARGEST])
    into[ZEROS : SEEN + 1] += other[ZEROS : SEEN + 1]


def clip_(tensors: Sequence[Tensor], inv_scale: Tensor, coef: Tensor) -> None:
    """Multiply every gradient by `inv_scale`, then by `coef`; each product is rounded to the gradients' dtype.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, then `torch._foreach_mul_` by `coef` in fp32 (for
    fp64 gradients in fp64). On the CPU, where asking does not wait, a factor of 1 writes nothing, and an `inv_scale`
    that is a power of 2 takes no pass of its own: rounding is the same unless the first product is subnormal.
    """
    factors, dtype = [inv_scale, coef], tensors[0].dtype
    if inv_scale.is_cpu and type(inv_scale) is type(coef) is Tensor:
        first, second = inv_scale.item(), coef.item()
        if dtype is not torch.float16 and math.frexp(first)[0] == 0.5 and first * second >= _SMALLEST:
            factors = [inv_scale * coef]
        factors = [factor for factor in factors if factor.item() != 1.0]
    for factor in factors:
        if dtype in (torch.float32, torch.float64):
            torch._foreach_mul_(list(tensors), factor.reshape(()).to(dtype))
        else:  # the same product: `_foreach_mul_` by a tensor of another dtype runs one op per gradient
            unscale_(tensors, factor.to(torch.float32), torch.zeros_like(inv_scale))


def norm_of(totals: Tensor) -> Tensor:
    """Return the 2-norm, fp32 `()`, from totals (`wide_dtype`, [TOTALS])."""
    return totals[SQUARES].sqrt().float()


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


def coefficient(flag: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """Return torch's clip coefficient, fp32 `()`: `max_norm / (norm + 1e-6)`, at most 1; 1 if the flag is not 0."""
    return torch.where(flag != 0, 1.0, (float(max_norm) / (norm + 1e-6)).clamp(max=1.0))


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

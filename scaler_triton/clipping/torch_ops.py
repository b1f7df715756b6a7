"""Norms and clipping in plain torch: for devices without Triton, and the tests' reference for the kernels.

As the passes of `core/torch_ops.py`: each takes tensors of one device and dtype, at least one; `inv_scale`, `coef` and
`found_inf` are fp32 tensors of one element on the same device. On the CPU single numbers are computed in Python, with
the same bits, as each op of torch's would take longer than all of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.torch_ops import check, host_memory, is_plain, unscale_
from scaler_triton.kernels.abi import MAX_SCALE, SQUARES
from scaler_triton.policy import as_fp32

_ROW, _BLOCK = 2048, 256  # elements of a row, rows of a block: converted at once, 2 MiB, which caches hold
_LONG = 16 * _ROW  # elements that are read where they are; shorter tensors are copied together, at one op for many
_SMALLEST = 2.0**-126  # normal number of fp32
_TINY = as_fp32(1e-6)  # what torch adds to a norm
_LOW_SQUARE = 2.0**-120  # if the mean of the squares is below this, some of them may have become 0


def sum_of_squares(tensors: Sequence[Tensor], found_inf: Tensor, weights: Sequence[float] | None) -> Tensor:
    """Return `sum(weight * (tensor.double() ** 2).sum())`, and set `found_inf` to 1 if a tensor holds NaN or Inf.

    torch rounds norms to the gradients' dtype, and on the CPU fp32 sums of millions of squares drift: this sums in fp64
    without a host wait; on the CPU only the squares of each row of `_ROW` elements are summed in fp32, with a relative
    error below 1e-6. `weights` holds one for each tensor; None: 1 for all.
    """
    if is_on_host(found_inf, tensors[0]) and tensors[0].dtype is not torch.float64:
        if weights is None:
            total = _sum_by_rows(tensors)
        else:
            pairs = [*zip(weights, tensors, strict=True)]
            total = sum(one * _sum_by_rows([each for of, each in pairs if of == one]) for one in {*weights})
        # In fp32, large squares are infinite and small ones 0: both are summed again, and so are NaN and Inf.
        if sum(map(Tensor.numel, tensors)) * _LOW_SQUARE <= total < math.inf:
            return torch.scalar_tensor(total, dtype=torch.float64, device="cpu")
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


def _sum_by_rows(tensors: Sequence[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(rows, dim=1) for rows in _rows(tensors)]
    if not norms:
        return 0.0
    if len(norms) == 1 == len(norms[0]):
        return float(norms[0].item()) ** 2
    every = torch.cat(norms).double()
    return float(torch.dot(every, every).item())


def _rows(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements as fp32 matrices of rows of `_ROW`, padded with zeros, or as one shorter row.

    A matrix may be overwritten when the next one is asked for.
    """
    is_fp32, wide = tensors[0].dtype is torch.float32, None
    short, numel = [], 0
    for tensor in tensors:
        flat, more = tensor if tensor.dim() == 1 else tensor.reshape(-1), tensor.numel()
        if more >= _LONG:
            more %= _ROW
            rows = flat[: len(flat) - more].view(-1, _ROW)
            if is_fp32:
                yield rows
            else:
                wide = torch.empty(_BLOCK, _ROW, dtype=torch.float32, device="cpu") if wide is None else wide
                for block in rows.split(_BLOCK):  # type: ignore[no-untyped-call]
                    yield wide[: len(block)].copy_(block)
            flat = flat[len(flat) - more :]
        short.append(flat)
        numel += more
        if numel >= _BLOCK * _ROW:
            yield _packed(short, numel)
            short, numel = [], 0
    if numel:
        yield _packed(short, numel)


def _packed(short: list[Tensor], numel: int) -> Tensor:
    rest = -numel % _ROW
    if numel > _ROW and rest:
        short.append(short[0].new_zeros(rest))
    return torch.cat(short).float().view(-1, min(numel, _ROW))


def is_on_host(number: Tensor, other: Tensor) -> bool:
    """Return whether Python can read both: they are torch's own on the CPU, not its fake tensors."""
    return type(number) is type(other) is Tensor and number.is_cpu and other.is_cpu


def clip_(tensors: Sequence[Tensor], inv_scale: Tensor, coef: Tensor) -> None:
    """Multiply every gradient by `inv_scale`, then by `coef`; each product is rounded to the gradients' dtype.

    Equivalent: `torch._amp_foreach_non_finite_check_and_unscale_`, then `torch._foreach_mul_` by `coef` in fp32 (for
    fp64 gradients in fp64). On the CPU, where asking does not wait, a factor of 1 writes nothing, and an `inv_scale`
    that is a power of 2 takes no pass of its own: rounding is the same unless the first product is subnormal.
    """
    factors, dtype = [inv_scale, coef], tensors[0].dtype
    if is_on_host(inv_scale, coef):
        numbers = [inv_scale.item(), coef.item()]
        if dtype is not torch.float16 and math.frexp(numbers[0])[0] == 0.5 and math.prod(numbers) >= _SMALLEST:
            numbers, factors = [1.0, math.prod(numbers)], [inv_scale, inv_scale * coef]
        factors = [factor for factor, number in zip(factors, numbers, strict=True) if number != 1.0]
    for factor in factors:
        if dtype in (torch.float32, torch.float64):
            torch._foreach_mul_(list(tensors), factor.reshape(()).to(dtype))
        else:  # the same product: `_foreach_mul_` by a tensor of another dtype runs one op per gradient
            unscale_(tensors, factor.to(torch.float32), torch.zeros_like(inv_scale))


def norm_of(totals: Tensor) -> Tensor:
    """Return the 2-norm, fp32 `()`, from totals (`wide_dtype`, [TOTALS])."""
    if is_on_host(totals, totals):
        return _fp32(math.sqrt(host_memory(totals)[SQUARES]))
    return totals[SQUARES].sqrt().float()


def coefficient(flag: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """Return torch's clip coefficient, fp32 `()`: `max_norm / (norm + 1e-6)`, at most 1; 1 if the flag is not 0."""
    if not is_on_host(flag, norm):
        return torch.where(flag != 0, 1.0, (float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
    if flag.item() != 0:
        return _fp32(1.0)
    # As torch rounds: a product by the inverse, each in fp32. Twice rounded, first to fp64, is the same for fp32.
    share = _fp32(max_norm).item() * as_fp32(1 / as_fp32(norm.item() + _TINY))
    return _fp32(1.0 if share > 1.0 else share)


def _fp32(number: float) -> Tensor:
    make: Any = torch.tensor if number > MAX_SCALE else torch.scalar_tensor  # which refuses what overflows
    return make(number, dtype=torch.float32, device="cpu")  # type: ignore[no-any-return]

"""Norms and clipping in plain torch: for devices without Triton, and the tests' reference for the kernels.

As the passes of `core/torch_ops.py`: each takes tensors of one device and dtype, at least one; `inv_scale`, `coef` and
`found_inf` are fp32 tensors of one element on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scaler_triton.core.torch_ops import check, is_plain, unscale_
from scaler_triton.kernels.abi import SQUARES

_ROW, _BLOCK = 2048, 256  # elements of a row, rows of a block
_SMALLEST = 2.0**-126  # normal number of fp32
_LOW_SQUARE = 2.0**-120  # if the mean of the squares is below this, some of them may have become 0


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


def coefficient(flag: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    """Return torch's clip coefficient, fp32 `()`: `max_norm / (norm + 1e-6)`, at most 1; 1 if the flag is not 0."""
    return torch.where(flag != 0, 1.0, (float(max_norm) / (norm + 1e-6)).clamp(max=1.0))

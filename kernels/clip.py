"""Unscale and clip in one pass over checked gradients: two products, each rounded; one read, one write.

Moves two element widths per element, or none if both factors are 1. The clip coefficient and the agreed status are
computed here, from the totals of the norm's pass after their reduction over the ranks, so nothing else is launched in
between. For deferred clipping one program computes the factor with which the optimizer does both.
"""

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import launcher
from scaler_triton.kernels.common import edge_ptrs, find_chunk, load_body, narrow, read_table, widen
from scaler_triton.kernels.norm import FAILED, FLAG, SCALES, SQUARES
from scaler_triton.kernels.table import GradTable


@triton.jit(
    do_not_specialize=["max_norm_bits", "ranks"],
    do_not_specialize_on_alignment=["scale_ptr", "totals_ptr", "norm_ptr", "status_ptr"],
)
def _clip_kernel(
    address_ptr,
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    scale_ptr,
    totals_ptr,
    norm_ptr,
    status_ptr,
    max_norm_bits: tl.int64,
    ranks: tl.int64,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    inv = tl.div_rn(1.0, tl.load(scale_ptr))  # plain `/` is approximate in fp32
    norm, coef = _norm_and_coefficient(totals_ptr, max_norm_bits)

    if tl.program_id(0) == 0:
        tl.store(norm_ptr, norm)
        _write_status(totals_ptr, status_ptr, ranks)
    _, index, address, n_elements = read_table(address_ptr, numel_ptr, chunk_tensor_ptr, chunk_index_ptr)
    if (address != 0) & ((inv != 1.0) | (coef != 1.0)):
        body, edges, has_edges = find_chunk(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
        body_ptr, limit = body
        grads = load_body(body, BLOCK_SIZE, UNROLL)
        for step in tl.static_range(UNROLL):
            offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            tl.store(body_ptr + offs, _clipped(grads[step], inv, coef), mask=offs < limit)
        if has_edges:
            ptrs, mask = edge_ptrs(edges, 128 // DTYPE.primitive_bitwidth)
            edge = tl.load(ptrs, mask=mask, other=0.0)
            tl.debug_barrier()  # every warp loads these few elements and one stores them, after all have loaded
            tl.store(ptrs, _clipped(edge, inv, coef), mask=mask)


@triton.jit(
    do_not_specialize=["max_norm_bits", "ranks"],
    do_not_specialize_on_alignment=["scale_ptr", "totals_ptr", "norm_ptr", "status_ptr", "factor_ptr"],
)
def _defer_kernel(scale_ptr, totals_ptr, norm_ptr, status_ptr, factor_ptr, max_norm_bits: tl.int64, ranks: tl.int64):
    norm, coef = _norm_and_coefficient(totals_ptr, max_norm_bits)
    tl.store(norm_ptr, norm)
    tl.store(factor_ptr, tl.div_rn(tl.load(scale_ptr), coef))
    _write_status(totals_ptr, status_ptr, ranks)


@triton.jit
def _norm_and_coefficient(totals_ptr, max_norm_bits):
    """The norm in fp32, and torch's clip coefficient: max_norm / (norm + 1e-6), by a reciprocal; at most 1."""
    max_norm = max_norm_bits.to(tl.int64).to(tl.float64, bitcast=True)  # the interpreter makes small ints int32
    norm = tl.sqrt(tl.load(totals_ptr + SQUARES)).to(tl.float32)
    coef = tl.div_rn(1.0, norm + 1e-6) * max_norm.to(tl.float32)
    bad = tl.load(totals_ptr + FLAG) != 0
    return norm, tl.where(bad | (coef > 1.0), 1.0, coef)  # NaN > 1 is false: NaN stays


@triton.jit
def _write_status(totals_ptr, status_ptr, ranks):
    """The status from sums over ranks (0: none): flag, failure, the sum of the scales, and their excess."""
    if ranks != 0:
        scales = tl.load(totals_ptr + SCALES)
        count = ranks.to(tl.float64)
        ratio = scales * tl.load(totals_ptr + SCALES + 1) / (count * count)
        tl.store(status_ptr, (tl.load(totals_ptr + FLAG) != 0).to(tl.float32))
        tl.store(status_ptr + 1, (tl.load(totals_ptr + FAILED) != 0).to(tl.float32))
        tl.store(status_ptr + 2, scales.to(tl.float32))
        tl.store(status_ptr + 3, (ratio - 1.0).to(tl.float32))


@triton.jit
def _clipped(grad, inv, coef):
    """Two products, each rounded to the gradient's dtype."""
    unscaled = narrow(widen(grad) * inv, grad.dtype)
    return narrow(widen(unscaled) * coef, grad.dtype)


def launch_clip(
    table: GradTable,
    scale: Tensor,
    totals: Tensor,
    max_norm: float,
    norm: Tensor,
    status: Tensor | None = None,
    ranks: int = 0,
) -> None:
    """Multiply every gradient of `table` by the inverse scale, then by the clip coefficient.

        norm = totals[0].sqrt().float()
        coef = 1.0 if totals[1] else (max_norm / (norm + 1e-6)).clamp(max=1.0)   # all in fp32
        grad *= 1 / scale   # in fp32 (fp64 gradients: in fp64), rounded once
        grad *= coef        # likewise
        status = [totals[1] != 0, totals[2] != 0, totals[3], totals[3] * totals[4] / ranks**2 - 1]   # in fp64

    Equivalent PyTorch, to the bit: `torch._amp_foreach_non_finite_check_and_unscale_`, then `torch._foreach_mul_` by
    an fp32 `coef` as the CPU does it. On a GPU torch rounds `coef` to the gradients' dtype first.

    Args:
        table: the gradients, mutated; neither flag nor `bits` are touched.
        scale: fp32, one element, on the table's device, read only.
        totals: fp64, [5], on the table's device, read only: the ranks' sums of what `launch_sum_of_squares` wrote.
        max_norm: >= 0.
        norm: fp32, one element, on the table's device; overwritten, if the table has elements.
        status: fp32, [4], likewise; None if `ranks` is 0.
        ranks: the number of ranks in the sums; 0: no status is written, and only the first two totals are read.
    """
    table.launch(_clip_kernel, scale, totals, norm, norm if status is None else status, _bits(max_norm), ranks)


def launch_defer(
    scale: Tensor, totals: Tensor, max_norm: float, norm: Tensor, factor: Tensor, status: Tensor, ranks: int
) -> None:
    """Compute the one number by which an optimizer divides gradients to unscale and clip them.

        norm, coef, status = as `launch_clip`
        factor = scale / coef

    Args:
        scale: fp32, one element, read only.
        totals: fp64, on the scale's device, read only, as for `launch_clip`.
        max_norm: >= 0.
        norm, factor: fp32, one element, on the scale's device; overwritten.
        status, ranks: as for `launch_clip`; without ranks any tensor, which is not written.
    """
    _defer_on(scale.device)(1, scale, totals, norm, status, factor, _bits(max_norm), ranks)


@functools.cache
def _defer_on(device: torch.device) -> launcher.Launch:
    return launcher.Launch(_defer_kernel, device, num_warps=1)


def _bits(number: float) -> int:
    """Return an fp64 number as an int64 of the same bits: a float argument would be passed in fp32."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits

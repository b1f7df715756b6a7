"""Unscale and clip in one pass over checked gradients: two products, each rounded; one read, one write.

Moves two element widths per element, or none if both factors are 1. The clip coefficient and the agreed status are
computed here, from the totals of the norm's pass after their reduction over the ranks, so nothing else is launched in
between.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.chunks import find_body, find_edges, load_body, narrow, read_table, widen
from scaler_triton.kernels.table import GradTable

_SQUARES, _OVERFLOWS, _FAILURES, _SCALES, _INVERSES = map(tl.constexpr, range(abi.TOTALS))
_FLAG, _FAILED, _SCALE, _EXCESS = map(tl.constexpr, range(abi.STATUS))


@triton.jit(
    do_not_specialize=["max_norm", "ranks"],
    do_not_specialize_on_alignment=["scale_ptr", "totals_ptr", "norm_ptr", "status_ptr"],
)
def _clip_kernel(
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    address_ptr,
    scale_ptr,
    totals_ptr,
    norm_ptr,
    status_ptr,
    max_norm: tl.float32,
    ranks: tl.int64,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    inv = tl.div_rn(1.0, tl.load(scale_ptr))  # plain `/` is approximate in fp32
    overflows = tl.load(totals_ptr + _OVERFLOWS)
    norm = tl.sqrt(tl.load(totals_ptr + _SQUARES)).to(tl.float32)
    coef = tl.div_rn(1.0, norm + 1e-6) * max_norm  # as torch takes it: by a reciprocal
    coef = tl.where((overflows != 0) | (coef > 1.0), 1.0, coef)  # NaN > 1 is false: NaN stays

    if tl.program_id(0) == 0:
        tl.store(norm_ptr, norm)
        write_status(totals_ptr, overflows, status_ptr, ranks)
    _, index, address, n_elements = read_table(numel_ptr, chunk_tensor_ptr, chunk_index_ptr, address_ptr)
    if (address != 0) & ((inv != 1.0) | (coef != 1.0)):
        body_ptr, limit, has_edges = find_body(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
        grads = load_body(body_ptr, limit, BLOCK_SIZE, UNROLL)
        for step in tl.static_range(UNROLL):
            offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            tl.store(body_ptr + offs, _clipped(grads[step], inv, coef), mask=offs < limit)
        if has_edges:
            edge_ptrs, edge_mask = find_edges(address, n_elements, DTYPE)
            edge = tl.load(edge_ptrs, mask=edge_mask, other=0.0)
            tl.debug_barrier()  # every warp loads these few elements and one stores them, after all have loaded
            tl.store(edge_ptrs, _clipped(edge, inv, coef), mask=edge_mask)


@triton.jit
def write_status(totals_ptr, overflows, status_ptr, ranks):
    """The status from sums over ranks (0: none): flag, failure, the sum of the scales, and their excess."""
    if ranks != 0:
        scales = tl.load(totals_ptr + _SCALES)
        count = ranks.to(tl.float64)
        ratio = scales * tl.load(totals_ptr + _INVERSES) / (count * count)
        tl.store(status_ptr + _FLAG, (overflows != 0).to(tl.float32))
        tl.store(status_ptr + _FAILED, (tl.load(totals_ptr + _FAILURES) != 0).to(tl.float32))
        tl.store(status_ptr + _SCALE, scales.to(tl.float32))
        tl.store(status_ptr + _EXCESS, (ratio - 1.0).to(tl.float32))


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
        status: fp32, [4], likewise; None: none is written, and only the first two totals are read.
        ranks: the number of ranks in the sums.
    """
    if table.n_chunks == 0:
        return
    launch = table.launches.get("clip") or table.add_launch("clip", _clip_kernel)
    status, ranks = (norm, 0) if status is None else (status, ranks)
    launch(table.n_chunks, table.addresses, scale, totals, norm, status, float(max_norm), ranks)

"""Unscale and clip in one pass over gradients that were checked: two products, each rounded, one read, one write.

Moves two element widths an element, or none if both factors are 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels.common import edge_ptrs, find_chunk, narrow, widen
from scaler_triton.kernels.table import GradTable


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "coef_ptr"])
def _clip_kernel(
    address_ptr,
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    scale_ptr,
    coef_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    INVERSE: tl.constexpr,
):
    inv = tl.load(scale_ptr)
    if not INVERSE:
        inv = tl.div_rn(1.0, inv)  # plain `/` is approximate in fp32
    coef = tl.load(coef_ptr)
    if DTYPE.primitive_bitwidth < 64:
        coef = coef.to(tl.float32)

    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor_ptr + pid)
    address = tl.load(address_ptr + tensor)
    if (address != 0) & ((inv != 1.0) | (coef != 1.0)):
        n_elements = tl.load(numel_ptr + tensor)
        start = tl.load(chunk_index_ptr + pid).to(tl.int64) * (BLOCK_SIZE * UNROLL)
        body, edges, has_edges = find_chunk(address, n_elements, start, DTYPE, BLOCK_SIZE * UNROLL)
        body_ptr, limit = body
        for step in tl.static_range(UNROLL):
            offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            _multiply(body_ptr + offs, offs < limit, inv, coef)
        if has_edges:
            ptrs, mask = edge_ptrs(edges, 128 // DTYPE.primitive_bitwidth)
            _multiply(ptrs, mask, inv, coef)


@triton.jit
def _multiply(ptrs, mask, inv, coef):
    """Two products, each rounded to the gradient's dtype, as if it had been stored between them."""
    grad = tl.load(ptrs, mask=mask, other=0.0)
    unscaled = narrow(widen(grad) * inv, grad.dtype)
    tl.store(ptrs, narrow(widen(unscaled) * coef, grad.dtype), mask=mask)


def launch_clip(table: GradTable, scale: Tensor, coef: Tensor, *, inverse: bool) -> None:
    """Multiply every gradient of `table` by the inverse scale, then by `coef`.

        inv = scale if inverse else 1 / scale
        grad *= inv       # in fp32 (fp64 gradients: in fp64), rounded once
        grad *= coef      # likewise; `coef` is rounded to fp32 first (for fp64 gradients not at all)

    Equivalent PyTorch, to the bit: `torch._amp_foreach_non_finite_check_and_unscale_`, then `torch._foreach_mul_` by
    an fp32 `coef` as the CPU does it. On a GPU torch rounds `coef` to the gradients' dtype first.

    Args:
        table: the gradients, mutated; neither flag nor `bits` are touched.
        scale: the scale or its inverse, fp32, one element, on the table's device, read only.
        coef: fp64, one element, on the table's device, read only.
        inverse: `scale` holds the inverse scale.
    """
    table.launch(_clip_kernel, scale, coef, INVERSE=inverse)

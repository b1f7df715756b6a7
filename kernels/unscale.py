"""Unscale and check in one pass: reads every gradient, writes it unless the inverse scale is 1.

Moves two element widths per element. Every access to a tensor's body is a whole 16-byte vector, see `common`.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels.common import visit_chunk
from scaler_triton.kernels.table import GradTable


@triton.jit(do_not_specialize_on_alignment=["found_inf_ptr", "scale_ptr", "generation_ptr"])
def _unscale_kernel(
    address_ptr,
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    found_inf_ptr,
    scale_ptr,
    generation_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    INVERSE: tl.constexpr,
):
    inv = tl.load(scale_ptr)
    if not INVERSE:
        inv = tl.div_rn(1.0, inv)  # plain `/` is approximate in fp32
    visit_chunk(
        address_ptr,
        numel_ptr,
        chunk_tensor_ptr,
        chunk_index_ptr,
        bits_ptr,
        found_inf_ptr,
        generation_ptr,
        inv,
        DTYPE,
        BLOCK_SIZE,
        UNROLL,
        WRITE=True,
    )


def launch_unscale(table: GradTable, scale: Tensor, found_inf: Tensor, *, inverse: bool) -> None:
    """Multiply every gradient of `table` by the inverse scale, and flag what was not finite before.

        inv = scale if inverse else 1 / scale
        found_inf = 1 if any gradient has a NaN or an Inf else found_inf
        grad *= inv       # in fp32 (fp64 gradients: in fp64), rounded once

    Args:
        table: the gradients, mutated; its `bits` are marked.
        scale: the scale or its inverse, fp32, one element, on the table's device, read only.
        found_inf: fp32, one element, on the table's device; set to 1.0 or left as it is.
        inverse: `scale` holds the inverse scale.
    """
    table.launch(_unscale_kernel, found_inf, scale, table.generation, INVERSE=inverse)

"""Check only: reads every gradient once, writes none.

Moves one element width per element, half of what a pass that also writes moves.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels.common import visit_chunk
from scaler_triton.kernels.table import GradTable


@triton.jit(do_not_specialize_on_alignment=["found_inf_ptr", "generation_ptr"])
def _check_nonfinite_kernel(
    address_ptr,
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    found_inf_ptr,
    generation_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    visit_chunk(
        address_ptr,
        numel_ptr,
        chunk_tensor_ptr,
        chunk_index_ptr,
        bits_ptr,
        found_inf_ptr,
        generation_ptr,
        1.0,
        DTYPE,
        BLOCK_SIZE,
        UNROLL,
        WRITE=False,
    )


def launch_check_nonfinite(table: GradTable, found_inf: Tensor) -> None:
    """Flag what is not finite in the gradients of `table`.

        found_inf = 1 if any gradient has a NaN or an Inf else found_inf

    Args:
        table: the gradients, read only; its `bits` are marked.
        found_inf: fp32, one element, on the table's device; set to 1.0 or left as it is.
    """
    table.launch(_check_nonfinite_kernel, found_inf, table.generation)

"""Unscale and check gradients in one pass, or only check them.

Unscaling moves two element widths per element, one if the inverse scale is 1; a check one, half of what a pass that
writes moves.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels.chunks import find_body, find_edges, load_body, mark, narrow, read_table, widen
from scaler_triton.kernels.launch import Launch
from scaler_triton.kernels.table import GradTable


@triton.jit(do_not_specialize_on_alignment=["found_inf_ptr", "scale_ptr", "generation_ptr"])
def _unscale_kernel(
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    generation_ptr,
    address_ptr,
    found_inf_ptr,
    scale_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    WRITE: tl.constexpr,
    INVERSE: tl.constexpr,
):
    # Unless the factor is 0 or beyond 1, a product is NaN, Inf or finite just as its gradient: the chunk may be read
    # for marks after the stores, or between them; for other factors before.
    keeps_kinds = True
    inv = 1.0
    if WRITE:
        inv = tl.load(scale_ptr)
        if not INVERSE:
            inv = tl.div_rn(1.0, inv)  # plain `/` is approximate in fp32
        keeps_kinds = (tl.abs(inv) <= 1) & (inv != 0)

    tensor, index, address, n_elements = read_table(numel_ptr, chunk_tensor_ptr, chunk_index_ptr, address_ptr)
    if address != 0:
        if not keeps_kinds:
            mark(bits_ptr, tensor, generation_ptr, address, n_elements, index, DTYPE, BLOCK_SIZE, UNROLL)

        body_ptr, limit, has_edges = find_body(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
        grads = load_body(body_ptr, limit, BLOCK_SIZE, UNROLL)
        acc = tl.zeros([BLOCK_SIZE], tl.float64 if DTYPE.is_fp64() else tl.float32)
        for step in tl.static_range(UNROLL):
            x = widen(grads[step])
            acc += x * 0.0  # Inf * 0 is NaN, and NaN stays
            if WRITE:
                offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
                # A product with 1 need not be stored: then all lanes are masked.
                tl.store(body_ptr + offs, narrow(x * inv, DTYPE), mask=offs < tl.where(inv == 1.0, 0, limit))
        bad = tl.sum(acc)

        if has_edges:
            edge_ptrs, edge_mask = find_edges(address, n_elements, DTYPE)
            edge = widen(tl.load(edge_ptrs, mask=edge_mask, other=0.0))
            if WRITE:
                tl.debug_barrier()  # every warp loads these few elements and one stores them, after all have loaded
                if inv != 1.0:
                    tl.store(edge_ptrs, narrow(edge * inv, DTYPE), mask=edge_mask)
            bad += tl.sum(edge * 0.0)

        if bad != bad:
            tl.store(found_inf_ptr, 1.0)  # all who store here store the same: no atomic
            if keeps_kinds:
                mark(bits_ptr, tensor, generation_ptr, address, n_elements, index, DTYPE, BLOCK_SIZE, UNROLL)


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
    if table.n_chunks:
        launch = launch_of(table, "unscale by inverse" if inverse else "unscale")
        launch(table.n_chunks, table.addresses, found_inf, scale)


def launch_check(table: GradTable, found_inf: Tensor) -> None:
    """Flag what is not finite in the gradients of `table`, which are read only; arguments as of `launch_unscale`."""
    if table.n_chunks:
        launch_of(table, "check")(table.n_chunks, table.addresses, found_inf, found_inf)  # it reads no scale


def launch_of(table: GradTable, mode: str) -> Launch:
    """Return the launch of a pass over a table, whose arguments are the addresses, `found_inf` and the scale.

    Args:
        table: of the gradients.
        mode: "unscale", "unscale by inverse" or "check".
    """
    constants = {"WRITE": mode != "check", "INVERSE": mode == "unscale by inverse"}
    return table.launches.get(mode) or table.add_launch(
        mode, _unscale_kernel, table.bits, table.generation, **constants
    )

"""What gradients hold: the largest that is finite, zeros, and fp16 subnormals, by one launch that only reads.

Moves one element width per element. Each program adds what its chunk holds to the total, by atomics whose order changes
nothing: counts are exact in fp64, and numbers that are not negative have the order of their bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.chunks import find_body, find_edges, load_body, read_table, widen
from scaler_triton.kernels.table import GradTable

_LARGEST, _ZEROS, _SUBNORMAL = map(tl.constexpr, (abi.LARGEST, abi.ZEROS, abi.SUBNORMAL))
_MEASURED = tl.constexpr(abi.MEASURED)
_SMALLEST_NORMAL = tl.constexpr(abi.SMALLEST_NORMAL)


@triton.jit(do_not_specialize_on_alignment=["total_ptr"])
def _measure_kernel(
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    address_ptr,
    total_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    # Another program may raise it meanwhile: then this one's atomic, which most chunks need not make, changes nothing.
    known = tl.load(total_ptr + _LARGEST)
    _, index, address, n_elements = read_table(numel_ptr, chunk_tensor_ptr, chunk_index_ptr, address_ptr)
    if address != 0:
        body_ptr, limit, has_edges = find_body(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
        grads = load_body(body_ptr, limit, BLOCK_SIZE, UNROLL)
        # One number for each 16-byte vector, which a lane holds whole: one for each element would take more registers.
        VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        VECTORS: tl.constexpr = BLOCK_SIZE // VEC
        tops = tl.zeros([VECTORS], tl.int64 if DTYPE.is_fp64() else tl.int32)
        counts = tl.zeros([VECTORS], tl.int32)
        for step in tl.static_range(UNROLL):
            bits = _bits_of(tl.reshape(widen(grads[step]), [VECTORS, VEC]))
            counts += tl.sum(_count(bits, DTYPE), 1)
            tops = tl.maximum(tops, tl.max(_finite(bits, DTYPE), 1))
        largest, zeros, subnormal = tl.max(tops), tl.sum(counts & 0xFFFF), tl.sum(counts >> 16)
        seen = tl.maximum(limit, 0)
        zeros -= BLOCK_SIZE * UNROLL - seen  # which the lanes beyond the limit have held

        if has_edges:
            edge_ptrs, edge_mask = find_edges(address, n_elements, DTYPE)
            edge = _bits_of(widen(tl.load(edge_ptrs, mask=edge_mask, other=0.0)))
            largest = tl.maximum(largest, tl.max(_finite(edge, DTYPE)))
            count, n_edges = tl.sum(_count(edge, DTYPE)), tl.sum(edge_mask.to(tl.int32))
            zeros += (count & 0xFFFF) - (2 * VEC - n_edges)
            subnormal += count >> 16
            seen += n_edges

        top = largest.to(tl.float64 if DTYPE.is_fp64() else tl.float32, bitcast=True).to(tl.float64)
        if top > known:
            place = (total_ptr + _LARGEST).to(tl.pointer_type(tl.int64))
            tl.atomic_max(place, top.to(tl.int64, bitcast=True), sem="relaxed")
        # One access of a few lanes, to one sector: as many atomics of one lane each would queue up for longer.
        lane = tl.arange(0, _MEASURED)
        found = tl.where(lane == _ZEROS, zeros, tl.where(lane == _SUBNORMAL, subnormal, seen))
        tl.atomic_add(total_ptr + lane, found.to(tl.float64), mask=(lane != _LARGEST) & (found != 0), sem="relaxed")


@triton.jit
def _bits_of(x):
    """The bits of |x|, which have its order: ptxas needs fewer registers for integers."""
    return tl.abs(x).to(tl.int64 if x.dtype == tl.float64 else tl.int32, bitcast=True)


@triton.jit
def _finite(bits, DTYPE: tl.constexpr):
    """The bits of what is finite, else 0."""
    infinity = _bits_of(tl.full((), float("inf"), tl.float64 if DTYPE.is_fp64() else tl.float32))
    return tl.where(bits < infinity, bits, 0)


@triton.jit
def _count(bits, DTYPE: tl.constexpr):
    """1 for each zero, 2^16 for each fp16 subnormal, else 0."""
    smallest_normal = _bits_of(tl.full((), _SMALLEST_NORMAL, tl.float64 if DTYPE.is_fp64() else tl.float32))
    return tl.where(bits < smallest_normal, tl.where(bits == 0, 1, 1 << 16), 0)


def launch_measure(table: GradTable, total: Tensor) -> None:
    """Add what the gradients of `table` hold to `total`.

        total[LARGEST] = max(total[LARGEST], abs(g) for all g that are finite)
        total[ZEROS] += (g == 0).sum()
        total[SUBNORMAL] += ((abs(g) > 0) & (abs(g) < 2**-14)).sum()
        total[SEEN] += g.numel()

    Args:
        table: the gradients, read only.
        total: fp64, at least [MEASURED], on the table's device; mutated. LARGEST is not negative.
    """
    if table.n_chunks:
        launch = table.launches.get("measure") or table.add_launch("measure", _measure_kernel)
        launch(table.n_chunks, table.addresses, total)

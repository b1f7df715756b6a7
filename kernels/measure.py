"""What passes measure on their way: the largest gradient, zeros, and fp16 subnormals.

The passes of `unscale.py` and `norm.py` store four numbers a chunk; a second launch adds these up.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.launch import Launch
from scaler_triton.kernels.table import GradTable

_LARGEST, _ZEROS, _SUBNORMAL, _SEEN = map(tl.constexpr, range(abi.MEASURED))
_MEASURED = tl.constexpr(abi.MEASURED)
_SMALLEST_NORMAL = tl.constexpr(abi.SMALLEST_NORMAL)

_BLOCK, _WARPS = 1024, 4


@triton.jit
def start(BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """What the lanes of a block have found before its first element: the largest, and zeros + 2^16 * subnormals.

    One number for each 16-byte vector, which a lane holds whole: one for each element would take too many registers.
    """
    size: tl.constexpr = BLOCK_SIZE // (128 // DTYPE.primitive_bitwidth)
    return tl.zeros([size], tl.float64 if DTYPE.is_fp64() else tl.float32), tl.zeros([size], tl.int32)


@triton.jit
def add(x, largest, counts):
    """`largest` and `counts` with a block of elements more."""
    size = tl.abs(tl.reshape(x, [largest.numel, x.numel // largest.numel]))
    # The counts come first, and by one choice an element: so ptxas needs the fewest registers.
    counts += tl.sum(tl.where(size < _SMALLEST_NORMAL, tl.where(size == 0.0, 1, 1 << 16), 0), 1)
    finite = tl.where(size < float("inf"), size, 0.0)  # false of NaN
    return tl.maximum(largest, tl.max(finite, 1)), counts


@triton.jit
def sum_up(largest, counts, limit, CHUNK_SIZE: tl.constexpr):
    """The largest, zeros, subnormals and elements of a chunk's body; lanes beyond the limit have held zeros."""
    seen = tl.maximum(limit, 0)
    return tl.max(largest), tl.sum(counts & 0xFFFF) - (CHUNK_SIZE - seen), tl.sum(counts >> 16), seen


@triton.jit
def add_edges(edge, mask, top, zeros, subnormal, seen):
    """What a chunk has measured in its body, with its edges."""
    size = tl.abs(edge)
    top = tl.maximum(top, tl.max(tl.where(size < float("inf"), size, 0.0)))
    zeros += tl.sum(((size == 0.0) & mask).to(tl.int32))
    subnormal += tl.sum(((size < _SMALLEST_NORMAL) & (size != 0.0)).to(tl.int32))
    return top, zeros, subnormal, seen + tl.sum(mask.to(tl.int32))


@triton.jit
def store(measured_ptr, top, zeros, subnormal, seen):
    """Store what a chunk has measured."""
    place = measured_ptr + tl.program_id(0) * _MEASURED
    tl.store(place + _LARGEST, top.to(tl.float64))
    tl.store(place + _ZEROS, zeros.to(tl.float64))
    tl.store(place + _SUBNORMAL, subnormal.to(tl.float64))
    tl.store(place + _SEEN, seen.to(tl.float64))


@triton.jit
def store_nothing(measured_ptr):
    """Store that a chunk has no gradient."""
    tl.store(measured_ptr + tl.program_id(0) * _MEASURED + tl.arange(0, _MEASURED), tl.zeros([_MEASURED], tl.float64))


@triton.jit(do_not_specialize=["n_chunks"], do_not_specialize_on_alignment=["total_ptr"])
def _add_measured_kernel(measured_ptr, total_ptr, n_chunks: tl.int64, BLOCK_SIZE: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    place, mask = measured_ptr + chunk * _MEASURED, chunk < n_chunks
    # The order of the programs changes nothing: counts are exact, and numbers >= 0 have the order of their bits.
    largest = tl.max(tl.load(place + _LARGEST, mask=mask, other=0.0)).to(tl.int64, bitcast=True)
    tl.atomic_max((total_ptr + _LARGEST).to(tl.pointer_type(tl.int64)), largest, sem="relaxed")
    for count in tl.static_range(_ZEROS, _MEASURED):
        tl.atomic_add(total_ptr + count, tl.sum(tl.load(place + count, mask=mask, other=0.0)), sem="relaxed")


def launch_add_measured(table: GradTable, total: Tensor) -> None:
    """Add what the last measuring pass over `table` has found to `total`, as `torch_ops.measure` does.

    Args:
        table: the gradients; its `measured` is read.
        total: fp64 [MEASURED], on the table's device; mutated.
    """
    if table.n_chunks == 0:
        return
    launch = table.launches.get("measured")
    if launch is None:
        launch = Launch(_add_measured_kernel, table.device, num_warps=_WARPS, BLOCK_SIZE=_BLOCK)
        table.launches["measured"] = launch
    launch(-(-table.n_chunks // _BLOCK), table.measured, total, table.n_chunks)

"""What a program of a pass does with its chunk: find it, load it, mark its tensor; numbers widened and rounded.

A program processes one chunk of one tensor. Whatever the tensor's alignment, its body starts at the first
16-byte boundary and is accessed by whole 16-byte vectors; the elements before and after it, fewer than one
vector each, are the edges, processed by the program of chunk 0 in one narrow step. An aligned tensor that ends
on a vector has none.

Three things keep the accesses vectorised, each found by reading PTX: the alignment hint is on the *pointer*,
after the cast, which drops hints on the integer; the bound of the mask is a hinted multiple of the vector; one
masked path is for full and partial chunks (two would double the registers).
"""

import triton
import triton.language as tl

from scaler_triton.kernels import abi
from scaler_triton.kernels.launch import INTERPRETED

NAN, INF = tl.constexpr(abi.NAN), tl.constexpr(abi.INF)
KIND_BITS, GENERATIONS = tl.constexpr(abi.KIND_BITS), tl.constexpr(abi.GENERATIONS)
GENERATION_MASK = tl.constexpr(abi.GENERATION_MASK)
# The interpreter truncates fp32 -> bf16 and converts bf16 subnormals wrongly: convert by bits there.
BF16_BY_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def read_table(numel_ptr, chunk_tensor_ptr, chunk_index_ptr, address_ptr):
    """This program's tensor and chunk, the tensor's address (0: no gradient) and size: two dependent loads."""
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor_ptr + pid)
    index = tl.load(chunk_index_ptr + pid)
    return tensor, index, tl.load(address_ptr + tensor), tl.load(numel_ptr + tensor)


@triton.jit
def find_body(address, n_elements, index, DTYPE: tl.constexpr, CHUNK_SIZE: tl.constexpr):
    """The body of a tensor's chunk `index`, its elements, and whether the tensor's edges belong to this chunk."""
    head, tail = edges_of(address, n_elements, DTYPE)
    start = index.to(tl.int64) * CHUNK_SIZE
    aligned = (address + 15) & -16
    body_ptr = tl.multiple_of((aligned + start * (DTYPE.primitive_bitwidth // 8)).to(tl.pointer_type(DTYPE)), 16)
    limit = tl.multiple_of(tl.minimum(tail - head - start, CHUNK_SIZE).to(tl.int32), 128 // DTYPE.primitive_bitwidth)
    return body_ptr, limit, (start == 0) & (tail - head < n_elements)


@triton.jit
def find_edges(address, n_elements, DTYPE: tl.constexpr):
    """Pointers to the elements before and after a tensor's bodies, and their mask."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    head, tail = edges_of(address, n_elements, DTYPE)
    lane = tl.arange(0, 2 * VEC)
    before = lane < VEC
    offs = tl.where(before, lane, tail + lane - VEC)
    return address.to(tl.pointer_type(DTYPE)) + offs, tl.where(before, lane < head, offs < n_elements)


@triton.jit
def edges_of(address, n_elements, DTYPE: tl.constexpr):
    """How many elements lie before the first 16-byte boundary, and where the last whole vector ends."""
    ITEMSIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VEC: tl.constexpr = 16 // ITEMSIZE
    head = tl.minimum((((address + 15) & -16) - address) // ITEMSIZE, n_elements)
    return head, head + (n_elements - head) // VEC * VEC


@triton.jit
def load_body(body_ptr, limit, BLOCK_SIZE: tl.constexpr, UNROLL: tl.constexpr):
    """The chunk's body as UNROLL blocks: all loads are issued before the first store, to have many bytes in flight."""
    blocks = ()
    for step in tl.static_range(UNROLL):
        offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        blocks += (tl.load(body_ptr + offs, mask=offs < limit, other=0.0),)  # type: ignore[assignment]
    return blocks


@triton.jit
def mark(
    bits_ptr,
    tensor,
    generation_ptr,
    address,
    n_elements,
    index,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add the chunk's kinds to its tensor's mark, and return them: the rare path, which reads the chunk once more.

    A later generation in the same place is the larger number, and replaces the mark.
    """
    body_ptr, limit, has_edges = find_body(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
    kinds = 0
    for step in range(UNROLL):
        offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        kinds |= kinds_of(tl.load(body_ptr + offs, mask=offs < limit, other=0.0))
    if has_edges:
        edge_ptrs, edge_mask = find_edges(address, n_elements, DTYPE)
        kinds |= kinds_of(tl.load(edge_ptrs, mask=edge_mask, other=0.0))
    if kinds != 0:
        generation = tl.load(generation_ptr) & GENERATION_MASK
        place = bits_ptr + tensor * GENERATIONS + (generation & (GENERATIONS - 1))
        tl.atomic_max(place, generation << KIND_BITS, sem="relaxed")
        tl.atomic_or(place, kinds, sem="relaxed")
    return kinds


@triton.jit
def kinds_of(grad):
    """NAN and INF of a loaded block, as one int32."""
    x = widen(grad)
    nan = tl.max((x != x).to(tl.int32), 0)
    inf = tl.max((tl.abs(x) == float("inf")).to(tl.int32), 0)
    return nan * NAN | inf * INF


@triton.jit
def widen(x):
    """fp16, bf16 and fp32 as fp32, fp64 unchanged: the types in which torch multiplies."""
    if x.dtype == tl.float64:
        return x
    elif BF16_BY_BITS and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x` rounded once, to nearest even, to `dtype`."""
    if BF16_BY_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)

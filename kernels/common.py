"""What all kernels over a table share: finding a chunk, loading it by whole vectors, checking and marking it.

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

from scaler_triton.kernels import launcher

# The interpreter truncates fp32 -> bf16 and converts bf16 subnormals wrongly: convert by bits there.
_BF16_BY_BITS = tl.constexpr(launcher.INTERPRETED)

SAW_NAN = tl.constexpr(1)
SAW_INF = tl.constexpr(2)
# A mark has the generation, which is the number of skips before, above the kinds. A tensor has marks of so many
# generations: a power of 2.
KIND_BITS = tl.constexpr(2)
GENERATIONS = tl.constexpr(4)
GENERATION_MASK = tl.constexpr((1 << 28) - 1)


@triton.jit
def visit_chunk(
    address_ptr,
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    found_inf_ptr,
    generation_ptr,
    inv,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Set the flag if this program's chunk is not finite and, with WRITE, multiply the chunk by `inv`."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth

    tensor, index, address, n_elements = read_table(address_ptr, numel_ptr, chunk_tensor_ptr, chunk_index_ptr)
    if address != 0:
        body, edges, has_edges = find_chunk(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)

        # Unless the factor is 0 or beyond 1, a product is NaN, Inf or finite just as its gradient: the chunk may be
        # read for marks after the stores, or between them; for other factors before.
        keeps_kinds = (not WRITE) | ((tl.abs(inv) <= 1) & (inv != 0))
        if not keeps_kinds:
            mark(bits_ptr, tensor, generation_ptr, body, edges, has_edges, VEC, BLOCK_SIZE, UNROLL)
        bad = _visit_body(body, inv, VEC, BLOCK_SIZE, UNROLL, WRITE)
        if has_edges:
            bad += _visit_edges(edges, inv, VEC, WRITE)
        if bad != bad:
            tl.store(found_inf_ptr, 1.0)  # all who store here store the same: no atomic
            if keeps_kinds:
                mark(bits_ptr, tensor, generation_ptr, body, edges, has_edges, VEC, BLOCK_SIZE, UNROLL)


@triton.jit
def read_table(address_ptr, numel_ptr, chunk_tensor_ptr, chunk_index_ptr):
    """This program's tensor and chunk, the tensor's address (0: no gradient) and size: two dependent loads."""
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor_ptr + pid)
    index = tl.load(chunk_index_ptr + pid)
    return tensor, index, tl.load(address_ptr + tensor), tl.load(numel_ptr + tensor)


@triton.jit
def find_chunk(address, n_elements, index, DTYPE: tl.constexpr, CHUNK_SIZE: tl.constexpr):
    """The body of a tensor's chunk `index`, the edges of the tensor, and whether they are this chunk's."""
    ITEMSIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VEC: tl.constexpr = 16 // ITEMSIZE

    start = index.to(tl.int64) * CHUNK_SIZE
    aligned = (address + 15) & -16
    head = tl.minimum((aligned - address) // ITEMSIZE, n_elements)
    tail = head + (n_elements - head) // VEC * VEC
    body_ptr = tl.multiple_of((aligned + start * ITEMSIZE).to(tl.pointer_type(DTYPE)), 16)
    limit = tl.multiple_of(tl.minimum(tail - head - start, CHUNK_SIZE).to(tl.int32), VEC)
    has_edges = (start == 0) & (tail - head < n_elements)
    body = (body_ptr, limit)
    edges = (address.to(tl.pointer_type(DTYPE)), head, tail, n_elements)
    return body, edges, has_edges


@triton.jit
def load_body(body, BLOCK_SIZE: tl.constexpr, UNROLL: tl.constexpr):
    """The chunk's body as UNROLL blocks: all loads are issued before the first store, to have many bytes in flight."""
    body_ptr, limit = body
    blocks = ()
    for step in tl.static_range(UNROLL):
        offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        blocks += (tl.load(body_ptr + offs, mask=offs < limit, other=0.0),)  # type: ignore[assignment]
    return blocks


@triton.jit
def _visit_body(body, inv, VEC: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNROLL: tl.constexpr, WRITE: tl.constexpr):
    """NaN if an element of the chunk's body is not finite, else 0; with WRITE the body times `inv`."""
    body_ptr, limit = body
    # A product with 1 need not be stored: then all lanes are masked.
    store_limit = tl.where(inv == 1.0, 0, limit)
    acc = tl.zeros([BLOCK_SIZE], tl.float64 if VEC == 2 else tl.float32)
    grads = load_body(body, BLOCK_SIZE, UNROLL)
    for step in tl.static_range(UNROLL):
        x = widen(grads[step])
        acc += x * 0.0  # Inf * 0 is NaN, and NaN stays
        if WRITE:
            offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            tl.store(body_ptr + offs, narrow(x * inv, grads[step].dtype), mask=offs < store_limit)
    return tl.sum(acc)


@triton.jit
def _visit_edges(edges, inv, VEC: tl.constexpr, WRITE: tl.constexpr):
    """As `_visit_body`, for the elements before and after the body."""
    ptrs, mask = edge_ptrs(edges, VEC)
    grad = tl.load(ptrs, mask=mask, other=0.0)
    x = widen(grad)
    if WRITE:
        tl.debug_barrier()  # every warp loads these few elements and one stores them, after all have loaded
        if inv != 1.0:
            tl.store(ptrs, narrow(x * inv, grad.dtype), mask=mask)
    return tl.sum(x * 0.0)


@triton.jit
def edge_ptrs(edges, VEC: tl.constexpr):
    """Pointers to the elements before and after the body, and their mask."""
    edge_ptr, head, tail, n_elements = edges
    lane = tl.arange(0, 2 * VEC)
    before = lane < VEC
    offs = tl.where(before, lane, tail + lane - VEC)
    return edge_ptr + offs, tl.where(before, lane < head, offs < n_elements)


@triton.jit
def mark(
    bits_ptr,
    tensor,
    generation_ptr,
    body,
    edges,
    has_edges,
    VEC: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add the chunk's kinds to its tensor's mark, and return them: the rare path, which reads the chunk once more.

    A later generation in the same place is the larger number, and replaces the mark.
    """
    body_ptr, limit = body
    kinds = 0
    for step in range(UNROLL):
        offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        kinds |= _kinds(tl.load(body_ptr + offs, mask=offs < limit, other=0.0))
    if has_edges:
        ptrs, mask = edge_ptrs(edges, VEC)
        kinds |= _kinds(tl.load(ptrs, mask=mask, other=0.0))
    if kinds != 0:
        generation = tl.load(generation_ptr) & GENERATION_MASK
        place = bits_ptr + tensor * GENERATIONS + (generation & (GENERATIONS - 1))
        tl.atomic_max(place, generation << KIND_BITS, sem="relaxed")
        tl.atomic_or(place, kinds, sem="relaxed")
    return kinds


@triton.jit
def _kinds(grad):
    """SAW_NAN and SAW_INF of a loaded block, as one int32."""
    x = widen(grad)
    nan = tl.max((x != x).to(tl.int32), 0)
    inf = tl.max((tl.abs(x) == float("inf")).to(tl.int32), 0)
    return nan * SAW_NAN | inf * SAW_INF


@triton.jit
def widen(x):
    """fp16, bf16 and fp32 as fp32, fp64 unchanged: the types in which torch multiplies."""
    if x.dtype == tl.float64:
        return x
    elif _BF16_BY_BITS and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x` rounded once, to nearest even, to `dtype`."""
    if _BF16_BY_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)

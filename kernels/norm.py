"""The sum of squares of all gradients and the check, in one pass that reads every gradient once and writes none.

Moves one element width per element. A program sums a few squares at a time in fp32, and these sums in fp64; it stores
one fp64 number per chunk, and one program adds those in order. So the result is the same in every run, for tensors of
the same alignment to 16 bytes.
"""

import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.chunks import find_body, find_edges, load_body, mark, read_table, widen
from scaler_triton.kernels.launch import Launch
from scaler_triton.kernels.table import PARTIALS_BLOCK, GradTable

_SQUARES, _OVERFLOWS, _FAILURES, _SCALES, _INVERSES = map(tl.constexpr, range(abi.TOTALS))

# A chunk has at most 2^20 elements: if its fp32 sum reaches this, what squares lost by underflow is negligible. If it
# does not, or is infinite, the chunk is read again, multiplied by a factor that avoids underflow or overflow.
_LOW_SUM = tl.constexpr(2.0**-100)
_RAISE = tl.constexpr(2.0**100)
_LOWER = tl.constexpr(2.0**-80)

_FINISH_WARPS = 16


@triton.jit(do_not_specialize_on_alignment=["found_inf_ptr", "weight_ptr", "partial_ptr", "generation_ptr"])
def _sum_squares_kernel(
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    generation_ptr,
    weight_ptr,
    partial_ptr,
    address_ptr,
    found_inf_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    tensor, index, address, n_elements = read_table(numel_ptr, chunk_tensor_ptr, chunk_index_ptr, address_ptr)
    total = tl.zeros((), tl.float64)
    if address != 0:
        total = _sum_squares(address, n_elements, index, 1.0, DTYPE, BLOCK_SIZE, UNROLL)
        if DTYPE.is_bf16() or DTYPE.is_fp32():  # fp32 holds every square of fp16, and their sum
            low = total < _LOW_SUM
            if low | (total - total != 0):  # fp32 may have underflowed or overflowed
                lift = tl.where(low, _RAISE, _LOWER)
                total = _sum_squares(address, n_elements, index, lift, DTYPE, BLOCK_SIZE, UNROLL)
                total *= tl.where(low, _RAISE**-2, _LOWER**-2).to(tl.float64)
        if total - total != 0:
            kinds = mark(bits_ptr, tensor, generation_ptr, address, n_elements, index, DTYPE, BLOCK_SIZE, UNROLL)
            if kinds != 0:  # else only squares of finite fp64 elements overflowed
                tl.store(found_inf_ptr, 1.0)
        total *= tl.load(weight_ptr + tensor)
    tl.store(partial_ptr + tl.program_id(0), total)


@triton.jit
def _sum_squares(address, n_elements, index, lift, DTYPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNROLL: tl.constexpr):
    """The sum of (x * lift)^2 over the chunk in fp64; each square, and the sum of UNROLL of them, in fp32."""
    body_ptr, limit, has_edges = find_body(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
    grads = load_body(body_ptr, limit, BLOCK_SIZE, UNROLL)
    acc = tl.zeros([BLOCK_SIZE], tl.float64 if DTYPE.is_fp64() else tl.float32)
    for step in tl.static_range(UNROLL):
        x = widen(grads[step]) * lift
        acc += x * x
    total = tl.sum(acc.to(tl.float64))
    if has_edges:
        edge_ptrs, edge_mask = find_edges(address, n_elements, DTYPE)
        edge = widen(tl.load(edge_ptrs, mask=edge_mask, other=0.0)) * lift
        total += tl.sum((edge * edge).to(tl.float64))
    return total


@triton.jit(
    do_not_specialize=["n_partials"], do_not_specialize_on_alignment=["scale_ptr", "found_inf_ptr", "totals_ptr"]
)
def _finish_kernel(partial_ptr, scale_ptr, found_inf_ptr, totals_ptr, n_partials: tl.int64, BLOCK_SIZE: tl.constexpr):
    acc = tl.zeros([BLOCK_SIZE], tl.float64)
    while n_partials > 0:  # whole blocks: without a mask a lane loads two numbers at once
        acc += tl.load(partial_ptr + tl.arange(0, BLOCK_SIZE))
        partial_ptr += BLOCK_SIZE
        n_partials -= BLOCK_SIZE
    scale = tl.load(scale_ptr)
    inv = tl.div_rn(1.0, scale).to(tl.float64)  # plain `/` is approximate in fp32
    tl.store(totals_ptr + _SQUARES, tl.sum(acc) * inv * inv)
    tl.store(totals_ptr + _OVERFLOWS, tl.load(found_inf_ptr).to(tl.float64))
    tl.store(totals_ptr + _FAILURES, 0.0)
    tl.store(totals_ptr + _SCALES, scale.to(tl.float64))
    tl.store(totals_ptr + _INVERSES, 1.0 / scale.to(tl.float64))


def launch_sum_of_squares(table: GradTable, scale: Tensor, found_inf: Tensor, totals: Tensor) -> None:
    """Sum the squares of the gradients as if they were unscaled, and flag what is not finite in them.

        found_inf = 1 if any gradient has a NaN or an Inf else found_inf
        squares = sum(weight * (grad.double() ** 2).sum() for grad, weight in table) * (1 / scale).double() ** 2
        totals = [squares, found_inf, 0, scale, 1 / scale.double()]      # in the order of `abi`

    The relative error of the sum is at most 1e-6 while the result is a normal fp64 number, however large or small the
    gradients are; unscaled values are not rounded to their dtype.

    Args:
        table: the gradients, read only; its `bits` are marked.
        scale: fp32, one element, on the table's device, read only.
        found_inf: fp32, one element, on the table's device; set to 1.0 or left as it is.
        totals: fp64, [5], on the table's device, overwritten; the sum of squares is 0 if there are no elements.
    """
    if table.n_chunks:
        launch = table.launches.get("norm")
        if launch is None:
            fixed = table.bits, table.generation, table.weights, table.partials
            launch = table.add_launch("norm", _sum_squares_kernel, *fixed)
        launch(table.n_chunks, table.addresses, found_inf)
    finish = table.launches.get("finish")
    if finish is None:
        finish = Launch(_finish_kernel, table.device, num_warps=_FINISH_WARPS, BLOCK_SIZE=PARTIALS_BLOCK)
        table.launches["finish"] = finish
    finish(1, table.partials, scale, found_inf, totals, table.partials.numel())

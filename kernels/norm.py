"""The sum of squares of all gradients and the check, in one pass that reads every gradient once and writes none.

Moves one element width per element. A program sums a few squares at a time in fp32, and these sums in fp64; it stores
one fp64 number per chunk, and one program adds those in order. So the result is the same in every run, for tensors of
the same alignment to 16 bytes.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaler_triton.kernels import launcher
from scaler_triton.kernels.common import edge_ptrs, find_chunk, load_body, mark, read_table, widen
from scaler_triton.kernels.table import GradTable

# Totals, fp64 [5], which ranks sum in one reduction: the sum of squares, the flag, whether a rank failed to check its
# gradients, and the scale and its inverse, by which the ranks compare their scales.
SQUARES, FLAG, FAILED, SCALES = map(tl.constexpr, range(4))

# A chunk has at most 2^20 elements: if its fp32 sum reaches this, what squares lost by underflow is negligible. If it
# does not, or is infinite, the chunk is read again, multiplied by a factor that avoids underflow or overflow.
_LOW_SUM = tl.constexpr(2.0**-100)
_RAISE = tl.constexpr(2.0**100)
_LOWER = tl.constexpr(2.0**-80)

_FINISH_WARPS, _FINISH_BLOCK = 16, 4096


class NormTable(GradTable):
    """A table with a partial sum for each chunk and a weight for each tensor, 1 at first: made when first read.

    Attributes:
        partials: fp64, on the device, one per chunk, padded with zeros to whole blocks.
        weights: fp64 `[N]`, on the device; what the sum of squares of tensor `t` is multiplied by.
    """

    _held: Sequence[float] | None = None  # the weights on the device

    @functools.cached_property
    def partials(self) -> Tensor:
        return self._filled(0.0, -(-self.n_chunks // _FINISH_BLOCK) * _FINISH_BLOCK)

    @functools.cached_property
    def weights(self) -> Tensor:
        return self._filled(1.0, len(self.numels))

    @torch.inference_mode(False)  # later steps write it outside that mode
    def _filled(self, value: float, size: int) -> Tensor:
        launcher.refuse_first_in_capture(self.device)
        return torch.full((size,), value, dtype=torch.float64, device=self.device)

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Set the weights; nothing is copied if they are the same.

        Args:
            weights: one per tensor; None: 1 for all.

        Raises: ValueError for a wrong number of them.
        """
        if weights is self._held or weights == self._held:
            return
        if weights is not None and len(weights) != len(self.weights):
            raise ValueError(f"weights: expected {len(self.weights)} of them, got {len(weights)}")
        launcher.refuse_first_in_capture(self.device)
        wanted = [1.0] * len(self.weights) if weights is None else list(weights)
        self._held = ()  # equal to no list: an interrupted copy may have arrived or not
        self.weights.copy_(torch.tensor(wanted, dtype=torch.float64, device="cpu"))
        self._held = weights

    def launch_finish(self, scale: Tensor, found_inf: Tensor, totals: Tensor, *, inverse: bool) -> None:
        """Run `_finish_kernel` over the partial sums."""
        key = (id(_finish_kernel), inverse)
        if key not in self._launches:
            self._launches[key] = launcher.Launch(
                _finish_kernel,
                self.device,
                fixed=(self.partials,),
                num_warps=_FINISH_WARPS,
                INVERSE=inverse,
                BLOCK_SIZE=_FINISH_BLOCK,
            )
        self._launches[key](1, scale, found_inf, totals, len(self.partials))


@triton.jit(do_not_specialize_on_alignment=["found_inf_ptr", "weight_ptr", "partial_ptr", "generation_ptr"])
def _sum_squares_kernel(
    address_ptr,
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    bits_ptr,
    found_inf_ptr,
    weight_ptr,
    partial_ptr,
    generation_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    tensor, index, address, n_elements = read_table(address_ptr, numel_ptr, chunk_tensor_ptr, chunk_index_ptr)
    total = tl.zeros((), tl.float64)
    if address != 0:
        body, edges, has_edges = find_chunk(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
        total = _sum_squares(body, edges, has_edges, 1.0, VEC, BLOCK_SIZE, UNROLL)
        if DTYPE.is_bf16() or DTYPE.is_fp32():  # fp32 holds every square of fp16, and their sum
            total = _sum_lifted(total, body, edges, has_edges, VEC, BLOCK_SIZE, UNROLL)
        if total - total != 0:
            kinds = mark(bits_ptr, tensor, generation_ptr, body, edges, has_edges, VEC, BLOCK_SIZE, UNROLL)
            if kinds != 0:  # else only squares of finite fp64 elements overflowed
                tl.store(found_inf_ptr, 1.0)
        total *= tl.load(weight_ptr + tensor)
    tl.store(partial_ptr + tl.program_id(0), total)


@triton.jit
def _sum_squares(body, edges, has_edges, lift, VEC: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNROLL: tl.constexpr):
    """The sum of (x * lift)^2 over the chunk in fp64; each square, and the sum of UNROLL of them, in fp32."""
    acc = tl.zeros([BLOCK_SIZE], tl.float64 if VEC == 2 else tl.float32)
    grads = load_body(body, BLOCK_SIZE, UNROLL)
    for step in tl.static_range(UNROLL):
        x = widen(grads[step]) * lift
        acc += x * x
    total = tl.sum(acc.to(tl.float64))
    if has_edges:
        ptrs, mask = edge_ptrs(edges, VEC)
        edge = widen(tl.load(ptrs, mask=mask, other=0.0)) * lift
        total += tl.sum((edge * edge).to(tl.float64))
    return total


@triton.jit
def _sum_lifted(total, body, edges, has_edges, VEC: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNROLL: tl.constexpr):
    """`total`; or, if fp32 may have underflowed or overflowed, the sum of the scaled chunk, read once more."""
    low = total < _LOW_SUM
    if low | (total - total != 0):
        lift = tl.where(low, _RAISE, _LOWER)
        lifted = _sum_squares(body, edges, has_edges, lift, VEC, BLOCK_SIZE, UNROLL)
        total = lifted * tl.where(low, _RAISE**-2, _LOWER**-2).to(tl.float64)
    return total


@triton.jit(
    do_not_specialize=["n_partials"], do_not_specialize_on_alignment=["scale_ptr", "found_inf_ptr", "totals_ptr"]
)
def _finish_kernel(
    partial_ptr,
    scale_ptr,
    found_inf_ptr,
    totals_ptr,
    n_partials: tl.int64,
    INVERSE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    acc = tl.zeros([BLOCK_SIZE], tl.float64)
    while n_partials > 0:  # whole blocks: without a mask a lane loads two numbers at once
        acc += tl.load(partial_ptr + tl.arange(0, BLOCK_SIZE))
        partial_ptr += BLOCK_SIZE
        n_partials -= BLOCK_SIZE
    scale = tl.load(scale_ptr)
    inv = scale
    if not INVERSE:
        inv = tl.div_rn(1.0, inv)  # plain `/` is approximate in fp32
    inv = inv.to(tl.float64)
    tl.store(totals_ptr + SQUARES, tl.sum(acc) * inv * inv)
    tl.store(totals_ptr + FLAG, tl.load(found_inf_ptr).to(tl.float64))
    tl.store(totals_ptr + FAILED, 0.0)
    tl.store(totals_ptr + SCALES, scale.to(tl.float64))
    tl.store(totals_ptr + SCALES + 1, 1.0 / scale.to(tl.float64))


def launch_sum_of_squares(table: NormTable, scale: Tensor, found_inf: Tensor, totals: Tensor, *, inverse: bool) -> None:
    """Sum the squares of the gradients as if they were unscaled, and flag what is not finite in them.

        inv = scale if inverse else 1 / scale
        found_inf = 1 if any gradient has a NaN or an Inf else found_inf
        squares = sum(weight * (grad.double() ** 2).sum() for grad, weight in table) * inv.double() ** 2
        totals = [squares, found_inf, 0, scale, 1 / scale.double()]

    The relative error of the sum is at most 1e-6 while the result is a normal fp64 number, however large or small the
    gradients are; unscaled values are not rounded to their dtype.

    Args:
        table: the gradients, read only; its `bits` are marked.
        scale: the scale or its inverse, fp32, one element, on the table's device, read only.
        found_inf: fp32, one element, on the table's device; set to 1.0 or left as it is.
        totals: fp64, [5], on the table's device, overwritten; the sum of squares is 0 if there are no elements.
        inverse: `scale` holds the inverse scale.
    """
    table.launch(_sum_squares_kernel, found_inf, table.weights, table.partials, table.generation)
    table.launch_finish(scale, found_inf, totals, inverse=inverse)

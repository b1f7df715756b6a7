"""What the passes share: each element of a tensor is in one chunk only, numbers keep their bits, marks their places."""

import kernel_cases as cases
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, DTYPES, INF, NAN, Guarded, finite_values

from scaler_triton.kernels.chunks import find_body, find_edges, load_body, narrow, read_table, widen
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.unscale import launch_check


@triton.jit(do_not_specialize_on_alignment=["scale_ptr"])
def _add_kernel(
    numel_ptr,
    chunk_tensor_ptr,
    chunk_index_ptr,
    address_ptr,
    scale_ptr,
    DTYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    number = tl.load(scale_ptr)  # a constant would let the compiler add in fp16
    _, index, address, n_elements = read_table(numel_ptr, chunk_tensor_ptr, chunk_index_ptr, address_ptr)
    if address != 0:
        body_ptr, limit, has_edges = find_body(address, n_elements, index, DTYPE, BLOCK_SIZE * UNROLL)
        grads = load_body(body_ptr, limit, BLOCK_SIZE, UNROLL)
        for step in tl.static_range(UNROLL):
            offs = step * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            tl.store(body_ptr + offs, narrow(widen(grads[step]) + number, DTYPE), mask=offs < limit)
        if has_edges:
            edge_ptrs, edge_mask = find_edges(address, n_elements, DTYPE)
            edge = widen(tl.load(edge_ptrs, mask=edge_mask, other=0.0))
            tl.debug_barrier()  # every warp loads these few elements and one stores them, after all have loaded
            tl.store(edge_ptrs, narrow(edge + number, DTYPE), mask=edge_mask)


def add_one(table):
    with cases.launched(*["_add_kernel"][: table.n_chunks]):
        if table.n_chunks:
            one = torch.ones((), device=DEVICE)
            table.add_launch("add", _add_kernel)(table.n_chunks, table.addresses, one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_element_is_in_one_chunk_and_none_around_it_in_any(dtype):
    grads = cases.every_shape(dtype, lambda numel, dtype, seed: torch.arange(numel).remainder(7).to(dtype))
    add_one(cases.make_table(grads, dtype))
    for grad in grads:
        grad.assert_holds(grad.values + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once_to_nearest_even(dtype):
    grads = [Guarded(finite_values(1009, dtype, seed), seed) for seed in range(4)]
    if dtype.itemsize == 2:
        grads.append(Guarded(torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype), 3))
    add_one(cases.make_table(grads, dtype, DEFAULT))
    for grad in grads:
        wide = grad.values if dtype is torch.float64 else grad.values.float()
        grad.assert_holds((wide + 1.0).to(dtype))


def test_a_tensor_without_an_address_is_left_alone():
    grads = [Guarded(torch.ones(700), offset) for offset in range(3)]
    table = cases.make_table(grads, torch.float32)
    table.set_addresses((grads[0].tensor.data_ptr(), 0, grads[2].tensor.data_ptr()))
    add_one(table)
    for grad, want in zip(grads, (2.0, 1.0, 2.0), strict=True):
        grad.assert_holds(torch.full((700,), want))


def test_a_later_generation_replaces_the_mark_in_its_place():
    grad = Guarded(torch.tensor([NAN, 1.0]))
    table = cases.make_table([grad], torch.float32)
    for generation, element, want in ((1, NAN, [0, 5, 0, 0]), (2, INF, [0, 5, 10, 0]), (5, INF, [0, 22, 10, 0])):
        table.generation.fill_(generation)
        grad.tensor[0] = element
        flag = torch.zeros((), device=DEVICE)
        launch_check(table, flag)
        assert flag == 1
        assert table.bits.tolist() == [want]

"""Measuring: what gradients hold, before anything is written; and what ranks add up."""

import math
from unittest import mock

import pytest
import torch
from batches import batch_of
from helpers import DTYPES, PLACES, Place, assert_same, parameters, randn, started, wide
from torch import Tensor

from scaler_triton import GradScaler
from scaler_triton.core.flag import Flag
from scaler_triton.kernels.abi import STATUS
from scaler_triton.measuring import measure
from scaler_triton.measuring.measure import BINADES, LOWEST_BINADE, PACKED, Measure, measure_batch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measuring_is_numpys(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = every.view(dtype) if dtype.itemsize == 2 else every.view(torch.float16).to(dtype) * 1e-3
    tensors = [values.clone(), values[values.isfinite()].clone(), torch.zeros(0, dtype=dtype), values[:5].clone()]
    measured = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0], dtype=torch.float64)
    measure.measure(tensors, measured)
    size = torch.cat(tensors).double().abs().numpy()
    small = ((size > 0) & (size < 2.0**-14)).sum()
    want = [size[size < math.inf].max(), 1 + (size == 0).sum(), 2 + small, 3 + size.size, 9]
    assert measured.tolist() == want
    measure._combine(measured, torch.tensor([1e300, 1.0, 1.0, 1.0, 5.0], dtype=torch.float64))
    measure._combine(measured, torch.zeros(5, dtype=torch.float64))
    assert measured.tolist() == [1e300, *(number + 1 for number in want[1:4]), 9]


@PLACES
def test_partial_gradients_are_not_measured(place: Place) -> None:
    batch = batch_of([torch.tensor([8.0, 0.0])], place)
    flag = Flag(torch.zeros(STATUS, device=place.device), extra=torch.zeros(5, device=place.device, dtype=wide(place)))
    for is_partial, elements in ((True, 0), (False, 2)):  # of its sum a rank has only its own term
        Measure().run(batch._replace(is_partial=is_partial), torch.ones((), device=place.device), flag)
        assert flag.extra is not None
        assert flag.extra[3].item() == elements


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_is_measured_as_it_is(place: Place, dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -math.inf, math.nan, 3.0], dtype=dtype)
    tensors = [randn(700, dtype) * 2.0**-14, special, torch.ones(0, dtype=dtype)]
    batch, want = batch_of([*tensors, None], place), torch.tensor([0.5, 1.0, 2.0, 3.0, 7.0], dtype=torch.float64)
    row = want.to(place.device, wide(place), copy=True)
    for _ in range(2):
        measure_batch(batch, row)
        measure.measure(tensors, want)
    assert row.tolist() == want.tolist()
    for before, after in zip(tensors, batch.present, strict=True):
        assert_same(after, before)


@PLACES
@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_"])
def test_gradients_are_measured_by_a_pass_before_the_one_that_may_write(place: Place, how: str) -> None:
    scaler = started(GradScaler, place.device, init_scale=4.0, measure=True, backend=place.backend)
    (parameter,) = parameters([torch.tensor([8.0, 0.0])], place.device)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    arguments = (1.0,) if how == "clip_grad_norm_" else ()
    with mock.patch.object(measure, "measure_batch", side_effect=MemoryError), pytest.raises(MemoryError):
        getattr(scaler, how)(optimizer, *arguments)
    assert parameter.grad.tolist() == [8.0, 0.0]


# What ranks have measured, as sums


def row(largest: float, zeros: float = 0.0, subnormal: float = 0.0, seen: float = 1.0, at: float = 1.0) -> Tensor:
    return torch.tensor([largest, zeros, subnormal, seen, at], dtype=torch.float64)


def flag_of(row: Tensor) -> Flag:
    return Flag(torch.zeros(STATUS), extra=row)


def packed(row: Tensor, *others: Tensor) -> Tensor:
    """Return what a rank's flags add to the message."""
    return Measure().numbers([flag_of(row), *map(flag_of, others)])


def unpack_(row: Tensor, sums: Tensor) -> None:
    Measure().agreed([flag_of(row)], sums)


@pytest.mark.parametrize("at", [1.0, 2.0**16, 1000.0, 3e-30, 1.7e38])
def test_sums_keep_the_largest_binade_and_add_counts(at: float) -> None:
    largest = [at * 2.0**exponent * 1.999 for exponent in (-9, -3, -3, -20)]
    largest = [size for size in largest if 2.0**LOWEST_BINADE <= size < 2.0 ** (LOWEST_BINADE + BINADES)]
    rows = [row(size, 1.0, 2.0, 10.0, at) for size in largest] + [row(0.0, 7.0, 0.0, 7.0, at)]
    sums = torch.stack([packed(each) for each in rows]).sum(0)
    assert sums.shape == (PACKED,)
    result = row(0.0, at=at)
    unpack_(result, sums)
    want = at * 2.0 ** (math.floor(math.log2(max(largest) / at))) if largest else 0.0
    assert result.tolist() == [want, 7.0 + len(largest), 2.0 * len(largest), 7.0 + 10.0 * len(largest), at]


def test_the_ends_of_the_histogram_hold_all_beyond_and_nothing_is_0() -> None:
    last = LOWEST_BINADE + BINADES - 1
    for size, want in ((2.0**-80, 2.0**LOWEST_BINADE), (2.0**60, 2.0**last), (0.0, 0.0)):
        result = row(1.0)
        unpack_(result, packed(row(size, seen=0.0)))
        assert result.tolist() == [want, 0.0, 0.0, 0.0, 1.0]


def test_of_flags_that_share_a_check_the_first_gets_it_all() -> None:
    one, other = row(2.0, 1.0, 0.0, 4.0), row(8.0, 2.0, 3.0, 5.0)
    assert packed(one, other).tolist() == packed(row(8.0, 3.0, 3.0, 9.0)).tolist()
    assert (one.tolist(), other.tolist()) == ([8.0, 3.0, 3.0, 9.0, 1.0], [0.0] * 5)

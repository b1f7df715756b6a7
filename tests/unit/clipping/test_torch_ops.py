"""Norms and clipping in plain torch: norms as good as fp64, products as torch rounds them."""

import math
import random
from typing import Any

import pytest
import torch
from helpers import DTYPES, assert_all_same, assert_same, randn, sum_of_squares
from op_cases import SPECIALS, Away, flag, some
from torch import Tensor

from scaler_triton.clipping import torch_ops
from scaler_triton.core import torch_ops as core_ops
from scaler_triton.core.torch_ops import inverse
from scaler_triton.kernels.abi import OVERFLOWS, SQUARES, TOTALS


@pytest.fixture(autouse=True)
def _away_is_plain(monkeypatch: Any) -> None:
    for module in (torch_ops, core_ops):
        monkeypatch.setattr(module, "is_plain", lambda tensor: type(tensor) in (Tensor, Away))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 0.25, 0.5, 1.0, 1.0]])
@pytest.mark.parametrize("kind", [Tensor, Away])
def test_squares_are_summed_exactly_enough(dtype: torch.dtype, weights: list[float] | None, kind: type) -> None:
    found = flag()
    tensors = [tensor.as_subclass(kind) for tensor in some(dtype)]
    total = torch_ops.sum_of_squares(tensors, found, weights)
    assert (total.dtype, total.shape, found.item()) == (torch.float64, (), 0.0)
    assert total.item() == pytest.approx(sum_of_squares(some(dtype), weights), rel=1e-6 if kind is Tensor else 1e-12)


@pytest.mark.parametrize("size", [1, 2047, 2048, 2049, 5 * 2048 + 1])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-23, 1e-22, 1e-21, 1.0, 1e25])
def test_neither_small_nor_large_squares_are_lost(size: int, factor: float) -> None:
    found, weights = flag(), [0.5, 1.0, 0.25]
    tensors = [randn(size) * factor, torch.zeros(0), randn(2 * size).reshape(size, 2).t() * factor]
    for given in (None, weights):
        total = torch_ops.sum_of_squares(tensors, found, given)
        assert total.item() == pytest.approx(sum_of_squares(tensors, given), rel=1e-6, abs=0.0)
    assert found.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [[16 * 2048 + n for n in (-1, 0, 1)], [258 * 2048 + 3, 9], [2000] * 270, [0, 0], [0, 7]]
)
def test_long_tensors_and_many_short_ones_are_summed_exactly_enough(dtype: torch.dtype, sizes: list[int]) -> None:
    """What is converted at once is 256 rows of 2048, and what is copied together about as much."""
    tensors, found = [randn(size, dtype, seed) for seed, size in enumerate(sizes)], flag()
    weights = [(0.5, 1.0, 0.25)[number % 3] for number in range(len(sizes))]
    for given in (None, weights):
        total = torch_ops.sum_of_squares(tensors, found, given)
        assert total.item() == pytest.approx(sum_of_squares(tensors, given), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_norm(default: torch.dtype) -> None:
    tensors, found = [randn(5000, torch.float16)], flag()
    want = torch_ops.sum_of_squares(tensors, found, None)
    torch.set_default_dtype(default)
    try:
        assert_same(torch_ops.sum_of_squares(tensors, found, None), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("special", SPECIALS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_flags_what_is_not_finite_and_only_that(dtype: torch.dtype, special: float) -> None:
    found = flag()
    assert not torch_ops.sum_of_squares(some(dtype, special), found, None).isfinite()
    assert found.item() == 1.0
    torch_ops.sum_of_squares(some(dtype), found, None)
    assert found.item() == 1.0  # a flag that is set stays so
    huge, found = torch.full((5,), 0.9 * torch.finfo(dtype).max, dtype=dtype), flag()
    assert torch_ops.sum_of_squares([huge], found, None).isfinite() == (dtype is not torch.float64)
    assert found.item() == 0.0


# Clipping


@pytest.mark.parametrize("coef", [torch.tensor(0.3), torch.tensor([1.0]), torch.tensor(1 / 3).double()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3.0, 2.0**16, 2.0**127])
def test_clipping_is_two_products_each_rounded(scale: float, dtype: torch.dtype, coef: Tensor) -> None:
    tensors, wanted = some(dtype, math.inf), some(dtype, math.inf)
    inv_scale = inverse(torch.tensor(scale))
    torch_ops.clip_(tensors, inv_scale, coef)
    torch._amp_foreach_non_finite_check_and_unscale_(wanted, flag(), inv_scale)
    torch._foreach_mul_(wanted, coef.reshape(()).to(dtype if dtype.itemsize > 2 else torch.float32))
    assert_all_same(tensors, wanted)


@pytest.mark.parametrize(
    "signalling",
    [
        torch.tensor([0x7C01], dtype=torch.int16).view(torch.float16),
        torch.tensor([0x7F81], dtype=torch.int16).view(torch.bfloat16),
        torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32),
        torch.tensor([0x7FF0000000000001], dtype=torch.int64).view(torch.float64),
    ],
    ids=lambda nan: str(nan.dtype),
)
def test_factors_of_1_write_nothing(signalling: Tensor) -> None:
    """A product would be another NaN, a quiet one."""
    before, one = signalling.view(torch.uint8).tolist(), torch.tensor(1.0)
    torch_ops.clip_([signalling], one, one)
    assert signalling.view(torch.uint8).tolist() == before
    torch_ops.clip_([signalling], one, torch.tensor(0.5))
    assert signalling.view(torch.uint8).tolist() != before


@pytest.mark.parametrize(
    ("squares", "overflows", "max_norm", "norm", "coef"),
    [
        (16.0, 0.0, 1.0, 4.0, 1.0 / (4.0 + 1e-6)),
        (16.0, 0.0, 5.0, 4.0, 1.0),
        (16.0, 1.0, 1.0, 4.0, 1.0),
        (16.0, 2.0, 1.0, 4.0, 1.0),
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (math.inf, 0.0, 1.0, math.inf, 0.0),
        (math.nan, 0.0, 1.0, math.nan, math.nan),
        (1e80, 0.0, 1.0, math.inf, 0.0),
    ],
)
def test_norm_and_coefficient(squares: float, overflows: float, max_norm: float, norm: float, coef: float) -> None:
    totals = torch.tensor([squares, overflows, 0.0, 1.0, 1.0], dtype=torch.float64)
    total = torch_ops.norm_of(totals)
    got = total, torch_ops.coefficient(totals[OVERFLOWS], total, max_norm)
    assert [each.dtype for each in got] == [torch.float32] * 2
    assert [each.item() for each in got] == pytest.approx([norm, coef], rel=1e-6, nan_ok=True)


def test_on_the_cpu_norm_and_coefficient_have_the_bits_of_torchs_ops() -> None:
    draw, some_norms = random.Random(0), [0.0, 1e-45, 1e-38, 3.4028235e38, math.inf, math.nan]
    bounds = [0.0, 1e-45, 0.3, 1.0, 5.0, 1e30, 3.4028235e38, 1e39, math.inf]
    for _ in range(2000):
        norm = torch.tensor(draw.choice([*some_norms, *[10 ** draw.uniform(-8, 8)] * 20]))
        bound = draw.choice([*bounds, *[10 ** draw.uniform(-8, 8)] * 20])
        assert_same(torch_ops.coefficient(flag(), norm, bound), (bound / (norm + 1e-6)).clamp(max=1.0))
        totals = torch.zeros(TOTALS, dtype=torch.float64)
        totals[SQUARES] = square = 10 ** draw.uniform(-100, 100)
        assert_same(torch_ops.norm_of(totals), torch.tensor(math.sqrt(square)))

"""The passes in plain torch: to the bit with torch's own op, norms as good as fp64, and reads that write nothing."""

import math
from typing import Any

import pytest
import torch
from helpers import DTYPES, assert_all_same, assert_same, randn, sum_of_squares
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton.core import torch_ops
from scaler_triton.core.torch_ops import is_plain
from scaler_triton.kernels.abi import OVERFLOWS

SPECIALS = [None, math.nan, math.inf, -math.inf]


class Away(Tensor):
    """A tensor that says it is not on the CPU, as one on a GPU does: torch's op there lacks bf16, and true fp64."""

    is_cpu = False  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _away_is_plain(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_ops, "is_plain", lambda tensor: type(tensor) in (Tensor, Away))


def flag(value: float = 0.0) -> Tensor:
    return torch.tensor(value)


def some(dtype: torch.dtype, special: float | None = None) -> list[Tensor]:
    made = [randn(7, dtype), randn(0, dtype), randn(600_000, dtype, 1), randn(12, dtype, 2).view(3, 4).t()]
    made += [randn(9, dtype, 3)[::2], torch.tensor(3.0, dtype=dtype)]
    if special is not None:
        made[2][-1] = special
    return made


def every_bf16() -> list[Tensor]:
    """All finite values, and a scalar."""
    ours = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    return [ours[ours.isfinite()].clone(), torch.tensor(8.0, dtype=torch.bfloat16)]


def test_only_torchs_own_classes_are_plain() -> None:
    tensor, own = torch.ones(1), type("Own", (Tensor,), {})
    kinds = [tensor, torch.nn.Parameter(tensor), torch.nn.Buffer(tensor), tensor.as_subclass(own)]
    assert [is_plain(each) for each in kinds] == [True, True, True, False]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("scale", [3.0, 65536.0, 2.0**-24])
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("kind", [*DTYPES, "bf16 on a GPU", "fp64 on a GPU"], ids=str)
def test_unscaling_is_torchs(kind: Any, special: float | None, scale: float, shape: tuple[int, ...]) -> None:
    makes = {"bf16 on a GPU": every_bf16, "fp64 on a GPU": lambda: some(torch.float64)}
    ours, theirs = (makes.get(kind, lambda: some(kind))() for _ in range(2))
    for each in (ours, theirs):
        if special is not None:
            each[0].view(-1)[5] = special
    inv_scale, found, expected = torch_ops.inverse(torch.tensor(scale)).reshape(shape), flag(), flag()
    away = [tensor.as_subclass(Away) for tensor in ours] if isinstance(kind, str) else ours
    torch_ops.unscale_(away, inv_scale, found)
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, expected, inv_scale)
    assert_same(found, expected)
    assert_all_same(ours, theirs)


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_check_reads_only(dtype: torch.dtype, special: float | None) -> None:
    for before in (0.0, 1.0):
        tensors, found = some(dtype, special), flag(before)
        torch_ops.check(tensors, found)
        assert found.item() == max(before, float(special is not None))
        assert_all_same(tensors, some(dtype, special))


@pytest.mark.parametrize("size", [1, 100, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite_wherever_they_are(dtype: torch.dtype, size: int) -> None:
    for kind in (Tensor, Away):
        tensor, found = torch.full((size,), torch.finfo(dtype).max, dtype=dtype), flag()
        torch_ops.check([tensor.as_subclass(kind), (-tensor[: size // 2]).as_subclass(kind)], found)
        assert found.item() == 0.0
        for position in {0, size // 2, size - 1}:
            bad, found = tensor.clone(), flag()
            bad[position] = -math.inf
            torch_ops.check([tensor.as_subclass(kind), bad.as_subclass(kind)], found)
            assert found.item() == 1.0


# Norms


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
    inv_scale = torch_ops.inverse(torch.tensor(scale))
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


# The inverse


SCALES = [65536.0, 3.0, 1 / 3, 2.0**-126, torch.finfo(torch.float32).max, -2.0, 1e-40, 0.0, math.inf, math.nan]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_inverse_is_rounded_once_and_kept_for_the_same_scale(scale: float, shape: tuple[int, ...]) -> None:
    given = torch.full(shape, scale)
    want = given.double().reciprocal().float().reshape(())
    assert_same(torch_ops.inverse(given).reshape(()), want)
    got = torch_ops.inverse(given)
    assert (torch_ops.inverse(given.clone()) is got) is not math.isnan(scale)


def test_memory_is_the_tensors_own() -> None:
    tensor = torch.tensor([1.0, 2.0])
    memory = torch_ops.host_memory(tensor)
    memory[1] = 5.0
    assert (tensor.tolist(), list(memory), tensor._version) == ([1.0, 5.0], [1.0, 5.0], 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measuring_is_numpys(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = every.view(dtype) if dtype.itemsize == 2 else every.view(torch.float16).to(dtype) * 1e-3
    tensors = [values.clone(), values[values.isfinite()].clone(), torch.zeros(0, dtype=dtype), values[:5].clone()]
    measured = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0], dtype=torch.float64)
    torch_ops.measure(tensors, measured)
    size = torch.cat(tensors).double().abs().numpy()
    small = ((size > 0) & (size < 2.0**-14)).sum()
    want = [size[size < math.inf].max(), 1 + (size == 0).sum(), 2 + small, 3 + size.size, 9]
    assert measured.tolist() == want
    torch_ops.combine_(measured, torch.tensor([1e300, 1.0, 1.0, 1.0, 5.0], dtype=torch.float64))
    torch_ops.combine_(measured, torch.zeros(5, dtype=torch.float64))
    assert measured.tolist() == [1e300, *(number + 1 for number in want[1:4]), 9]


def test_constants_are_kept_for_plain_tensors_and_made_for_fake_ones() -> None:
    with FakeTensorMode():
        assert type(torch_ops.constants(torch.ones(1), torch.float32, 7.0)) is not Tensor
    kept = torch_ops.constants(torch.ones(1), torch.float32, 7.0)
    assert type(kept) is Tensor
    assert torch_ops.constants(torch.ones(2), torch.float32, 7.0) is kept

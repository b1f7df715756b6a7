"""The passes in plain torch: to the bit with torch's own op, and reads that write nothing."""

import math
from typing import Any

import pytest
import torch
from helpers import DTYPES, assert_all_same, assert_same
from op_cases import SPECIALS, Away, flag, some
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton.core import torch_ops
from scaler_triton.core.torch_ops import is_plain


@pytest.fixture(autouse=True)
def _away_is_plain(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_ops, "is_plain", lambda tensor: type(tensor) in (Tensor, Away))


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


def test_constants_are_kept_for_plain_tensors_and_made_for_fake_ones() -> None:
    with FakeTensorMode():
        assert type(torch_ops.constants(torch.ones(1), torch.float32, 7.0)) is not Tensor
    kept = torch_ops.constants(torch.ones(1), torch.float32, 7.0)
    assert type(kept) is Tensor
    assert torch_ops.constants(torch.ones(2), torch.float32, 7.0) is kept

"""1 / scale: the bits that torch computes, by an op or in Python, whatever somebody put into the scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import assert_same
from scaler_triton.inverse import Inverse, inverse
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

EDGES = [2.0**-126, 2.0**-126 - 2.0**-149, 2.0**126, 2.0**126 + 2.0**103, torch.finfo(torch.float32).max]
STRANGE = [0.0, -0.0, -2.0, math.inf, -math.inf, math.nan, 2.0**-149]


def as_torch(scale: Tensor) -> Tensor:
    return scale.double().reciprocal().float()


def normal_numbers() -> Tensor:
    patterns = torch.randint(0x00800000, 0x7F7FFFFF, (200_000,), dtype=torch.int32, generator=torch.manual_seed(0))
    return patterns.view(torch.float32)


def test_inverse_is_the_double_inverse_rounded() -> None:
    scales = normal_numbers()
    assert_same(inverse(scales), as_torch(scales))
    for one in scales[:2000]:
        assert_same(inverse(one), as_torch(one))


def test_what_python_divides_has_the_same_bits() -> None:
    kept = Inverse()
    for one in normal_numbers()[:20_000]:
        assert_same(kept.of(one), as_torch(one))


@pytest.mark.parametrize("value", EDGES + STRANGE)
def test_any_scale_may_be_asked_for(value: float) -> None:
    scale = torch.tensor(value)
    with np.errstate(all="raise"):
        assert_same(Inverse().of(scale), as_torch(scale))


def test_a_tiny_inverse_is_flushed_where_torch_flushes_it() -> None:
    scale = torch.tensor(EDGES[-1])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        assert_same(Inverse().of(scale), inverse(scale))
    finally:
        torch.set_flush_denormal(False)


def test_the_tensor_is_the_same_from_step_to_step_and_no_op_makes_it() -> None:
    kept, scale = Inverse(), torch.tensor(4.0)
    first = kept.of(scale)
    assert first.item() == 0.25
    assert kept.of(scale.fill_(8.0)) is first
    assert first.item() == 0.125
    assert first.shape == ()
    assert first.dtype is torch.float32


def test_a_scale_of_one_dimension_is_one_too() -> None:
    assert Inverse().of(torch.tensor([4.0])).item() == 0.25


def test_what_was_made_in_inference_mode_serves_outside() -> None:
    kept, gradient, found = Inverse(), torch.ones(3), torch.zeros(())
    with torch.inference_mode():
        kept.of(torch.tensor(4.0))
    inv_scale = kept.of(torch.tensor(4.0))
    assert not inv_scale.is_inference()
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inv_scale)
    assert gradient.tolist() == [0.25] * 3


def test_a_fake_scale_has_a_fake_inverse() -> None:
    with FakeTensorMode():
        scale = torch.tensor(4.0)
        assert type(Inverse().of(scale)) is type(scale)


def test_two_of_them_do_not_share() -> None:
    first, second = Inverse(), Inverse()
    half, quarter = first.of(torch.tensor(2.0)), second.of(torch.tensor(4.0))
    assert (half.item(), quarter.item()) == (0.5, 0.25)

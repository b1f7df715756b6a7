"""The passes over batches: what is read, written and flagged, by kernels and by torch's ops; their tables."""

import math
from typing import Any

import pytest
import torch
from batches import batch_of, number
from helpers import DTYPES, KERNELS, PLACES, Place, assert_same, flags, on_device, parameters, randn, started
from tensor_pair import Pair

from scaler_triton import GradScaler
from scaler_triton.clipping.norm import clip_batch_, norm_batch
from scaler_triton.core import passes
from scaler_triton.core.plan import Batch, choose_backends, group
from scaler_triton.kernels.abi import MEASURED_ROW
from scaler_triton.measuring.measure import measure_batch


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_between_the_elements_is_not_written(place: Place, dtype: torch.dtype) -> None:
    around = on_device(randn(80, dtype, 9), place.device)
    (batch,) = group({0: around.view(8, 10)[:, ::3], 1: around.view(8, 10)[:, 1::3]})
    choose_backends([batch], place.backend)
    batch = Batch(batch.layout, [batch.tensors[0], None], batch.present[:1])
    passes.unscale_batch_(batch, number(4.0, place), number(0.0, place), inverse=False)
    want = randn(80, dtype, 9)
    want.view(8, 10)[:, ::3] /= 4
    assert_same(around, want)


@KERNELS
def test_passes_with_equal_configurations_share_one_table(place: Place) -> None:
    batch = batch_of([torch.ones(3)], place)
    version = batch.present[0]._version
    measure_batch(batch, torch.zeros(MEASURED_ROW, dtype=torch.float64, device=place.device))
    passes.check_batch(batch, number(0.0, place))
    one = number(1.0, place)
    totals = norm_batch(batch, one, number(0.0, place), None, place.backend)
    assert batch.present[0]._version == version
    clip_batch_(batch, number(2.0, place), totals, 2.0, None, 0)
    assert batch.present[0]._version > version  # as torch's ops count their writes
    assert set(batch.layout.tables) == {"measure", "check", "norm", "clip"}
    assert len({id(table) for table in batch.layout.tables.values()}) == 1
    assert batch.present[0].tolist() == [0.5] * 3


# Tensor subclasses


class Unscalable(Pair):
    """A pair that has nothing but torch's unscaling, as a subclass may that was made for training."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func not in (aten._amp_foreach_non_finite_check_and_unscale_.default, aten.detach.default):
            raise NotImplementedError(f"{func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def paired(kind: type, place: Place, right: float) -> tuple[Any, Any, Any]:
    """Return an optimizer of a plain parameter and a pair, the plain one, and the pair's gradient: 8 and `right`."""
    (plain,) = parameters([torch.full((2,), 8.0)], place.device)
    zero = torch.zeros(3, device=place.device)
    parameter = torch.nn.Parameter(Pair(zero, zero.clone()))
    parameter.grad = kind(torch.full_like(zero, 8.0), torch.full_like(zero, right))
    return torch.optim.SGD([plain, parameter], lr=1.0, foreach=False), plain, parameter.grad


@PLACES
@pytest.mark.parametrize("kind", [Pair, Unscalable])
@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
@pytest.mark.parametrize(("right", "bad"), [(16.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_a_subclass_is_asked_what_torch_asks(place: Place, kind: type, method: str, right: float, bad: float) -> None:
    optimizer, plain, gradient = paired(kind, place, right)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    getattr(scaler, method)(optimizer)
    assert flags(scaler, optimizer) == [bad]
    factor = 4.0 if method == "unscale_" else 1.0
    assert (gradient.left.tolist(), plain.grad.tolist()) == ([8.0 / factor] * 3, [8.0 / factor] * 2)
    if not math.isnan(right):
        assert gradient.right.tolist() == [right / factor] * 3
    assert "that torch's own op serves" in str(scaler.overflow_report()) or not bad


@PLACES
def test_a_subclass_can_be_swapped_before_its_step(place: Place) -> None:
    """As torch's modules always swap them; it refuses where a gradient has a weak reference."""
    optimizer, plain, _ = paired(Pair, place, 8.0)
    scaler = started(GradScaler, place.device, init_scale=4.0, backend=place.backend)
    scaler.unscale_(optimizer)
    parameter = optimizer.param_groups[0]["params"][1]
    torch.nn.ParameterList([parameter, plain]).to(torch.float64)
    assert parameter.grad.left.tolist() == parameter.grad.right.tolist() == [2.0] * 3
    assert parameter.grad.dtype is torch.float64

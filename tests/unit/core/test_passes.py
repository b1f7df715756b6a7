"""The passes over batches: what is read, written, flagged and marked, by kernels and by torch's ops."""

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import (
    DTYPES,
    KERNELS,
    PLACES,
    Place,
    assert_same,
    flags,
    on_device,
    parameters,
    randn,
    started,
    sum_of_squares,
    wide,
)
from tensor_pair import Pair
from torch import Tensor

from scaler_triton import GradScaler
from scaler_triton.core import passes, torch_ops
from scaler_triton.core.flag import Flag
from scaler_triton.core.plan import Batch, GradPlan, choose_backends, group
from scaler_triton.core.update import Counters
from scaler_triton.kernels.abi import MEASURED, OVERFLOWS, SQUARES, STATUS, TOTALS
from scaler_triton.report.overflow import Marks

# A kernel sums rows of 512 squares in fp32: their random roundings stay far below this.
TOLERANCE = 1e-6


def number(value: float, place: Place) -> Tensor:
    return torch.tensor(value, device=place.device)


def batches_of(tensors: Sequence[Tensor], place: Place) -> list[Batch]:
    batches = group({index: on_device(tensor, place.device) for index, tensor in enumerate(tensors)})
    choose_backends(batches, place.backend, clips=True)
    return batches


def batch_of(tensors: Sequence[Tensor | None], place: Place) -> Batch:
    """Return one batch, with an empty slot for each None."""
    like = next(tensor for tensor in tensors if tensor is not None)
    (batch,) = batches_of([like[:1] if tensor is None else tensor for tensor in tensors], place)
    kept = [None if tensor is None else there for tensor, there in zip(tensors, batch.tensors, strict=True)]
    return Batch(batch.layout, kept, [tensor for tensor in kept if tensor is not None])


def with_gaps(dtype: torch.dtype) -> Tensor:
    return randn(80, dtype, 9).view(8, 10)[:, ::3]


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


# Measuring


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_is_measured_as_it_is(place: Place, dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -math.inf, math.nan, 3.0], dtype=dtype)
    tensors = [randn(700, dtype) * 2.0**-14, special, torch.ones(0, dtype=dtype)]
    batch, want = batch_of([*tensors, None], place), torch.tensor([0.5, 1.0, 2.0, 3.0, 7.0], dtype=torch.float64)
    row = want.to(place.device, wide(place), copy=True)
    for _ in range(2):
        passes.measure_batch(batch, row)
        torch_ops.measure(tensors, want)
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
    with mock.patch.object(passes, "measure_batch", side_effect=MemoryError), pytest.raises(MemoryError):
        getattr(scaler, how)(optimizer, *arguments)
    assert parameter.grad.tolist() == [8.0, 0.0]


# Norm and clip


def measured(batch: Batch, place: Place, weights: list[float] | None = None, scale: float = 1.0) -> tuple[float, float]:
    """Return sum of squares and flag, the rest of the totals checked."""
    flag, factor = number(0.0, place), number(scale, place)
    totals = passes.norm_batch(batch, factor, flag, weights)
    assert (totals.dtype, totals.shape, totals.device) == (wide(place), (TOTALS,), batch.layout.key.device)
    assert totals[OVERFLOWS:].tolist() == [flag.item(), 0.0, scale, 1 / scale]
    return totals[SQUARES].item(), flag.item()


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_empty_slots(place: Place, dtype: torch.dtype) -> None:
    first, second, third = randn(700, dtype), randn(30, dtype, 1), randn(5, dtype, 2)
    batch, weights = batch_of([first, None, second, third], place), [0.5, 9.0, 1.0, 0.25]
    for given, of_present in ((weights, [0.5, 1.0, 0.25]), (None, None), (weights, [0.5, 1.0, 0.25])):
        want = sum_of_squares([first, second, third], of_present) / 16
        assert measured(batch, place, given, scale=4.0) == (pytest.approx(want, rel=TOLERANCE), 0.0)


def clip(batch: Batch, place: Place, scale: float, max_norm: float, norm: float = 1.0, flag: float = 0.0) -> None:
    totals = torch.tensor([norm**2, flag, 0.0, scale, 1 / scale], dtype=wide(place), device=place.device)
    returned, wrote = passes.clip_batch_(batch, number(scale, place), totals, max_norm, None, 0)
    assert (returned.dtype, returned.shape, returned.device, wrote) == (torch.float32, (), totals.device, False)
    assert_same(returned.cpu(), torch.tensor(norm))


def coefficient(max_norm: float, norm: float) -> float:
    """Return what torch's clipping multiplies by."""
    return (max_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0).item()


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_with_gaps_are_measured_and_clipped(place: Place, dtype: torch.dtype) -> None:
    batch = batch_of([with_gaps(dtype)], place)
    assert measured(batch, place)[0] == pytest.approx(sum_of_squares([with_gaps(dtype)]), rel=TOLERANCE)
    clip(batch, place, 4.0, 0.3)
    want = [with_gaps(dtype) / 4.0]
    torch._foreach_mul_(want, torch.tensor(coefficient(0.3, 1.0)))  # which keeps the dtype
    assert_same(batch.present[0], want[0])


@PLACES
def test_a_batch_without_elements_has_a_norm(place: Place) -> None:
    batch = batch_of([torch.ones(0)], place)
    assert measured(batch, place) == (0.0, 0.0)
    clip(batch, place, 2.0, 0.5, 3.0)


@KERNELS
def test_a_clip_writes_the_status_from_the_totals_of_several_ranks(place: Place) -> None:
    batch, status = batch_of([torch.ones(3)], place), torch.zeros(STATUS, device=place.device)
    totals = torch.tensor([9.0, 2.0, 1.0, 16.0, 0.25], dtype=torch.float64, device=place.device)
    _, wrote = passes.clip_batch_(batch, number(8.0, place), totals, 1.0, status, 2)
    assert (wrote, status.tolist()) == (True, [1.0, 1.0, 16.0, 0.0])


@KERNELS
def test_passes_with_equal_configurations_share_one_table(place: Place) -> None:
    batch = batch_of([torch.ones(3)], place)
    version = batch.present[0]._version
    passes.measure_batch(batch, torch.zeros(MEASURED, dtype=torch.float64, device=place.device))
    passes.check_batch(batch, number(0.0, place))
    measured(batch, place)
    assert batch.present[0]._version == version
    clip(batch, place, 2.0, 2.0)
    assert batch.present[0]._version > version  # as torch's ops count their writes
    assert set(batch.layout.tables) == {"measure", "check", "norm", "clip"}
    assert len({id(table) for table in batch.layout.tables.values()}) == 1
    assert batch.present[0].tolist() == [0.5] * 3


# A plan's gradients


def check(grads: Sequence[Tensor | None], place: Place, divide: bool = True, scale: Any = 4.0) -> Any:
    """Return plan, parameters and flags of a pass."""
    params = parameters(grads, place.device)
    plan = GradPlan(params, place.backend)
    plan.marks = Marks(plan, Counters())
    home = torch.zeros(STATUS, device=place.device)
    given = number(scale, place) if isinstance(scale, float) else scale.to(place.device)
    return plan, params, passes.check(plan, plan.collect(params), given, Flag(home), divide=divide)[0]


@PLACES
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_one_flag_is_for_all_batches_of_a_device(place: Place, divide: bool, bad: int | None) -> None:
    grads: list[Tensor] = [torch.full((3,), 8.0), torch.full((2,), 8.0).double(), torch.full((8,), 8.0)[::2]]
    if bad is not None:
        grads[bad][0] = math.nan
    plan, params, found = check(grads, place, divide)
    assert [flag.item() for flag in found.values()] == [float(bad is not None)]
    assert plan.written is divide
    assert [p.grad[-1].item() for p in params] == [2.0 if divide else 8.0] * 3


@PLACES
@pytest.mark.parametrize("scale", [torch.tensor([4.0]), torch.tensor(4.0).double(), torch.tensor(0.0)])
def test_a_scale_is_taken_as_it_is_assigned(place: Place, scale: Tensor) -> None:
    _, (parameter,), found = check([torch.tensor([8.0, 1.0])], place, scale=scale)
    assert parameter.grad.tolist() == ([2.0, 0.25] if scale.item() else [math.inf] * 2)
    assert [flag.item() for flag in found.values()] == [0.0]


def test_the_inverse_of_an_fp64_scale_is_rounded_once() -> None:
    scale = torch.tensor(3.0 + 1e-7, dtype=torch.float64)
    _, (parameter,), _ = check([torch.ones(1)], Place("cpu", "torch"), scale=scale)
    assert parameter.grad.item() == (1.0 / scale).float().item() != (1.0 / scale.float()).item()


@PLACES
def test_what_stands_for_a_partial_gradient_is_only_checked(place: Place) -> None:
    plan, _, _ = check([torch.ones(1)], place, divide=False)
    batch = batch_of([torch.tensor([8.0, math.inf])], place)._replace(is_partial=True)
    flag = Flag(torch.zeros(STATUS, device=place.device))
    passes.check(plan, [batch], number(4.0, place), flag, divide=True)
    assert (batch.present[0].tolist(), flag.found_inf.item(), plan.written) == ([8.0, math.inf], 1.0, False)


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
@pytest.mark.parametrize(("right", "bad"), [(16.0, 0.0), (math.inf, 1.0)])
def test_a_subclass_is_measured_and_clipped_by_its_own_ops(place: Place, right: float, bad: float) -> None:
    _, _, gradient = paired(Pair, place, right)
    (batch,) = group({0: gradient})
    choose_backends([batch], place.backend, clips=True)
    assert measured(batch, place, [0.5])[1] == bad
    clip(batch, place, 4.0, 2.0)
    assert (gradient.left.tolist(), gradient.right.tolist()) == ([2.0] * 3, [right / 4] * 3)
    clip(batch, place, 1.0, 0.5)
    assert gradient.left.tolist() == [2.0 * coefficient(0.5, 1.0)] * 3


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

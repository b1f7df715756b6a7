"""Norms and clipping by batches and lists, on every device and backend: right to 1e-6, clipped to torch's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import Place, assert_same, places
from tensor_pair import Pair
from torch import Tensor

from scaler_triton import batch as batching
from scaler_triton import batch_ops, dispatch, ops
from scaler_triton.batch import Batch
from scaler_triton.clipping import clip_ops, reference_clip, reference_norm

PLACES = pytest.mark.parametrize("place", places(), ids=str)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Rows of 512 squares are summed in fp32, on a GPU 4 squares a lane: random roundings stay far below this.
TOLERANCE = 1e-6


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * magnitude).to(dtype)


def exact(tensors: Sequence[Tensor], factor: float = 1.0) -> float:
    """Return the 2-norm by Python: fp64 products, an exact sum."""
    return math.sqrt(math.fsum(x * x for t in tensors for x in t.double().flatten().tolist())) * factor


def flag(device: str = "cpu", value: float = 0.0) -> Tensor:
    return torch.tensor(value, device=device)


def batch_of(tensors: Sequence[Tensor | None], device: str) -> Batch:
    """Return one batch, with an empty slot for each None."""
    present = [torch.zeros(1, dtype=_dtype(tensors)) if tensor is None else tensor for tensor in tensors]
    (batch,) = batching.group([tensor.to(device, copy=True) for tensor in present])
    moved = [None if tensor is None else there for tensor, there in zip(tensors, batch.tensors, strict=True)]
    return Batch(batch.layout, moved)


def _dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    return next(tensor.dtype for tensor in tensors if tensor is not None)


def squares(
    batch: Batch, place: Place, weights: Sequence[float] | None = None, scale: float = 1.0
) -> tuple[float, float]:
    found_inf = flag(place.device)
    factor = torch.tensor(scale, device=place.device)
    backend: Any = place.backend
    totals = clip_ops.sum_of_squares_batch(batch, factor, found_inf, weights, backend, inverse=False)
    assert totals.dtype is torch.float64
    assert totals.shape == (5,)
    assert totals.device == batch.layout.key.device
    assert totals[1:].tolist() == [found_inf.item(), 0.0, factor.item(), 1 / factor.item()]
    return totals[0].item(), found_inf.item()


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_list(place: Place, dtype: torch.dtype) -> None:
    grads = [values(numel, dtype, seed) for seed, numel in enumerate((0, 1, 100, 511, 512, 513, 20_000, 40_001))]
    grads += [values(120, dtype, 9).view(10, 12).t(), values(64, dtype, 10)[::2], torch.tensor(3.0, dtype=dtype)]
    before = [grad.clone() for grad in grads]
    found_inf = flag(place.device)
    there = [grad.to(place.device) for grad in grads]
    got = ops.grad_norm(there, found_inf, inv_scale=torch.tensor(0.25, device=place.device), backend=place.backend)
    assert got.item() == pytest.approx(exact(before, 0.25), rel=TOLERANCE)
    assert got.dtype is torch.float64
    assert got.device.type == place.device
    assert found_inf == 0
    for grad, was in zip(there, before, strict=True):
        assert_same(grad, was)


@PLACES
def test_dtypes_may_differ(place: Place) -> None:
    grads = [values(700, dtype, seed) for seed, dtype in enumerate(DTYPES)]
    got = ops.grad_norm([grad.to(place.device) for grad in grads], backend=place.backend)
    assert got.item() == pytest.approx(exact(grads), rel=TOLERANCE)


@PLACES
@pytest.mark.parametrize("magnitude", [1e38, 1e19, 1e-19, 1e-30, 1e-40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_square_overflows_or_is_lost(place: Place, dtype: torch.dtype, magnitude: float) -> None:
    grads = [values(3000, dtype, magnitude=magnitude).clamp(-3e38, 3e38), torch.zeros(600, dtype=dtype)]
    found_inf = flag(place.device)
    got = ops.grad_norm([grad.to(place.device) for grad in grads], found_inf, backend=place.backend)
    assert got.item() == pytest.approx(exact(grads), rel=TOLERANCE, abs=0)
    assert found_inf == 0


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_whose_roundings_all_go_one_way(place: Place, dtype: torch.dtype) -> None:
    numel = 30_000 if place == Place("cpu", "triton") else 300_000
    grad = torch.full((numel,), 0.7123, dtype=dtype)
    got = ops.grad_norm([grad.to(place.device)], backend=place.backend)
    assert got.item() == pytest.approx(abs(grad[0].item()) * math.sqrt(numel), rel=TOLERANCE)


@PLACES
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow_is_flagged_and_shows_in_the_norm(place: Place, dtype: torch.dtype, special: float) -> None:
    for order in (2.0, 3.0, math.inf):
        grads = [values(600, dtype), values(70, dtype)]
        grads[1][7] = special
        found_inf = flag(place.device)
        there = [grad.to(place.device) for grad in grads]
        got = ops.grad_norm(there, found_inf, norm_type=order, backend=place.backend)
        assert found_inf == 1
        assert not got.isfinite()


@PLACES
def test_a_flag_that_is_raised_stays_raised(place: Place) -> None:
    for magnitude in (1.0, 1e30):
        found_inf = flag(place.device, 1.0)
        ops.grad_norm([values(9, magnitude=magnitude).to(place.device)], found_inf, backend=place.backend)
        assert found_inf == 1


@PLACES
def test_huge_fp64_is_not_taken_for_infinite(place: Place) -> None:
    found_inf = flag(place.device)
    grad = torch.full((5,), 1e200, dtype=torch.float64, device=place.device)
    assert ops.grad_norm([grad], found_inf, backend=place.backend) == math.inf
    assert found_inf == 0


@PLACES
@pytest.mark.parametrize("order", [1, 3.5, math.inf, "inf", -math.inf])
def test_other_norms_are_torchs(place: Place, order: Any) -> None:
    grads = [values(numel, dtype, 3) for numel, dtype in ((0, torch.float32), (9, torch.float16), (700, torch.float32))]
    there = [grad.to(place.device) for grad in grads]
    inv_scale = torch.tensor(-0.5, device=place.device)
    got = ops.grad_norm(there, inv_scale=inv_scale, norm_type=order, backend=place.backend)
    whole = torch.cat([grad.double() for grad in grads]) * -0.5
    assert got.item() == pytest.approx(torch.linalg.vector_norm(whole, float(order)).item(), rel=1e-12)


@PLACES
def test_sparse_values_count_as_they_are(place: Place) -> None:
    sparse = torch.tensor([0.0, 3.0, 0.0, -4.0, 12.0]).to_sparse()
    assert ops.grad_norm([sparse.to(place.device)], backend=place.backend).item() == pytest.approx(13.0)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_nothing_has_no_norm(order: float) -> None:
    for grads in ([], [torch.zeros(0)]):
        assert ops.grad_norm(grads, norm_type=order) == 0


def test_gradients_may_come_one_by_one() -> None:
    assert ops.grad_norm(torch.tensor([each]) for each in (3.0, 4.0)) == 5  # type: ignore[arg-type]


@pytest.mark.gpu
def test_devices_may_differ() -> None:
    grads = [values(700), values(300, torch.float16, 1)]
    found_inf = flag()
    got = ops.grad_norm([grads[0].cuda(), grads[1]], found_inf)
    assert got.device.type == "cuda"
    assert got.item() == pytest.approx(exact(grads), rel=TOLERANCE)
    assert found_inf == 0


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"norm_type": "two"}, TypeError, "norm_type must be a number, got 'two'"),
        ({"norm_type": None}, TypeError, "norm_type must be a number, got None"),
        ({"norm_type": math.nan}, ValueError, "norm_type must be a number other than 0, got nan"),
        ({"norm_type": 0}, ValueError, "norm_type must be a number other than 0, got 0"),
        ({"inv_scale": torch.ones(2)}, ValueError, "inv_scale must be one torch.float32 element"),
        ({"found_inf": 1.0}, TypeError, "found_inf must be a Tensor, got float"),
        ({"found_inf": flag().to("meta")}, ValueError, "found_inf is on device meta, where it cannot be set"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ops.grad_norm([torch.ones(3)], **kwargs)
    with pytest.raises(TypeError, match=r"grads\[0\] must be a Tensor, got int"):
        ops.grad_norm([1])  # type: ignore[list-item]


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_empty_slots(place: Place, dtype: torch.dtype) -> None:
    tensors = [values(700, dtype), None, values(30, dtype, 1), values(5, dtype, 2)]
    batch = batch_of(tensors, place.device)
    weights = [0.5, 9.0, 1.0, 0.25]
    present = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if tensor is not None]
    for _ in range(2):
        total, found_inf = squares(batch, place, weights, scale=4.0)
        assert total == pytest.approx(sum(w * exact([t]) ** 2 for t, w in present) / 16, rel=TOLERANCE)
        total, _ = squares(batch, place, None, scale=4.0)
        assert total == pytest.approx(exact([t for t, _ in present]) ** 2 / 16, rel=TOLERANCE)
        assert found_inf == 0


@PLACES
@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_weights_where_fp32_does_not_reach(place: Place, magnitude: float) -> None:
    tensors = [values(700, magnitude=magnitude), values(30, seed=1, magnitude=magnitude)]
    total, found_inf = squares(batch_of(tensors, place.device), place, [0.5, 0.25])
    assert total == pytest.approx(0.5 * exact(tensors[:1]) ** 2 + 0.25 * exact(tensors[1:]) ** 2, rel=TOLERANCE, abs=0)
    assert found_inf == 0


@PLACES
def test_a_batch_without_elements_is_clipped_to_nothing(place: Place) -> None:
    clip(batch_of([torch.ones(0)], place.device), place, 2.0, 0.5, 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_overflow_is_flagged_where_norms_are_taken_one_by_one(dtype: torch.dtype, special: float) -> None:
    found_inf = torch.zeros(())
    total = reference_norm.sum_one_by_one([torch.tensor([1.0, special], dtype=dtype)], found_inf)
    assert (math.isfinite(total.item()), found_inf.item()) == (False, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_ones_side_by_side(dtype: torch.dtype) -> None:
    numels = [reference_norm._CONVERTED + 77, 0, 5, reference_norm._GATHERED, 700, 513]
    tensors = [values(numel, dtype, seed) for seed, numel in enumerate(numels)]
    total = reference_norm.sum_on_host(tensors, flag(), None)
    want = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert total == pytest.approx(want, rel=TOLERANCE)


def clip(batch: Batch, place: Place, scale: float, max_norm: float, norm: float = 1.0) -> None:
    divisor = torch.tensor(scale, device=place.device)
    totals = torch.tensor([norm**2, 0.0, 0.0, math.nan, math.nan], dtype=torch.float64, device=place.device)
    backend: Any = place.backend
    told = clip_ops.clip_batch_(batch, divisor, totals, max_norm, backend)
    assert (told.dtype, told.shape, told.device) == (torch.float32, (), batch.layout.key.device)
    assert_same(told.cpu(), torch.tensor(norm))


def coefficient(max_norm: float, norm: float = 1.0) -> Tensor:
    """Return what torch's clipping multiplies by."""
    return (max_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)


def torchs(tensors: Sequence[Tensor], scale: float, coef: Tensor) -> list[Tensor]:
    """Return what torch's unscale and torch's clipping make of copies, on the CPU."""
    copies = [tensor.clone() for tensor in tensors]
    inv_scale = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_(copies, flag(), inv_scale)
    torch._foreach_mul_(copies, coef)
    return copies


@PLACES
@pytest.mark.parametrize(("max_norm", "norm"), [(0.3, 1.0), (1 / 3, 7.5), (1.0, 0.5), (1.0, math.nan), (0.0, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_is_torchs_two_steps(place: Place, dtype: torch.dtype, max_norm: float, norm: float) -> None:
    tensors = [values(numel, dtype, seed) for seed, numel in enumerate((0, 1, 700, 5000))]
    tensors[2][5] = math.inf
    tensors += [values(120, dtype, 9).view(10, 12).t(), torch.tensor(3.0, dtype=dtype)]
    for scale in (65536.0, 3.0, 1.0):
        batch = batch_of(tensors, place.device)
        versions = [tensor._version for tensor in batch.present]
        clip(batch, place, scale, max_norm, norm)
        for tensor, want in zip(batch.present, torchs(tensors, scale, coefficient(max_norm, norm)), strict=True):
            assert_same(tensor, want)
        if place.backend == "triton":  # torch's op is torch's to tell
            assert all(tensor._version > was for tensor, was in zip(batch.present, versions, strict=True))


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_tensors_with_gaps_and_empty_slots(place: Place, dtype: torch.dtype) -> None:
    whole = values(40, dtype).to(place.device)
    before = whole.cpu().clone()
    (batch,) = batching.group([whole[::2], whole[1::4]])
    batch = Batch(batch.layout, [batch.tensors[0], None])
    clip(batch, place, 4.0, 0.3)
    expected = before.clone()
    expected[::2] = torchs([before[::2]], 4.0, coefficient(0.3))[0]
    assert_same(whole, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_ones_are_clipped_in_blocks(dtype: torch.dtype, threads: int) -> None:
    large = reference_clip._SPLIT_BYTES // dtype.itemsize + 5
    tensors = [values(numel, dtype, seed) for seed, numel in enumerate((7, large, 30_000, 300_000, 11))]
    tensors.append(values(large, dtype)[: large // 3 * 3].view(-1, 3).t())
    want = torchs(tensors, 3.0, torch.tensor(0.3))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        reference_clip.clip_(tensors, torch.tensor(1 / 3), torch.tensor(0.3))
    finally:
        torch.set_num_threads(before)
    for tensor, expected in zip(tensors, want, strict=True):
        assert_same(tensor, expected)


@PLACES
def test_a_norm_and_a_clip_share_one_table(place: Place) -> None:
    if place.backend != "triton":
        pytest.skip("only kernels have tables")
    batch = batch_of([torch.ones(3)], place.device)
    squares(batch, place)
    clip(batch, place, 2.0, 2.0)
    batch_ops.check_batch(batch, flag(place.device), "triton")
    assert len({id(table) for table in batch.layout.tables.values()}) == 1
    assert batch.present[0].tolist() == [0.5] * 3


@PLACES
@pytest.mark.parametrize(("right", "bad"), [(16.0, 0.0), (math.inf, 1.0)])
def test_tensor_subclasses_say_what_it_means(place: Place, right: float, bad: float) -> None:
    pair = Pair(torch.full((3,), 8.0, device=place.device), torch.full((3,), right, device=place.device))
    (batch,) = batching.group([pair])
    ((_, backend),) = batch_ops.choose_backends([batch], dispatch.check_backend(place.backend))
    assert backend == "torch"
    assert squares(batch, Place(place.device, backend), [0.5])[1] == bad
    clip(batch, Place(place.device, backend), 4.0, 2.0)
    assert pair.left.tolist() == [2.0] * 3
    assert pair.right.tolist() == [right / 4] * 3
    clip(batch, Place(place.device, backend), 1.0, 0.5)
    assert pair.left.tolist() == [2.0 * coefficient(0.5).item()] * 3

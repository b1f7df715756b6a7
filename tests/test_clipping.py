"""`clip_grad_norm_` on one process: torch's unscale_ and clipping, with one pass less, and a truer norm."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from clipping_setup import PLACES, SCALE, grads, scaler_on, some_gradients, true_norm
from helpers import Place, assert_same, flags, parameters, sgd, started
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clips", "leaves"])
def test_norm_and_gradients_are_torchs(place: Place, dtype: torch.dtype, max_norm: float) -> None:
    start = some_gradients(dtype)
    optimizer = sgd(start, place.device)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, max_norm)
    assert (norm.dtype, norm.shape, norm.device.type) == (torch.float32, (), place.device)
    assert norm.item() == pytest.approx(true_norm(start), rel=1e-6)
    twice = [gradient.clone() for gradient in start]
    torch._amp_foreach_non_finite_check_and_unscale_(twice, torch.zeros(()), torch.tensor(1 / SCALE))
    coefficient = (max_norm / (norm.cpu() + 1e-6)).clamp(max=1.0)
    for mine, theirs in zip(grads(optimizer), twice, strict=True):
        wide = theirs.dtype if dtype is torch.float64 else torch.float32
        assert_same(mine, (theirs.to(wide) * coefficient.to(wide)).to(dtype))
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


@PLACES
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_not_clipped_and_skips(place: Place, value: float, fused: bool) -> None:
    start = [torch.full((3,), 16.0), torch.tensor([value, 8.0])]
    optimizer = sgd(start, place.device, fused=fused)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, 0.1)
    assert math.isnan(norm.item()) if math.isnan(value) else norm.item() == math.inf
    assert flags(scaler, optimizer) == [1.0]
    assert grads(optimizer)[0].tolist() == [2.0] * 3
    scaler.step(optimizer)
    scaler.update()
    assert all(not p.detach().any() for p in optimizer.param_groups[0]["params"])
    assert scaler.get_scale() == SCALE / 2


@PLACES
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_error_if_nonfinite_is_torchs_and_the_step_is_skipped(place: Place, value: float) -> None:
    optimizer = sgd([torch.full((3,), 16.0), torch.tensor([value])], place.device)
    scaler = scaler_on(place)
    with pytest.raises(RuntimeError) as ours:
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError) as torchs:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0, error_if_nonfinite=True)
    assert str(ours.value) == str(torchs.value)
    assert grads(optimizer)[0].tolist() == [2.0] * 3
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@PLACES
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_a_norm_beyond_fp32_is_refused_and_nothing_is_clipped(place: Place, norm_type: float) -> None:
    optimizer = sgd([torch.full((100,), 1e38)], place.device)
    scaler = scaler_on(place, init_scale=1.0)
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(grads(optimizer)[0].cpu(), torch.full((100,), 1e38))
    assert flags(scaler, optimizer) == [0.0]


@PLACES
def test_several_optimizers_share_one_norm(place: Place) -> None:
    first, second = sgd([torch.full((3,), 24.0)], place.device), sgd([torch.full((1,), 32.0)], place.device, fused=True)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_([first, second], 1.0)
    assert norm.item() == pytest.approx(math.sqrt(3 * 9 + 16))
    for optimizer, value in ((first, 3.0), (second, 4.0)):
        assert grads(optimizer)[0][0].item() == pytest.approx(value / norm.item(), rel=1e-5)
        scaler.step(optimizer)
    scaler.update()


@PLACES
@pytest.mark.parametrize("how", ["at once", "deferred", "after unscaling", "some parameters"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_clipped_together_is_skipped_together(place: Place, how: str, value: float) -> None:
    """The norm says nothing then, so the others could only step unclipped."""
    fused = how == "deferred"
    good = sgd([torch.full((3,), 24.0)], place.device, fused=fused)
    bad = sgd([torch.tensor([value])], place.device, fused=fused)
    parameters = [optimizer.param_groups[0]["params"][0] for optimizer in (good, bad)]
    options: dict[str, dict[str, Any]] = {
        "deferred": {"defer": True},
        "after unscaling": {"norm_type": 1.0},
        "some parameters": {"parameters": parameters},
    }
    scaler = scaler_on(place)
    for optimizers in ([good, bad], [bad, good]):
        scaler.clip_grad_norm_(optimizers, 1.0, **options.get(how, {}))
        assert flags(scaler, good) == flags(scaler, bad) == [1.0]
        for optimizer in optimizers:
            assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]
            scaler.step(optimizer)
            assert scaler.was_skipped(optimizer)
        assert [parameter.abs().max().item() for parameter in parameters] == [0.0, 0.0]
        scaler.update(SCALE)
        for parameter, gradient in zip(parameters, (24.0, value), strict=True):
            parameter.grad = torch.full_like(parameter, gradient)
    parameters[1].grad.fill_(8.0)
    scaler.clip_grad_norm_([good, bad], 1.0)
    assert flags(scaler, good) == flags(scaler, bad) == [0.0]


@PLACES
def test_module_by_module(place: Place) -> None:
    """As DINO does: everything is unscaled and checked once, each module clipped by its own norm."""
    optimizer = sgd([torch.full((4,), 16.0), torch.full((4,), 160.0), torch.tensor([8.0])], place.device)
    head, body, rest = optimizer.param_groups[0]["params"]
    scaler = scaler_on(place)
    assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=[head]).item() == pytest.approx(4.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=body).item() == pytest.approx(40.0)
    assert head.grad.tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    assert body.grad.tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    assert rest.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()


@PLACES
def test_a_bad_gradient_outside_the_chosen_ones_skips_the_step(place: Place) -> None:
    optimizer = sgd([torch.full((4,), 16.0), torch.tensor([math.inf])], place.device)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, parameters=optimizer.param_groups[0]["params"][:1])
    assert norm.item() == pytest.approx(4.0)
    assert grads(optimizer)[0].tolist() == [2.0] * 4  # nothing is clipped
    scaler.step(optimizer)
    assert not optimizer.param_groups[0]["params"][0].detach().any()


@PLACES
@pytest.mark.parametrize("norm_type", [math.inf, 1.0, 3.0])
def test_other_norms_are_torchs(place: Place, norm_type: float) -> None:
    start = [gradient for gradient in some_gradients() if gradient.numel()]  # torch has no inf-norm of nothing
    optimizer = sgd(start, place.device)
    scaler = scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, 0.5, norm_type)
    expected = parameters([gradient / SCALE for gradient in start], place.device)
    torchs = torch.nn.utils.clip_grad_norm_(expected, 0.5, norm_type)
    assert norm.item() == pytest.approx(torchs.item(), rel=1e-5)
    for mine, theirs in zip(grads(optimizer), expected, strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-5, atol=0.0)


@PLACES
def test_without_gradients_the_norm_is_0(place: Place) -> None:
    optimizer = sgd([None, None], place.device)
    scaler = scaler_on(place)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@PLACES
def test_sparse_duplicates_are_summed_before_the_norm(place: Place) -> None:
    indices, values = torch.tensor([[1, 1, 0]]), torch.tensor([8.0, 16.0, 32.0])
    gradient = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    optimizer = sgd([gradient], place.device)
    scaler = scaler_on(place)
    assert scaler.clip_grad_norm_(optimizer, 1e3).item() == pytest.approx(5.0)
    assert grads(optimizer)[0].to_dense().tolist() == [4.0, 3.0, 0.0]


@PLACES
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_sparse_fp16_duplicates_are_summed_in_fp32(place: Place, norm_type: float) -> None:
    """Difference 16, where the clipping sums them: in fp16 the first two would overflow."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        gradient = torch.sparse_coo_tensor(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([6e4, 6e4, -6e4]), (3,))
    optimizer = sgd([gradient.half()], place.device)
    scaler = scaler_on(place)
    scaler._allow_fp16 = True  # as ShardedGradScaler's, without a process group
    assert scaler.clip_grad_norm_(optimizer, 1e6, norm_type).item() == 6e4 / SCALE
    assert flags(scaler, optimizer) == [0.0]


@PLACES
def test_the_order_of_calls_is_unscale_s(place: Place) -> None:
    optimizer = sgd([torch.full((3,), 24.0)], place.device)
    scaler = scaler_on(place)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) has already been called .* clip_grad_norm_ unscales, too"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert scaler.clip_grad_norm_(optimizer, 1e3, parameters=optimizer.param_groups[0]["params"]).item() > 5
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\)\.$"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_a_bad_gradient_is_refused_before_any_is_written() -> None:
    good, bad = sgd([torch.full((3,), 24.0)]), unscalable()
    scaler = scaler_on(Place("cpu", "torch"))
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        scaler.clip_grad_norm_([good, bad], 1.0)
    assert grads(good)[0].tolist() == [24.0] * 3
    assert scaler._per_optimizer_states[id(good)]["stage"] is OptState.READY


def unscalable() -> torch.optim.SGD:
    """Return SGD with a gradient that is refused when it is looked at."""
    optimizer = sgd([torch.ones(2)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1).expand(2)
    return optimizer


def test_what_was_found_before_outlives_a_clip_that_fails() -> None:
    checked = sgd([torch.tensor([math.inf])])
    scaler = scaler_on(Place("cpu", "torch"))
    scaler._check_inf_per_device(checked)
    grads(checked)[0].fill_(1.0)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        scaler.clip_grad_norm_([checked, unscalable()], 1.0)
    assert flags(scaler, checked) == [1.0]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def test_a_disabled_scaler_clips_as_torch() -> None:
    optimizer = sgd([torch.full((4,), 2.0)])
    norm = GradScaler("cpu", enabled=False).clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == 4.0
    assert grads(optimizer)[0].tolist() == pytest.approx([0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_disabled_scalers_norm_is_torchs(dtype: torch.dtype) -> None:
    ours, theirs = (sgd([torch.ones(3, dtype=dtype)]) for _ in range(2))
    norm = GradScaler("cpu", enabled=False).clip_grad_norm_(ours, 1.0)
    assert_same(norm, torch.nn.utils.clip_grad_norm_(theirs.param_groups[0]["params"], 1.0))
    assert_same(grads(ours)[0], grads(theirs)[0])


def test_a_disabled_scaler_clips_only_what_was_chosen() -> None:
    optimizer = sgd([torch.full((4,), 2.0), torch.full((4,), 2.0)])
    chosen = optimizer.param_groups[0]["params"][1]
    norm = GradScaler("cpu", enabled=False).clip_grad_norm_(optimizer, 1.0, parameters=chosen)
    assert norm.item() == 4.0
    assert [each[0].item() for each in grads(optimizer)] == pytest.approx([2.0, 0.5], rel=1e-5)


def test_flags_that_were_written_stay_each_optimizers_own() -> None:
    optimizers = [sgd([torch.ones(3)]), sgd([torch.ones(5)])]
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        scaler._found_inf_per_device(optimizer)[torch.device("cpu")].fill_(1.0)
    scaler.clip_grad_norm_(optimizers, 1.0, parameters=[])
    assert scaler._check_inf_per_device(optimizers[1])[torch.device("cpu")].item() == 1.0
    scaler._found_inf_per_device(optimizers[0])[torch.device("cpu")].fill_(0.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.was_skipped(optimizer) for optimizer in optimizers] == [False, True]


def test_a_flag_that_was_cleared_is_set_again_by_another_optimizers_overflow() -> None:
    optimizers = [sgd([torch.ones(3)]), sgd([torch.full((5,), math.inf)])]
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizers[0])
    scaler._found_inf_per_device(optimizers[0])[torch.device("cpu")].fill_(0.0)
    scaler.clip_grad_norm_(optimizers, 1.0, parameters=[])
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.was_skipped(optimizer) for optimizer in optimizers] == [True, True]


@pytest.mark.parametrize("name", ["norm_of_terms", "multiply_"])
def test_after_other_norms_failed_the_step_is_skipped(name: str) -> None:
    optimizer, scaler = sgd(some_gradients()), started(GradScaler, "cpu", init_scale=SCALE)
    with (
        mock.patch(f"scaler_triton.clipping.after_unscaling.{name}", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type=1.0)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def test_after_a_second_pass_that_failed_the_step_is_skipped() -> None:
    optimizers = [sgd([torch.ones(3)]), sgd([torch.ones(5)])]
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    with (
        mock.patch("scaler_triton.clipping.clip_ops.clip_batch_", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="^no memory$"),
    ):
        scaler.clip_grad_norm_(optimizers, 1.0)
    for optimizer in optimizers:
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        scaler.step(optimizer)
        assert scaler.was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [7, 57, 1000])
def test_a_norm_does_not_depend_on_where_gradients_lie(dtype: torch.dtype, numel: int) -> None:
    """Ranks that hold copies, as under DDP, would drift apart."""
    values = torch.randn(12, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    norms = set()
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        memory = torch.zeros(3, 4 * numel, dtype=dtype)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for _ in values], lr=1.0)
        for index, (parameter, value) in enumerate(zip(optimizer.param_groups[0]["params"], values, strict=True)):
            parameter.grad = memory[order[index // 4]].view(4, numel)[index % 4].copy_(value)
        norms.add(started(GradScaler, "cpu", init_scale=1.0).clip_grad_norm_(optimizer, 1.0).item())
    assert len(norms) == 1


def test_after_a_failure_none_of_several_remembers_its_last_step() -> None:
    optimizers = [sgd([torch.ones(3)]), sgd([torch.ones(5)])]
    scaler = started(GradScaler, "cpu", init_scale=SCALE)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    optimizers[0].param_groups[0]["params"][0].grad = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="more than one element"):
        scaler.clip_grad_norm_(optimizers, 1.0)
    for optimizer in optimizers:
        with pytest.raises(ValueError, match="optimizer must have been stepped"):
            scaler.was_skipped(optimizer)

"""Clipping by an Accelerator in one process: under which norm, whose gradients, and what is refused around it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate_cases import backward, linear, new_accelerator

from scaler_triton.integrations.accelerate import use_scaler_triton

pytestmark = pytest.mark.usefixtures("first_accelerator")


@pytest.mark.parametrize(("norm_type", "norm"), [(2, 5.0), (1.0, 7.0), (float("inf"), 4.0)])
def test_clips_by_any_norm(norm_type, norm):
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, _ = linear(accelerator)
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.parameters(), norm / 2, norm_type)) == norm
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[1.5, 2.0]]), rtol=1e-6, atol=0)  # norm + 1e-6


def test_a_single_tensor_may_be_clipped():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, _ = linear(accelerator)
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.weight, max_norm=9.0, norm_type=2.0)) == 5.0


def two_layers(accelerator: Accelerator) -> list[Any]:
    """Two prepared layers, then their optimizers."""
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    return list(accelerator.prepare(*layers, *(torch.optim.SGD(one.parameters(), lr=0.5) for one in layers)))


def test_several_optimizers_are_clipped_under_one_norm():
    accelerator = new_accelerator()
    scaler = use_scaler_triton(accelerator)
    one, other, *_ = two_layers(accelerator)
    backward(accelerator, one, other)
    with mock.patch.object(scaler, "unscale_", side_effect=AssertionError):  # all in one pass
        norm = accelerator.clip_grad_norm_([*one.parameters(), *other.parameters()], 1e9)
    assert float(norm) == pytest.approx(50**0.5, rel=1e-6)
    assert one.weight.grad.tolist() == other.weight.grad.tolist() == [[3.0, 4.0]]


def test_an_optimizer_that_was_prepared_twice_is_clipped_once():
    """As a notebook's cell may that is run again: each time the bare optimizer is wrapped anew."""
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer = nn.Linear(2, 1, bias=False)
    bare = torch.optim.SGD(layer.parameters(), lr=0.5)
    optimizers = [accelerator.prepare(bare) for _ in range(2)]
    assert optimizers[0] is not optimizers[1]
    layer = accelerator.prepare(layer)
    before = layer.weight.detach().clone()
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.parameters(), 9.0)) == 5.0
    optimizers[1].step()
    assert torch.equal(layer.weight, before - 0.5 * torch.tensor([[3.0, 4.0]]))


def test_a_subclass_keeps_its_own_clipping():
    norms = []

    class Watched(Accelerator):
        def clip_grad_norm_(self, *args, **kwargs):
            norms.append(super().clip_grad_norm_(*args, **kwargs))
            return norms[-1]

    accelerator = Watched(cpu=True, mixed_precision="fp16")
    use_scaler_triton(accelerator, init_scale=8.0)
    layer, optimizer = linear(accelerator)
    before = layer.weight.detach().clone()
    backward(accelerator, layer)
    accelerator.clip_grad_norm_(layer.parameters(), 9.0)
    assert [float(norm) for norm in norms] == [5.0]
    optimizer.step()
    assert torch.equal(layer.weight, before - 0.5 * torch.tensor([[3.0, 4.0]]))


def test_each_optimizer_is_clipped_for_itself():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    one, other, *optimizers = two_layers(accelerator)
    backward(accelerator, one, other)
    assert float(accelerator.clip_grad_norm_(one.parameters(), 1e9)) == 5.0
    assert other.weight.grad.tolist() == [[24.0, 32.0]]  # scaled still
    assert float(accelerator.clip_grad_norm_(other.parameters(), 1e9)) == 5.0
    before = [layer.weight.detach().clone() for layer in (one, other)]
    for optimizer in optimizers:
        optimizer.step()
    for layer, weight in zip((one, other), before, strict=True):
        assert torch.equal(layer.weight, weight - 0.5 * torch.tensor([[3.0, 4.0]]))  # unscaled once


def test_some_parameters_are_clipped():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer = nn.Linear(2, 1)
    layer, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_([layer.weight], 2.5)) == 5.0
    assert float(accelerator.clip_grad_norm_([layer.bias], 9.0)) == 1.0  # accelerate's raises here
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[1.5, 2.0]]), rtol=1e-6, atol=0)  # norm + 1e-6


def test_frozen_parameters_cost_no_second_pass():
    accelerator = new_accelerator()
    scaler = use_scaler_triton(accelerator)
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    layer, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
    backward(accelerator, layer)
    with mock.patch.object(scaler, "unscale_", side_effect=AssertionError):
        assert float(accelerator.clip_grad_norm_([p for p in layer.parameters() if p.requires_grad], 1.0)) == 5.0


def test_a_backward_between_clipping_a_part_and_the_step_is_refused():
    """Else the part's next clipping would take scaled gradients for unscaled ones, and nobody would check them."""
    accelerator = new_accelerator()
    scaler = use_scaler_triton(accelerator)
    layer = nn.Linear(2, 1)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
    backward(accelerator, layer)
    accelerator.clip_grad_norm_([layer.weight], 1.0)
    with pytest.raises(
        RuntimeError, match="written gradients of SGD between clipping, which unscaled them, and the step"
    ):
        backward(accelerator, layer, value=float("inf"))
    scaler.update()  # the step is left out
    optimizer.zero_grad()
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_([layer.weight], 1.0)) == 5.0


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("when", ["clipped", "stepped"])
def test_an_optimizer_that_is_prepared_again_begins_a_new_step(when, options):
    accelerator = new_accelerator()
    scaler = use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator, "AdamW", **options)
    backward(accelerator, layer, value=float("inf"))
    accelerator.clip_grad_norm_(layer.parameters(), 1.0)
    if when == "stepped":
        scaler.step(optimizer.optimizer)  # and no update
    optimizer.zero_grad()
    layer, optimizer = accelerator.prepare(layer, optimizer)
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.parameters(), 1.0)) == 5.0
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert (scaler.stats().updates, scaler.stats().skipped) == (1, 0)


def test_an_optimizer_that_was_unscaled_as_a_wrapper_begins_a_new_step_when_prepared_again():
    accelerator = new_accelerator()
    scaler = use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator)
    backward(accelerator, layer)
    scaler.unscale_(optimizer)  # and no step
    optimizer.zero_grad()
    layer, optimizer = accelerator.prepare(layer, optimizer)
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.parameters(), 1.0)) == 5.0


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_a_new_optimizer_begins_a_new_step_where_another_was_interrupted(options):
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, interrupted = linear(accelerator, "AdamW", **options)
    backward(accelerator, layer)
    accelerator.clip_grad_norm_(layer.parameters(), 1.0)
    accelerator.free_memory()
    heir = accelerator.prepare(torch.optim.AdamW(layer.parameters(), lr=0.5, **options))
    heir.zero_grad()
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.parameters(), 1.0)) == 5.0
    heir.step()
    assert not heir.step_was_skipped
    assert interrupted.optimizer is not heir.optimizer


def test_a_backward_between_clipping_and_a_step_that_comes_after_anothers_is_refused():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    one, other, first, second = two_layers(accelerator)
    backward(accelerator, one, other)
    accelerator.clip_grad_norm_([*one.parameters(), *other.parameters()], 1e9)
    first.step()
    backward(accelerator, one)  # of gradients that nobody waits with
    with pytest.raises(RuntimeError, match="written gradients of SGD between clipping"):
        backward(accelerator, other)
    second.zero_grad()
    backward(accelerator, other)


def test_a_backward_of_another_model_may_come_between_clipping_and_the_step():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    one, other, *optimizers = two_layers(accelerator)
    for layer in (one, other):
        backward(accelerator, layer)
        assert float(accelerator.clip_grad_norm_(layer.parameters(), 1e9)) == 5.0
    for optimizer in optimizers:
        optimizer.step()
        assert not optimizer.step_was_skipped


def test_what_no_optimizer_holds_is_accelerates_affair():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(accelerator.clip_grad_norm_([parameter], 1.0)) == 5.0


def test_clips_by_value_after_unscaling_once():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator)
    backward(accelerator, layer)
    accelerator.clip_grad_value_(layer.parameters(), 3.5)
    assert layer.weight.grad.tolist() == [[3.0, 3.5]]
    before = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, before - torch.tensor([[1.5, 1.75]]))


def test_unscaling_twice_is_refused_as_by_torch():
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, _ = linear(accelerator)
    backward(accelerator, layer)
    accelerator.unscale_gradients()
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
        accelerator.clip_grad_norm_(layer.parameters(), 1.0)

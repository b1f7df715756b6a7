"""What Accelerate says of skipped steps: right for fused optimizers, too, at any time, and nobody waits unasked."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate_cases import Job, backward, linear, new_accelerator, use_torch
from helpers import waits_raise

from scaler_triton.integrations.accelerate import use_scaler_triton

pytestmark = pytest.mark.usefixtures("first_accelerator")


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_skips_are_told(options):
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator, "AdamW", **options)
    told = [optimizer.step_was_skipped]
    for value in (1.0, float("inf"), 1.0):
        backward(accelerator, layer, value=value)
        optimizer.step()
        told.append(accelerator.optimizer_step_was_skipped)
        optimizer.zero_grad()
    assert told == [False, False, True, False]


def test_accelerate_does_not_see_that_a_fused_optimizer_skips():
    """If this fails, Accelerate has caught up: say so in docs/accelerate.md."""
    accelerator = new_accelerator()
    use_torch(accelerator)
    layer, optimizer = linear(accelerator, "AdamW", fused=True)
    before = layer.weight.detach().clone()
    backward(accelerator, layer, value=float("inf"))
    optimizer.step()
    assert torch.equal(layer.weight, before)
    assert not accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_an_answer_stays_until_the_next_step(options):
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator, "AdamW", **options)
    for value in (float("inf"), 1.0):
        backward(accelerator, layer, value=value)
        accelerator.clip_grad_norm_(layer.parameters(), 1.0)
        assert optimizer.step_was_skipped == (value == 1.0)
        optimizer.step()
        assert optimizer.step_was_skipped == (value != 1.0)
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("by", ["norm", "value", "hand"])
def test_an_answer_that_nobody_asked_for_is_kept(by, options):
    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator, "AdamW", **options)
    told = []
    for value in (float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        backward(accelerator, layer, value=value)
        with mock.patch.object(accelerator.scaler, "was_skipped", side_effect=AssertionError("asked")):
            if by == "hand":
                accelerator.unscale_gradients(optimizer)
            else:
                getattr(accelerator, f"clip_grad_{by}_")(layer.parameters(), 1.0)
        told.append(optimizer.step_was_skipped)
        optimizer.step()
    assert told == [False, True, False]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_an_answer_is_kept_while_gradients_are_accumulated(options):
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    use_scaler_triton(accelerator)
    layer, optimizer = linear(accelerator, "AdamW", **options)
    told = []
    for value in (1.0, float("inf"), 1.0, 1.0):
        with accelerator.accumulate(layer):
            backward(accelerator, layer, value=value)
            optimizer.step()
            told.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    assert told == [False, True, True, False]


def test_nobody_asks_but_the_scheduler():
    job = Job(0, "ddp", "adamw-fused")
    with mock.patch.object(job.scaler, "was_skipped", side_effect=AssertionError("asked")):
        job._backward(0)
        job.accelerator.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        with pytest.raises(AssertionError, match="asked"):
            job.scheduler.step()


@pytest.mark.gpu
def test_nobody_waits_who_does_not_ask_on_a_gpu():
    accelerator = Accelerator(mixed_precision="fp16")
    scaler = use_scaler_triton(accelerator, init_scale=64.0)  # at 65536 the gradients would overflow fp16
    assert scaler._device == "cuda"
    layer, optimizer = linear(accelerator, "AdamW", fused=True)
    batch = torch.tensor([[3.0, 4.0]], device="cuda")

    def step(value: float) -> None:
        accelerator.backward((layer(batch) * value).float().sum())
        accelerator.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # compiles kernels, makes the optimizer's state and the scaler's tables
        step(1.0)
    with waits_raise():
        step(float("inf"))
    assert optimizer.step_was_skipped
    step(1.0)
    assert not accelerator.optimizer_step_was_skipped
    assert scaler.stats().skipped == 1

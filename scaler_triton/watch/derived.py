"""What is derived from gradients before the optimizer steps, and has to be divided by the scale, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scaler_triton.core.memory import fp32_on
from scaler_triton.core.observer import Meeting
from scaler_triton.core.passes import unscale_batch_
from scaler_triton.core.plan import choose_backends, group
from scaler_triton.core.torch_ops import inverse, is_plain


def divide(meeting: Meeting) -> None:
    """Divide derivatives of these gradients, and gradients of single samples, where the check divides gradients."""
    if not meeting.divides:
        return
    for parameter in meeting.parameters:
        if (grad := parameter.grad) is not None and grad.requires_grad:
            _divide_derivatives(grad, inverse(meeting.scale))
            meeting.flag.written = True
    samples = dict(enumerate(_samples_of(meeting.parameters)))
    if not samples:
        return
    batches = group(samples)
    choose_backends(batches, meeting.plan.requested, meeting.plan.task)
    meeting.flag.written = meeting.plan.is_new = True  # the next step has others
    for batch in batches:
        unscale_batch_(batch, meeting.scale, meeting.flag.found_inf_on(batch.layout.device))


def _divide_derivatives(grad: Tensor, factor: Tensor) -> None:
    """Have what is differentiated through a gradient of `backward(create_graph=True)` multiplied, too.

    AdaHessian and Sophia-H do so in their steps. The check writes the gradient where autograd does not see it.
    """
    if grad.grad_fn is not None and is_plain(grad):
        number = fp32_on(grad.device, factor).to(grad.dtype).reshape(())
        grad.register_hook(partial(torch.mul, number))  # type: ignore[no-untyped-call]


def _samples_of(parameters: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the gradients of single samples, from which Opacus's optimizers make those that they step by."""
    for parameter in parameters:
        samples = getattr(parameter, "grad_sample", None)
        for each in samples if isinstance(samples, list) else [samples]:
            if isinstance(each, Tensor) and is_plain(each):
                yield each.detach()


def wait_for_copies(meeting: Meeting) -> None:
    """Wait until gradients on the CPU have arrived that some optimizers copy from the scale's GPU on another stream."""
    home = meeting.scale.device
    if home.type == "cuda" and any(layout.device.type == "cpu" for layout in meeting.plan.layouts):
        meeting.plan.is_new = True  # each step has its own copies
        torch.cuda.synchronize(home)

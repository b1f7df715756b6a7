"""What fused optimizers are lent: the scale times a factor of the user's, and the flag, for one step."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import sgd, started
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton import GradScaler, lending


def test_users_own_grad_scale_is_multiplied_in() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([32.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    assert parameter.item() == -4.0
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_users_own_grad_scale_is_used_up_by_a_first_step_that_is_skipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([math.inf])
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    assert parameter.item() == 0.0
    assert not hasattr(optimizer, "grad_scale")


def test_a_class_attribute_named_grad_scale_is_no_hindrance() -> None:
    class Declares(torch.optim.SGD):
        grad_scale = None

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Declares([parameter], lr=1.0, fused=True)
    for explicit in (False, True):
        parameter.grad = torch.tensor([8.0])
        scaler = started(GradScaler, "cpu", init_scale=4.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert parameter.item() == -4.0


@pytest.mark.parametrize("own", [None, 2.0])
def test_an_optimizer_that_takes_the_scale_but_not_the_flag_keeps_neither(own: float | None) -> None:
    """The scale would be taken for a factor of the user's by the next step, which would divide twice."""

    class Refuses(torch.optim.SGD):
        refuses = True

        def __setattr__(self, name: str, value: object) -> None:
            if name == "found_inf" and self.refuses:
                raise TypeError("found_inf must be a bool")
            super().__setattr__(name, value)

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([32.0])
    optimizer = Refuses([parameter], lr=1.0, fused=True)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.clip_grad_norm_(optimizer, 1e3, defer=True)
    if own is not None:
        optimizer.grad_scale = torch.tensor(own)
    with pytest.raises(TypeError, match="found_inf must be a bool"):
        scaler.step(optimizer)
    optimizer.refuses = False
    scaler.step(optimizer)
    assert parameter.item() in (0.0, -8.0 / (own or 1.0))
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("own", [False, True])
def test_a_fused_optimizer_with_parameters_on_the_cpu_gets_copies_that_were_waited_for(own: bool) -> None:
    """Difference 21: torch's would copy both to the CPU itself, without waiting, and read at once."""
    optimizer = sgd([torch.ones(2)], fused=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a GPU's tensors without a GPU
        scale, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        optimizer.grad_scale = torch.ones((), device="cuda") if own else None
        with lending.lent((optimizer,), scale, found_inf, on_host=True):
            assert (optimizer.grad_scale.device.type, optimizer.found_inf.device.type) == ("cpu", "cpu")
        with lending.lent((optimizer,), scale, found_inf):
            assert (optimizer.grad_scale, optimizer.found_inf) == (scale, found_inf)
        with lending.lent((optimizer,), None, found_inf, on_host=True):
            assert optimizer.grad_scale is None

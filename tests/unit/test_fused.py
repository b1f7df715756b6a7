"""What is set on a fused optimizer for one step: the scale times a factor of the user's, and the flag."""

from __future__ import annotations

import torch
from helpers import sgd
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton import lending


def test_torchs_own_optimizers_get_the_scale_itself() -> None:
    """A copy would be a launch more in every step; whoever might write into it gets one."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    scale, found_inf = torch.ones(()), torch.zeros(())
    with lending.lent((optimizer,), scale, found_inf):
        assert optimizer.grad_scale is scale
        assert optimizer.found_inf is found_inf
    optimizer.register_step_pre_hook(lambda *args: None)
    with lending.lent((optimizer,), scale, found_inf):
        assert optimizer.grad_scale is not scale
        assert optimizer.found_inf is not found_inf
    with lending.lent((optimizer,), None, found_inf):
        assert optimizer.grad_scale is None


def test_21_a_fused_optimizer_with_parameters_on_the_cpu_gets_copies_that_were_waited_for() -> None:
    """torch's class copies both to the CPU without waiting, and its kernel reads at once."""
    optimizer = sgd([torch.ones(2)], fused=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a GPU's tensors without a GPU
        scale, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        for own in (None, torch.ones((), device="cuda"), 3.0):
            optimizer.grad_scale = own
            with lending.lent((optimizer,), scale, found_inf, on_host=True):
                assert (optimizer.grad_scale.device.type, optimizer.found_inf.device.type) == ("cpu", "cpu")
        optimizer.grad_scale = None
        with lending.lent((optimizer,), scale, found_inf):
            assert (optimizer.grad_scale, optimizer.found_inf) == (scale, found_inf)
        with lending.lent((optimizer,), None, found_inf, on_host=True):
            assert optimizer.grad_scale is None

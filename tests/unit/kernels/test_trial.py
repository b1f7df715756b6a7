"""A trial passes with these kernels, and finds out a launch that does nothing."""

from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE

from scaler_triton.core.gradients import DTYPES
from scaler_triton.kernels import trial

LAUNCHES = {
    "unscaling": ["launch_check", "launch_unscale"],
    "clipping": ["launch_sum_of_squares", "launch_clip"],
    "measuring": ["launch_measure"],
    "guarding": ["launch_judge"],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("task", LAUNCHES)
def test_right_kernels_pass(task, dtype):
    getattr(trial, task)(torch.device(DEVICE), dtype)


@pytest.mark.parametrize(("task", "name"), [(task, name) for task, names in LAUNCHES.items() for name in names])
def test_a_launch_that_does_nothing_is_found_out(task, name):
    with mock.patch.object(trial, name), pytest.raises(RuntimeError, match="kernels run on .* but give .* instead of "):
        getattr(trial, task)(torch.device(DEVICE), torch.float32)

"""Gradients on a GPU beside gradients offloaded to the host: still one flag and one collective."""

import offload_cases
import pytest
from cases import Fault
from checks import assert_agreed

pytestmark = [pytest.mark.distributed, pytest.mark.gpu]

HOW = pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
NAMES = pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])


@HOW
@NAMES
@pytest.mark.parametrize("param", [0, 1], ids=["on-gpu", "on-host"])
def test_an_inf_on_either_device_skips_everywhere(two, name, param, how):
    reports = two.run(offload_cases.two_devices, name, [Fault(1, 1, param)], apart=False, how=how)
    assert_agreed(reports, [1])


@HOW
@NAMES
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_gradients_on_different_devices(two, name, rank, how):
    reports = two.run(offload_cases.two_devices, name, [Fault(1, rank)], apart=True, how=how)
    assert_agreed(reports, [1])

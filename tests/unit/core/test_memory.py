"""Small numbers on the device and their copies on the host."""

import torch

from scaler_triton.core.memory import HostCopy, OnDevice, fp32_on

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_host_copy_has_the_value_of_its_last_start() -> None:
    source = torch.tensor([1, 2])
    held = HostCopy()
    for want in ([1, 2], [2, 3]):
        held.start(source)
        source += 1
        assert held.has_arrived()
        assert held.read() == want


def test_the_newest_is_what_was_given_until_a_copy_has_arrived_and_off_cuda_that_is_at_once() -> None:
    source, held = torch.tensor([1, 2]), HostCopy([0, 0])
    assert held.latest == [0, 0]
    assert held.newest(source) == [1, 2]
    source += 1
    assert held.newest(source) == held.latest == [2, 3]
    assert held.newest(torch.tensor([7])) == [7]


def test_numbers_are_a_list_until_a_device_needs_them_then_one_tensor_there() -> None:
    numbers = OnDevice([1.0, 0.1])
    numbers.set([2.0, 0.1])
    assert (numbers.read(), numbers.values) == ([2.0, 0.1], [2.0, 0.1])
    with torch.inference_mode():
        there = numbers.on(CPU)
    assert (there.dtype, there.tolist(), there.is_inference()) == (torch.float64, [2.0, 0.1], False)
    numbers.set([3.0, 0.3])
    assert numbers.on(CPU) is there
    assert there.tolist() == numbers.read() == [3.0, 0.3]
    numbers.read()[0] = 5.0
    assert numbers.read() == [3.0, 0.3]


def test_a_number_is_copied_only_to_become_fp32_or_to_go_elsewhere() -> None:
    number = torch.tensor([0.5])
    assert fp32_on(CPU, number) is number
    assert fp32_on(META, number).is_meta
    wide = fp32_on(CPU, number.double())
    assert (wide.dtype, wide.tolist()) == (torch.float32, [0.5])

"""What the tests that run on the pretended GPU rely on: it is as strict as a real one. Needs two of them."""

import pytest
import torch
from helpers import waits_raise

WAITS = "called a synchronizing CUDA operation"


def raised(act):
    """The first words of the error that `act` raises; empty if none."""
    try:
        act()
    except RuntimeError as error:
        return str(error).split(":")[0].split(",")[0]
    return ""


def test_new_memory_is_garbage():
    assert torch.empty(3, device="cuda")[0].item() == pytest.approx(-2.87e-16, rel=0.01)


def test_devices_do_not_mix_but_for_numbers():
    ones = torch.ones(3, device="cuda")
    assert raised(lambda: ones + torch.ones(3)) == "Expected all tensors to be on the same device"
    assert raised(lambda: torch.ones(3, device="cuda:1") + ones) == "Expected all tensors to be on the same device"
    assert (ones + torch.tensor(1.0)).tolist() == [2.0] * 3


def test_what_waits_raises_in_debug_mode():
    ones, here, pinned = torch.ones(3, device="cuda"), torch.ones(3), torch.ones(3).pin_memory()
    with waits_raise():
        assert raised(lambda: ones[0].item()) == WAITS
        assert raised(lambda: ones.copy_(here, non_blocking=True)) == WAITS
        assert raised(lambda: ones.copy_(pinned)) == WAITS
        assert raised(torch.cuda.synchronize) == WAITS
        ones.copy_(pinned, non_blocking=True)


def test_copies_to_pinned_memory_arrive_late():
    to, done = torch.zeros(1, pin_memory=True), torch.cuda.Event()
    to.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    done.record()
    assert to.item() == 0.0
    done.synchronize()
    assert to.item() == 1.0


def test_pinned_memory_must_not_change_while_it_is_copied():
    buffer = torch.ones(2).pin_memory()
    torch.zeros(2, device="cuda").copy_(buffer, non_blocking=True)
    buffer.fill_(2.0)
    assert raised(torch.cuda.synchronize) == "pinned memory was written while the GPU had yet to copy it"


def test_a_capture_refuses_a_wait_and_warns_if_it_holds_nothing_else():
    one = torch.ones((), device="cuda")
    with pytest.warns(UserWarning, match=r"The CUDA Graph is empty\."), torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert raised(one.item) == "CUDA error"


def test_events_and_streams_belong_to_one_of_two_gpus():
    event = torch.cuda.Event()
    event.record()
    with torch.cuda.device(1):
        assert torch.cuda.Stream().device_index == 1
        assert raised(event.record) == "Event device 0 does not match recording stream's device 1."
    assert raised(lambda: torch.ones(1, device="cuda:2")) == "CUDA error"


def test_a_profiler_sees_kernels_copies_and_waits():
    ones = torch.ones(3, device="cuda")
    with torch.profiler.profile() as profile:
        (ones * 2)[1:].cpu()
    on_gpu = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert on_gpu == ["aten::mul", "Memcpy DtoH"]
    assert "cudaStreamSynchronize" in [event.name for event in profile.events()]

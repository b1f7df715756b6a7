"""Which tensors the kernels take in this process, and how wide a program they are launched with."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, NATIVE

from scaler_triton.kernels import launch
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_check, launch_unscale


def test_the_other_backends_device_is_refused():
    launch.check_device(DEVICE)
    other = torch.device("cpu" if NATIVE else "cuda:0")
    with pytest.raises(RuntimeError, match=f"TRITON_INTERPRET=1 the kernels take tensors on .*, got {other}"):
        launch.check_device(other)


@pytest.mark.parametrize(("lanes", "want"), [(64, 4), (32, 8)])
def test_wide_warps_are_fewer(monkeypatch, lanes, want):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(warp_size=lanes))
    assert launch._native_warps(8, torch.device("cuda")) == want
    assert launch._native_warps(1, torch.device("cuda")) == 1


def first_launch(table):
    table.set_addresses((0,))
    launch_check(table, torch.zeros((), device=DEVICE))


@pytest.mark.parametrize(
    "first",
    [lambda _: GradTable([8], torch.float32, DEVICE), lambda table: table.set_weights([2.0]), first_launch],
    ids=["table", "weights", "launch"],
)
def test_what_allocates_copies_or_compiles_is_refused_in_a_capture(monkeypatch, first):
    table = GradTable([8], torch.float32, DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(launch, "capture_query", lambda device: lambda: True)
        with pytest.raises(RuntimeError, match="cannot be captured: take one step like it before"):
            first(table)
    first(table)


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="streams need a GPU")
def test_the_allocator_is_told_once_of_each_stream_that_launches():
    """Else a table that is freed while one of them is behind might be overwritten, and with it the addresses."""
    table, grad = GradTable([8], torch.float32, DEVICE), torch.ones(8, device=DEVICE)
    table.set_addresses((grad.data_ptr(),))
    flag, counts = torch.zeros((), device=DEVICE), []
    ours, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(ours)
    for stream in (ours, None, ours, other, other, ours):
        here = torch.cuda.stream(stream) if stream else torch.cuda.graph(torch.cuda.CUDAGraph())
        with mock.patch.object(torch.Tensor, "record_stream") as told, here:
            launch_check(table, flag)
        counts.append(told.call_count)
    # The table's five, the generation, the flag, and in place of a scale once more.
    assert counts == [8, 0, 8, 8, 0, 0]  # the first is Triton's own, the second captured


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_runs_under_its_tensors_device():
    second = torch.device("cuda", 1)
    grad = torch.ones(100, device=second)
    table = GradTable([100], torch.float32, second)
    table.set_addresses((grad.data_ptr(),))
    with torch.cuda.device(0):
        launch_unscale(table, torch.tensor(4.0, device=second), torch.zeros((), device=second), inverse=False)
    assert grad.eq(0.25).all()

"""Other streams, and torch's debug mode for waits: neither changes what a scaler does."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import assert_same, parameters, started, take_step, waits_raise
from torch import Tensor

from scaler_triton import GradScaler, dispatch

pytestmark = pytest.mark.gpu

LONG = 200_000_000  # cycles, a tenth of a second


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_does_not_raise_where_waits_do(how: str, dtype: torch.dtype) -> None:
    """What is made once is waited for; torch's scaler makes nothing. And kernels on trial are none that fail."""
    (parameter,) = parameters([torch.full((5,), 8.0, dtype=dtype)], "cuda")
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    with waits_raise():
        scaler = started(GradScaler, "cuda", init_scale=4.0)
        take_step(scaler, optimizer, how)
        scaler.set_growth_factor(3.0)
        with pytest.raises(RuntimeError, match="synchronizing"):
            scaler.get_scale()
    assert dispatch.choose(parameter.device, dtype, "auto", clips="clip" in how) == "triton"
    assert scaler.get_growth_factor() == 3.0
    assert parameter[0].item() < 0.0


def test_an_update_on_another_stream_leaves_a_step_its_flag() -> None:
    """It clears the flags for the next step, and all that its stream has waited for is the check."""
    (parameter,) = parameters([torch.full((5,), math.inf)], "cuda")
    optimizer, other = torch.optim.SGD([parameter], lr=1.0, fused=True), torch.cuda.Stream()
    scaler = started(GradScaler, "cuda", init_scale=4.0)
    take_step(scaler, optimizer, "unscale_")  # what is made once is made
    scaler.unscale_(optimizer)
    here = torch.cuda.current_stream()
    other.wait_stream(here)
    torch.cuda._sleep(LONG)
    scaler.step(optimizer)
    wait = torch.cuda.Stream.wait_stream
    with torch.cuda.stream(other), mock.patch.object(torch.cuda.Stream, "wait_stream", autospec=True) as waited:
        waited.side_effect = wait
        scaler.update()
    assert waited.mock_calls == [mock.call(other, here)]
    here.wait_stream(other)
    assert parameter[0].item() == 0.0
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("first", [False, True])
def test_a_setter_leaves_alone_an_update_that_waits_on_another_stream(first: bool) -> None:
    (parameter,) = parameters([torch.full((5,), 8.0)], "cuda")
    optimizer, other = torch.optim.SGD([parameter], lr=1.0, fused=True), torch.cuda.Stream()
    scaler = started(GradScaler, "cuda", init_scale=4.0, growth_interval=1 if first else 2)
    if not first:
        take_step(scaler, optimizer, "step")
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG)
        take_step(scaler, optimizer, "step")
    scaler.set_growth_interval(100)
    torch.cuda.current_stream().wait_stream(other)
    assert scaler.get_scale() == 8.0
    for _ in range(3):
        take_step(scaler, optimizer, "step")
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 3)


def train_on_streams(backward: Any, scaling: Any, backend: str) -> list[Tensor]:
    """Train with backward on one stream and the scaler on another, each waiting for the other's work alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = GradScaler("cuda", init_scale=2.0**12, growth_interval=3, backend=backend)
    batches, seen = torch.randn(20, 64, 256, device="cuda"), []
    torch.cuda.synchronize()
    for step, batch in enumerate(batches):
        with torch.cuda.stream(backward):
            backward.wait_stream(scaling)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = model(batch).square().mean() * (torch.inf if step % 7 == 3 else 1.0)
            scaler.scale(loss).backward()
        with torch.cuda.stream(scaling):
            scaling.wait_stream(backward)
            take_step(scaler, optimizer, "unscale_")
            seen.append(scaler._scale.clone())
    torch.cuda.synchronize()
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_backward_on_one_stream_and_the_scaler_on_another(backend: str) -> None:
    current, side, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    expected = train_on_streams(current, current, backend)
    for streams in ((side, current), (current, side), (side, other)):
        for ours, one_stream in zip(train_on_streams(*streams, backend), expected, strict=True):
            assert_same(ours, one_stream)

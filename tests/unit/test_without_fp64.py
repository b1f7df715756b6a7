"""Scalers and guards on a device without fp64, Apple's GPU, which is pretended; `make without-fp64` runs more."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_all_same, params_of
from no_fp64 import WithoutFp64
from torch import Tensor

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard, ops
from scaler_triton.core.torch_ops import exponent_of, times_power_of_2, wide_dtype

LOSS_SCALES = [1.0, 3.0, float("inf"), 0.5, float("nan"), 2.0, 7.0, 1.0]


@pytest.fixture(autouse=True)
def device() -> Iterator[str]:
    with WithoutFp64():
        yield "mps"


def model_on(device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(dtype)
    return model.to(device), torch.randn(5, 8).to(dtype).to(device)


def train(scaler: Any, device: str, clip: Any = None, **options: Any) -> tuple[list[Tensor], list[float]]:
    """Train over LOSS_SCALES; return the weights on the host, and the scale after each step."""
    model, batch = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    scales = []
    for factor in LOSS_SCALES:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().sum() * factor).backward()
        if clip is not None:
            clip(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [parameter.detach().cpu() for parameter in params_of(optimizer)], scales


def test_fp64_is_refused_there_and_torchs_scaler_works(device: str) -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device=device).double()
    assert wide_dtype(torch.device(device)) is torch.float32
    assert wide_dtype(torch.device("cpu")) is torch.float64
    assert train(torch.amp.GradScaler(device), device)[1][-1] == 2.0**14


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("init_scale", [2.0**16, 3.0])
def test_a_loop_is_torchs_to_the_bit(device: str, fused: bool, init_scale: float) -> None:
    numbers = {"init_scale": init_scale, "growth_interval": 2}
    theirs, their_scales = train(torch.amp.GradScaler(device, **numbers), device, fused=fused)
    ours, scales = train(GradScaler(device, **numbers), device, fused=fused)
    assert scales == their_scales
    assert_all_same(ours, theirs)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, float("inf")])
def test_clipping_is_that_of_the_host(device: str, norm_type: float) -> None:
    norms: dict[str, list[float]] = {"cpu": [], device: []}
    weights, scales = {}, {}
    for where, seen in norms.items():

        def clip(scaler: Any, optimizer: Any, seen: list[float] = seen) -> None:
            seen.append(scaler.clip_grad_norm_(optimizer, 1.0, norm_type).item())

        weights[where], scales[where] = train(GradScaler(where, init_scale=2.0**10), where, clip)
    assert scales["cpu"] == scales[device]
    torch.testing.assert_close(norms[device], norms["cpu"], rtol=1e-6, atol=0, equal_nan=True)
    for mine, host in zip(weights[device], weights["cpu"], strict=True):
        torch.testing.assert_close(mine, host, rtol=1e-4, atol=1e-6)  # AdamW divides by small numbers


def test_squares_beyond_fp32_are_no_overflow(device: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), GradScaler(device, init_scale=2.0**20)
    scaler.scale(torch.ones((), device=device))
    parameter.grad = torch.tensor([3e20, 4e20, 0.0], device=device) * 2
    norm = scaler.clip_grad_norm_(optimizer, 1e10)
    assert norm.item() == pytest.approx(1e21 / 2.0**20, rel=1e-6)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.was_skipped(optimizer)
    assert scaler.get_scale() == 2.0**20


def test_what_is_measured_and_the_headroom_policy_are_those_of_the_host(device: str) -> None:
    seen = []
    for where in ("cpu", device):
        scaler = GradScaler(where, init_scale="measured", scale_policy="headroom", headroom_window=3)
        scales = train(scaler, where)[1]
        seen.append((scales, scaler.headroom(), scaler.state_dict()))
    assert seen[0] == seen[1]
    assert len(set(seen[0][0])) > 2


@pytest.mark.parametrize("clips", [False, True])
def test_a_guard_finds_the_spikes_that_it_finds_on_the_host(device: str, clips: bool) -> None:
    steps = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 500.0, 1.0, float("nan"), 1.1, 400.0, 1.0]
    skipped: dict[str, list[bool]] = {"cpu": [], device: []}
    spikes: list[int] = []
    for where, seen in skipped.items():
        guard = StepGuard(where, spike_sigma=6.0, window=6)
        parameter = torch.nn.Parameter(torch.ones(4, device=where))
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        for factor in steps:
            parameter.grad = torch.full((4,), factor).to(where)
            if clips:
                guard.clip_grad_norm_(optimizer, 1.0)
            guard.step(optimizer)
            guard.update()
            seen.append(guard.was_skipped(optimizer))
        spikes.append(guard.stats().spikes)
        assert copy.deepcopy(guard).state_dict().keys() == guard.state_dict().keys()
    assert skipped[device] == skipped["cpu"]
    assert spikes == [2, 2]
    assert skipped["cpu"].index(True) == steps.index(500.0)


def test_a_guard_that_clips_finds_what_is_not_finite(device: str) -> None:
    guard, parameter = StepGuard(device), torch.nn.Parameter(torch.ones(4, device=device))
    optimizer, norms = torch.optim.SGD([parameter], lr=0.01), []
    for factor in (1.0, math.nan, math.inf, 2.0):
        parameter.grad = torch.full((4,), factor).to(device)
        norms.append(guard.clip_grad_norm_(optimizer, 1.0).item())
        guard.step(optimizer)
        guard.update()
    assert norms == pytest.approx([2.0, math.nan, math.inf, 4.0], nan_ok=True)
    assert guard.stats().skipped == 2
    assert parameter.tolist() == pytest.approx([0.99] * 4, rel=1e-6)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("measure", [False, True])
def test_a_sharded_scaler_works_where_torchs_fails(device: str, measure: bool) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    with pytest.raises(AssertionError, match="Expected supported device"):
        Theirs(device).scale(torch.ones((), device=device))
    scaler = ShardedGradScaler(device, measure=measure)
    half = torch.ones(2, dtype=torch.float16, device=device)
    several = scaler.scale([half * 0.5, (torch.ones((), device=device),)])
    assert several[0].dtype is torch.float16
    assert several[1][0].tolist() == 2.0**16
    weights, scales = train(scaler, device, lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0))
    assert scales[-1] == 2.0**14
    assert all(weight.isfinite().all() for weight in weights)


def test_ops_take_lists_there(device: str) -> None:
    grads = [torch.tensor([3.0, 4.0], device=device), torch.tensor([12.0], device=device)]
    found_inf, inv_scale = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    norm = ops.grad_norm(grads, found_inf, inv_scale=inv_scale)
    assert (norm.item(), norm.dtype, found_inf.item()) == (6.5, torch.float32, 0.0)
    ops.unscale_(grads, inv_scale, found_inf)
    assert [grad.tolist() for grad in grads] == [[1.5, 2.0], [6.0]]


def test_exponents_are_those_of_fp64() -> None:
    numbers = torch.tensor([2.0**-126, 0.75, 1.0, 1.5, 2.0, 65504.0, 3e38])
    assert exponent_of(numbers).tolist() == exponent_of(numbers.double()).tolist()
    exponents = torch.tensor([-126, -3, 0, 5, 127])
    one = torch.ones(5)
    assert times_power_of_2(one, exponents).tolist() == times_power_of_2(one.double(), exponents).tolist()

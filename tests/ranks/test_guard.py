"""StepGuard over ranks: one bad or spiking gradient on one rank, and all of them skip, by one collective a step."""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from spike_rule import judged, remembered
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ranks import cases, models
from ranks.cases import SIGMA, WINDOW, Fault, new_optimizer, new_scaler, said

pytestmark = pytest.mark.distributed

# Whole models in bf16.

SPIKE = 1e3
FAULTS = [Fault(4, 1, 0, math.nan), Fault(5, 3, 1, math.inf), Fault(7, 2, 1, SPIKE), Fault(8, 0, 0, -math.inf)]
BAD_STEPS = [fault.step for fault in FAULTS]
STEPS = 10


class Trace(NamedTuple):
    """What a guarded run left on one rank."""

    skipped: list[bool]
    collectives: list[int]
    norms: list[float]  # of all ranks' gradients
    clipped: list[float]  # the norms that clipping returned
    windows: list[list[float]]
    stats: Any


def guarded(rank: int, wrapper: str, name: str, clip: bool) -> Trace:
    """Train a model with a guard; it ends as one without the bad batches, which no guard would skip."""
    guard, trace = new_scaler("guard"), Trace([], [], [], [], [], None)
    model, optimizer = wrapped(wrapper, name)
    other, other_optimizer = wrapped(wrapper, name)
    for step in range(STEPS):
        backward(wrapper, rank, step, model, optimizer)
        cases.plant(FAULTS, rank, step, cases.params_of(optimizer))
        trace.norms.append(true_norm(wrapper, optimizer))
        with cases.CollectiveCounter() as counter:
            if clip:
                trace.clipped.append(clipped_norm(guard, optimizer, model))
            guard.step(optimizer)
        trace.collectives.append(counter.count)
        trace.skipped.append(guard.was_skipped(optimizer))
        guard.update()
        if step not in BAD_STEPS:
            backward(wrapper, rank, step, other, other_optimizer)
            if clip:
                clipped_norm(new_scaler("guard", spike_sigma=None), other_optimizer, other)
            other_optimizer.step()
    assert kept(optimizer) == kept(other_optimizer)
    return trace._replace(windows=cases.windows(guard), stats=guard.stats())


def wrapped(wrapper: str, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = models.WRAPPERS[wrapper](models.Net().bfloat16())
    return model, new_optimizer(name, model.parameters())


def backward(wrapper: str, rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = models.batch(step, models.part_of(wrapper, rank))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()


def clipped_norm(guard: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    return guard.clip_grad_norm_(optimizer, models.MAX_NORM, model=model).item()


def true_norm(wrapper: str, optimizer: torch.optim.Optimizer) -> float:
    """The norm over all ranks: each adds its squares, divided by how many ranks hold the same shard."""
    squares = torch.zeros((), dtype=torch.float64)
    for param in cases.params_of(optimizer):
        shards = dist.get_world_size() if wrapper.startswith("fsdp1") else 1
        if isinstance(param, DTensor):
            dims = zip(param.device_mesh.shape, param.placements, strict=True)
            shards = math.prod(size for size, placement in dims if not placement.is_replicate())
        if param.grad is not None:
            squares += cases.local_of(param.grad).double().square().sum() * shards / dist.get_world_size()
    dist.all_reduce(squares)
    return squares.sqrt().item()


def kept(optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters and the optimizer's state."""
    params = cases.params_of(optimizer)
    states = [value for param in params for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return cases.digests([*params, *states])


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@cases.NAMES
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-full", "fsdp2", "hsdp2", "fsdp2-tp"])
def test_what_one_rank_meets_all_skip_and_have_never_seen(four, wrapper, name, clip):
    traces = four.run(guarded, wrapper, name, clip)
    skipped = [skips for skips, _ in judged(traces[0].norms, SIGMA, WINDOW)]
    window = remembered(traces[0].norms, SIGMA, WINDOW)
    assert [step for step, bad in enumerate(skipped) if bad] == BAD_STEPS
    for trace in traces:
        assert trace.skipped == skipped
        assert trace.collectives == [1] * STEPS
        assert trace.clipped == pytest.approx(trace.norms if clip else [], rel=1e-6, nan_ok=True)
        assert trace.windows == traces[0].windows == [pytest.approx(window, rel=1e-6)]
        assert (trace.stats.updates, trace.stats.skipped, trace.stats.spikes) == (STEPS, len(BAD_STEPS), 1)


# Parameters by hand.


def checked_before_a_joint_clip(rank: int) -> list[list[float]]:
    """A framework has the second optimizer checked before both are clipped, then both, too; the windows after that."""
    guard, params = new_scaler("guard"), [cases.plain_param(1), cases.plain_param(1)]
    optimizers = [new_optimizer("sgd", [param]) for param in params]
    for step in range(4):
        for param, norm in zip(params, (3.0, 4.0), strict=True):
            param.grad = torch.full((1,), norm * 2**step)
        for optimizer in {1: optimizers[1:], 2: optimizers}.get(step, []):
            guard._check_inf_per_device(optimizer)
        guard.clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            guard.step(optimizer)
        guard.update()
    return cases.windows(guard)


def test_of_checks_before_a_joint_clip_its_own_window_keeps_none(two):
    assert two.run(checked_before_a_joint_clip) == [[[5.0, 10.0, 20.0, 40.0], [8.0, 16.0]]] * 2


def resumed(rank: int, clip: bool) -> list[list[float]]:
    """In the first step after a checkpoint rank 1 cannot check the first of two optimizers; the windows then."""
    guard, params = new_scaler("guard"), [cases.plain_param(4), cases.plain_param(4)]
    saved = guard.state_dict()
    saved["scaler_triton"]["windows"] = [[2.0] * WINDOW, [8.0] * WINDOW]
    guard.load_state_dict(saved)
    optimizers = [new_optimizer("sgd", [param]) for param in params]
    params[0].grad = torch.ones(1).expand(4) if rank == 1 else torch.ones(4)
    params[1].grad = torch.full((4,), 4.0)
    for optimizer in optimizers:
        if clip:
            said(guard.clip_grad_norm_, optimizer, 1.0)
        said(guard.step, optimizer)
    guard.update()
    return cases.windows(guard)


@pytest.mark.parametrize("clip", [False, True])
def test_norms_of_a_checkpoint_find_their_optimizers_though_a_check_fails(two, clip):
    assert two.run(resumed, clip) == [[[2.0] * WINDOW, [8.0] * WINDOW]] * 2


def sums_with_a_rank_out_of_memory(rank: int, before: int) -> list[Any]:
    """After some good steps rank 1 fails before it has summed a Partial gradient, as the others do; what each sees."""
    guard, param = new_scaler("guard"), cases.dtensor_param(cases.line(), [Replicate()])
    optimizer, told = new_optimizer("sgd", [param]), []
    for step in range(before + 2):
        param.grad = cases.placed(torch.ones(2, 3), Partial())
        fails = rank == 1 and step == before
        with cases.FirstOpFails() if fails else nullcontext():
            told.append(said(guard.step, optimizer))
        told.append(guard.was_skipped(optimizer) if not told[-1] else "raised")
    return [told, cases.digests([param]), guard.stats().updates]


@pytest.mark.parametrize("before", [0, 1])
def test_a_rank_that_fails_joins_the_sums_of_gradients_and_all_skip(two, before):
    first, second = two.run(sums_with_a_rank_out_of_memory, before)
    good = ["", False]
    other = "PeerFailedError: Another rank failed to check its gradients, so this step is skipped on all ranks."
    assert first[0] == [*good * before, other, "raised", *good]
    assert second[0] == [*good * before, "OutOfMemoryError: out of memory", "raised", *good]
    assert first[1:] == second[1:]

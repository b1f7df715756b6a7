"""StepGuard over ranks: one bad or spiking gradient on one rank, and all of them skip, by one collective a step."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import WAYS
from spike_rule import judged
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ranks import cases, models
from ranks.cases import SIGMA, WINDOW, Fault, new_optimizer, new_scaler, said
from ranks.test_clip import BACKENDS, one_rank_fails
from ranks.test_failures import BAD_STEP, FLAWS, TOLD, flawed
from ranks.test_process_group import in_pairs
from scaler_triton import ScalerStats

pytestmark = pytest.mark.distributed

# Whole models in bf16.

SPIKE = 1e3
FAULTS = [Fault(4, 1, 0, math.nan), Fault(5, 3, 1, math.inf), Fault(7, 2, 1, SPIKE), Fault(8, 0, 0, -math.inf)]
BAD_STEPS = [fault.step for fault in FAULTS]
STEPS = 10


class Trace(NamedTuple):
    """What a guarded run left on one rank, beside a run that has never seen the bad batches."""

    skipped: list[bool]
    collectives: list[int]
    norms: list[float]  # of all ranks' gradients
    clipped: list[float]  # the norms that clipping returned
    windows: list[list[float]]
    stats: Any
    digests: list[str]  # of parameters and of the optimizer's state
    expected: list[str]  # of the run beside it


def guarded(rank: int, wrapper: str, name: str, clip: bool) -> Trace:
    """Train a model with a guard, and one without the bad batches, which no guard would skip."""
    guard = new_scaler("guard")
    model, optimizer = wrapped(wrapper, name)
    other, other_optimizer = wrapped(wrapper, name)
    skipped, collectives, norms, clipped = [], [], [], []
    for step in range(STEPS):
        backward(wrapper, rank, step, model, optimizer)
        cases.plant(FAULTS, rank, step, cases.params_of(optimizer))
        norms.append(true_norm(wrapper, optimizer))
        count = cases.collectives_of(lambda: clipped.append(clipped_norm(guard, optimizer, model))) if clip else 0
        collectives.append(count + cases.collectives_of(guard.step, optimizer))
        skipped.append(guard.was_skipped(optimizer))
        guard.update()
        if step not in BAD_STEPS:
            backward(wrapper, rank, step, other, other_optimizer)
            if clip:
                clipped_norm(new_scaler("guard", spike_sigma=None), other_optimizer, other)
            other_optimizer.step()
    ends = [kept(each) for each in (optimizer, other_optimizer)]
    return Trace(skipped, collectives, norms, clipped, cases.windows(guard), guard.stats(), *ends)


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
    params = cases.params_of(optimizer)
    states = [value for param in params for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return cases.digests([*params, *states])


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@cases.NAMES
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-full", "fsdp2", "hsdp2", "fsdp2-tp"])
def test_what_one_rank_meets_all_skip_and_have_never_seen(four, wrapper, name, clip):
    traces = four.run(guarded, wrapper, name, clip)
    skipped = [skips for skips, _ in judged(traces[0].norms, SIGMA, WINDOW)]
    seen = [norm for norm in traces[0].norms if math.isfinite(norm)]
    assert [step for step, bad in enumerate(skipped) if bad] == BAD_STEPS
    for trace in traces:
        assert trace.skipped == skipped
        assert trace.collectives == [1] * STEPS
        assert trace.digests == trace.expected
        assert trace.clipped == pytest.approx(trace.norms if clip else [], rel=1e-6, nan_ok=True)
        assert trace.windows == traces[0].windows == [pytest.approx(seen[-WINDOW:], rel=1e-6)]
        assert (trace.stats.updates, trace.stats.skipped, trace.stats.spikes) == (STEPS, len(BAD_STEPS), 1)


# Parameters by hand.


@pytest.mark.parametrize("sigma", [None, SIGMA])
@cases.UNSCALE
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused", "old style"])
@pytest.mark.parametrize("flaw", ["expanded", "csr", "complex", "no memory"])
def test_a_rank_whose_check_fails(two, flaw, name, unscale, sigma):
    *peers, failed = reports = two.run(flawed, "guard", name, flaw, unscale, {"spike_sigma": sigma})
    assert failed.errors[BAD_STEP].startswith(FLAWS[flaw][2].split(".*")[0])
    for report in reports:
        assert report.stepped == [step != BAD_STEP for step in range(cases.STEPS)]
        assert report.collectives == [1] * cases.STEPS
        assert not any(error for step, error in enumerate(report.errors) if step != BAD_STEP)
        assert report.windows == reports[0].windows
        assert [len(norms) for norms in report.windows] == [cases.STEPS - 1] * (sigma is not None)
    for peer in peers:
        assert peer.errors[BAD_STEP].startswith(TOLD if name in ("sgd", "adamw") else "")


@pytest.mark.parametrize("how", ["at once", "largest", "some parameters"])
@pytest.mark.parametrize("reason", ["bad gradient", "no memory"])
@pytest.mark.parametrize("layout", ["one", "two"])
def test_a_rank_that_fails_to_clip(two, layout, reason, how):
    first, second = two.run(one_rank_fails, "guard", layout, reason, how)
    assert first[1].startswith("RuntimeError: Another rank failed to check its gradients")
    assert first[-2:] == second[-2:] == ["stayed", "1.0"]


@cases.NAMES
def test_a_group_binds_its_own_ranks_only(four, name):
    reports = [report for report, _ in four.run(in_pairs, "guard", name, [Fault(1, 3)], "")]
    for rank, report in enumerate(reports):
        assert report.stepped == [True, rank < 2, True, True]
        assert report.collectives == [1] * cases.STEPS
        assert report.windows == reports[rank // 2 * 2].windows
        assert len(report.windows[0]) == 4 - rank // 2


def with_a_group_and_without(rank: int, store: str, name: str) -> list[list[bool]]:
    """The last rank overflows, in a step without a default group, and in one with a new one: who has stepped."""
    world_size, guard, params = dist.get_world_size(), new_scaler("guard"), [cases.plain_param(3)]
    optimizer, taken = new_optimizer(name, params), []
    train = lambda: cases.train(  # noqa: E731
        rank, guard, optimizer, cases.giving(guard, params), [Fault(0, world_size - 1)], steps=1
    )
    dist.destroy_process_group()
    try:
        taken.append(train().stepped)
    finally:
        cases.mesh.cache_clear()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return [*taken, train().stepped]


@cases.NAMES
def test_without_a_default_group_a_guard_decides_alone(two, tmp_path, name):
    assert two.run(with_a_group_and_without, str(tmp_path / "store"), name) == [[[True], [False]], [[False], [False]]]


def reported(rank: int, value: float) -> list[str]:
    """The reports of a step in which rank 1 alone meets a value: gathered, in a spike's case without a name."""
    guard, params = new_scaler("guard"), cases.LAYOUTS["line-shards"]()
    optimizer = new_optimizer("adamw", params)
    for step in range(4):
        cases.give_grads(guard, params, 0)
        cases.plant([Fault(3, 1, 1, value)], rank, step, params)
        guard.step(optimizer)
    guard.update()
    named = [("first", params[0]), ("second", params[1])]
    return str(guard.overflow_report(named, gather=True)).splitlines()


def test_a_report_names_the_rank_or_the_spike(two):
    for lines in two.run(reported, math.nan):
        assert lines[0] == "The last skip, at update 4: 1 bad gradient on rank 1."
        assert lines[-1].split() == ["1", "second", "NaN", "6"]
    # 12 elements of 2^-3 and 12 of 2^-4, one of which is 64; their norms before it are equal.
    norm, before = math.sqrt(12 / 64 + 11 / 256 + 64**2), math.sqrt(12 / 64 + 12 / 256)
    _, limit = judged([before] * 3 + [norm], SIGMA, WINDOW)[-1]
    for lines in two.run(reported, 64.0):
        assert lines == [f"The last skip, at update 4: spike: norm {norm:.3g}, limit {limit:.3g}."]


def in_some_loop(rank: int, name: str, how: str, calls: Sequence[str]) -> tuple[list[bool], Any, list[Any]]:
    """Train by a loop that makes some of the calls that a guard can do without: what was skipped, and what is left."""
    guard, params = new_scaler("guard"), [cases.plain_param(3), cases.sharded_param()]
    optimizer, skipped = new_optimizer(name, [{"params": [param]} for param in params]), []
    for step in range(8):
        loss = torch.ones(())
        assert "scale" not in calls or guard.scale(loss) is loss
        for param in params:
            param.grad = cases.grad_like(param, 1.0 + step % 3)
        cases.plant([Fault(4, 1, 0, math.inf), Fault(6, 0, 1, SPIKE)], rank, step, params)
        if how == "unscale_":
            guard.unscale_(optimizer)
        elif how == "clip":
            guard.clip_grad_norm_(optimizer, 1.0)
        guard.step(optimizer)
        skipped.append(guard.was_skipped(optimizer))
        if "update" in calls:
            guard.update()
    if "update" not in calls:
        guard.update()
    return skipped, guard.stats(), [kept(optimizer), cases.windows(guard)]


@pytest.mark.parametrize("how", WAYS)
@cases.NAMES
def test_loops_without_scale_and_update(two, name, how):
    whole, *others = (two.run(in_some_loop, name, how, calls) for calls in (["scale", "update"], ["scale"], []))
    assert [step for step, bad in enumerate(whole[0][0]) if bad] == [4, 6]
    assert whole[0] == whole[1]
    assert others == [whole, whole]


def in_a_bare_loop(rank: int, name: str, how: str, bad_step: int, scales: bool) -> tuple[list[str], list[Any]]:
    """In one step of a bare loop rank 1 cannot check its gradients, and all catch what is raised and go on."""
    guard, params, errors, stepped = new_scaler("guard"), [cases.plain_param(4)], [], []
    optimizer, loss = new_optimizer(name, params), torch.ones(())

    def step() -> None:
        if scales:
            guard.scale(loss)
        if how == "unscale_":
            guard.unscale_(optimizer)
        elif how == "clip":
            guard.clip_grad_norm_(optimizer, 1.0)
        guard.step(optimizer)

    for number in range(5):
        fails, before = (rank, number) == (1, bad_step), cases.digests(params)
        params[0].grad = torch.ones(1).expand(4) if fails else torch.ones(4)
        with cases.FirstOpFails() if fails and number == 0 else nullcontext():  # which makes the scale
            errors.append(said(step))
        stepped.append(cases.digests(params) != before)
    guard.update()
    return errors, [stepped, cases.windows(guard), guard.stats()]


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize("how", WAYS)
@cases.NAMES
def test_a_check_that_fails_ends_its_step_in_a_loop_without_update(two, name, how, bad_step, scales):
    (told, first), (failed, second) = two.run(in_a_bare_loop, name, how, bad_step, scales)
    is_bad = [step == bad_step for step in range(5)]
    assert [bool(error) for error in failed] == is_bad
    assert [error.startswith(TOLD) for error in told] == [bad and name == "adamw" for bad in is_bad]
    assert first == second == [[not bad for bad in is_bad], [[2.0] * WINDOW], ScalerStats(5, 1, 0, 0, 0, bad_step + 1)]


def together_and_apart(rank: int, name: str, backend: str) -> tuple[list[list[bool]], list[list[float]], Any]:
    """Two optimizers, clipped together in every second step: what was skipped, and the windows."""
    guard, params = new_scaler("guard", backend=backend), [cases.plain_param(4), cases.sharded_param()]
    optimizers, skipped = [new_optimizer(name, [param]) for param in params], []
    for step in range(12):
        for param, norm in zip(params, (3.0, 4.0), strict=True):
            elements = 4 if param is params[0] else 6 * dist.get_world_size()
            param.grad = cases.grad_like(param, norm / math.sqrt(elements))
        cases.plant([Fault(8, 1, 0, SPIKE)], rank, step, [params[1]])
        cases.plant([Fault(9, 0, 0, SPIKE)], rank, step, [params[1]])
        if step % 2 == 0:
            guard.clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            guard.step(optimizer)
        skipped.append([guard.was_skipped(optimizer) for optimizer in optimizers])
    guard.update()
    return skipped, cases.windows(guard), guard.stats()


@BACKENDS
@cases.NAMES
def test_optimizers_that_are_clipped_together_share_a_window_and_a_skip(two, name, backend):
    """Of a joint clip the norm enters the first one's window, and a spike of either skips both."""
    skips = {8: [True, True], 9: [False, True]}
    for skipped, (first, second), stats in two.run(together_and_apart, name, backend):
        assert skipped == [skips.get(step, [False, False]) for step in range(12)]
        assert [round(norm) for norm in first] == [SPIKE, 3, 5, 3]
        assert [round(norm) for norm in second] == [4, 4, SPIKE, 4]
        assert (stats.updates, stats.skipped, stats.spikes) == (12, 2, 2)


def checked_before_a_joint_clip(rank: int) -> list[list[float]]:
    """A framework has the second optimizer checked before both are clipped, then both, too; the windows after that."""
    guard, params = new_scaler("guard"), [cases.plain_param(1), cases.plain_param(1)]
    optimizers = [new_optimizer("sgd", [param]) for param in params]
    for step in range(4):
        for param, norm in zip(params, (3.0, 4.0), strict=True):
            param.grad = cases.grad_like(param, norm * 2**step)
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
    for param, value in zip(params, (1.0, 4.0), strict=True):
        param.grad = cases.grad_like(param, value)
    if rank == 1:
        params[0].grad = torch.ones(1).expand(4)
    for optimizer in optimizers:
        if clip:
            said(guard.clip_grad_norm_, optimizer, 1.0)
        said(guard.step, optimizer)
    guard.update()
    return cases.windows(guard)


@pytest.mark.parametrize("clip", [False, True])
def test_norms_of_a_checkpoint_find_their_optimizers_though_a_check_fails(two, clip):
    assert two.run(resumed, clip) == [[[2.0] * WINDOW, [8.0] * WINDOW]] * 2

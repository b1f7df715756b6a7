"""Differences 18 and 23 over ranks: steps after `update`, batches after a step that did not return, and new batches."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from ranks import cases
from ranks.cases import INIT_SCALE, LEARNING_RATE, Fault, collectives_of, new_optimizer, new_scaler

pytestmark = pytest.mark.distributed

WAYS = pytest.mark.parametrize(
    ("kind", "layout", "name"),
    # torch has no fused SGD on DTensors
    [("sharded", "plain", "sgd"), ("sharded", "plain", "sgd-fused"), ("grad", "dtensor", "sgd")],
    ids=lambda value: value,
)
GRADIENT = 8.0
NOBODY = -1


class Outcome(NamedTuple):
    """What one rank holds after the last step, and how many collectives that step made."""

    values: list[float]
    collectives: int
    scale: float


def outcome(scaler: Any, optimizer: Any, param: Tensor) -> Outcome:
    """Step and update."""
    count = collectives_of(scaler.step, optimizer)
    scaler.update()
    return Outcome(cases.numbers(param), count, scaler.get_scale())


def stepped(*scales: float) -> list[float]:
    """What becomes of a parameter of ones by gradients that each scale divides once."""
    return [1.0 - sum(LEARNING_RATE * GRADIENT / scale for scale in scales)] * 6


def _param(layout: str) -> Tensor:
    return cases.sharded_param() if layout == "dtensor" else cases.plain_param(2, 3)


def _begin(scaler: Any, *params: Tensor, without: bool = False) -> None:
    """Scale a loss, and give each parameter a gradient as it stands after backward."""
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = None if without else cases.grad_like(param, GRADIENT)


# Difference 18: `update` between unscale_ and step.


def postponed_step(rank: int, kind: str, layout: str, name: str, faults: Sequence[Fault], gradless: int) -> Outcome:
    """Unscale `late`, step the other optimizer, update, and only then step `late`, whose parameters start at 1."""
    scaler, late, early = new_scaler(kind), _param(layout), _param(layout)
    optimizers = [new_optimizer(name, [late]), new_optimizer("sgd", [early])]
    _begin(scaler, late, early)
    if rank == gradless:
        late.grad = None
    cases.plant(faults, rank, 0, [late])
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[1])
    scaler.update()
    return outcome(scaler, optimizers[0], late)


@WAYS
@pytest.mark.parametrize(("faults", "gradless"), [([], NOBODY), ([], 1), ([Fault(0, 1)], NOBODY)])
def test_postponed_step_divides_once_on_every_rank(two, kind, layout, name, faults, gradless):
    outcomes = two.run(postponed_step, kind, layout, name, faults, gradless)
    for rank, each in enumerate(outcomes):  # one rank's overflow skips it everywhere
        assert each.values == ([1.0] * 6 if faults or rank == gradless else stepped(INIT_SCALE))
    assert len({each[1:] for each in outcomes}) == 1  # collectives and scale


def skipped_by_hand(rank: int, kind: str, layout: str, name: str, gradless: int) -> Outcome:
    """All ranks overflow and go on without a step; one of them never has gradients."""
    scaler, param = new_scaler(kind), _param(layout)
    optimizer = new_optimizer(name, [param])
    _begin(scaler, param, without=rank == gradless)
    if rank != gradless:
        cases.values_of(param.grad).fill_(math.inf)
    scaler.unscale_(optimizer)
    scaler.update()
    _begin(scaler, param, without=rank == gradless)
    return outcome(scaler, optimizer, param)


@WAYS
def test_a_rank_that_never_has_gradients_does_not_repeat_an_old_overflow(two, kind, layout, name):
    first, second = two.run(skipped_by_hand, kind, layout, name, 1)
    assert first == (stepped(INIT_SCALE / 2), 1, INIT_SCALE / 2)
    assert second == ([1.0] * 6, 1, INIT_SCALE / 2)


def failed_clip(rank: int, sparse_first: bool, norm_type: float) -> Outcome:
    """Rank 1 cannot clip one of two optimizers; the step of the other, with a sparse gradient, comes after `update`."""
    scaler, sparse, cut = new_scaler("grad"), cases.plain_param(3), cases.sharded_param()
    optimizers = [new_optimizer("sgd", [sparse]), new_optimizer("sgd", [cut])]
    _begin(scaler, cut)
    sparse.grad = torch.sparse_coo_tensor([[0, 0, 1]], [GRADIENT] * 3, (3,), check_invariants=True)
    if rank == 1:
        cut.grad = cases.placed(torch.ones(1).expand(2, 3), Shard(0))
    with suppress(RuntimeError) if rank == 1 else nullcontext():  # its gradient is one element, expanded
        scaler.clip_grad_norm_(optimizers if sparse_first else optimizers[::-1], 1.0, norm_type)
    scaler.update()
    return outcome(scaler, optimizers[0], sparse)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("sparse_first", [False, True])
def test_after_a_clip_that_failed_on_one_rank_the_late_step_is_skipped_everywhere(two, sparse_first, norm_type):
    first, second = two.run(failed_clip, sparse_first, norm_type)
    assert first == second
    assert first.values == [1.0] * 3


# Difference 23: a step that did not return.


def step_that_failed(rank: int, kind: str, layout: str, name: str, gradless: int) -> Outcome:
    """Rank 1 runs out of memory in a step, and so has no update: it goes on with the next batch, as the others do."""
    scaler, param = new_scaler(kind), _param(layout)
    scaler.set_growth_interval(100)  # their trackers part
    optimizer = new_optimizer(name, [param])
    _begin(scaler, param, without=rank == gradless)
    with _no_memory(optimizer) if rank == 1 else nullcontext():
        scaler.step(optimizer)
        scaler.update()
    _begin(scaler, param, without=rank == gradless)
    return outcome(scaler, optimizer, param)


@contextmanager
def _no_memory(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    with suppress(torch.OutOfMemoryError), patch.object(optimizer, "step", side_effect=torch.OutOfMemoryError):
        yield


@WAYS
@pytest.mark.parametrize("gradless", [NOBODY, 0, 1])
def test_23_a_rank_whose_step_failed_joins_the_reduction_of_the_next_batch(two, kind, layout, name, gradless):
    first, second = two.run(step_that_failed, kind, layout, name, gradless)
    assert first.values == ([1.0] * 6 if gradless == 0 else stepped(INIT_SCALE, INIT_SCALE))
    assert second.values == ([1.0] * 6 if gradless == 1 else stepped(INIT_SCALE))
    assert first[1:] == second[1:] == (1, INIT_SCALE)


# A new batch in the tensors of the last one.


def refilled(rank: int, kind: str, layout: str, name: str, how: str) -> Outcome:
    """One iteration unscales and does not step; in the next a collective writes new gradients into the kept tensors.

    Rank 0 has no loss of its own, as a pipeline's inner stage: it scales a zero.
    """
    scaler, param = new_scaler(kind), _param(layout)
    optimizer = new_optimizer(name, [param])
    _begin(scaler, param)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(torch.zeros(()) if rank == 0 else torch.ones(()))
    kept = cases.values_of(param.grad)
    kept.data.fill_(GRADIENT / 2 if how == "all_reduce" else GRADIENT * (1 - rank))
    if how == "broadcast":
        dist.broadcast(kept, src=0)
    elif how == "all_reduce":
        dist.all_reduce(kept)
    else:  # from one rank to the other, as between a pipeline's stages
        dist.send(kept, 1) if rank == 0 else dist.recv(kept, 0)
    return outcome(scaler, optimizer, param)


@WAYS
@pytest.mark.parametrize("how", ["broadcast", "all_reduce", "send"])
@pytest.mark.skipif(cases.GLOO_ON_GPU, reason="gloo sends no GPU's tensors from rank to rank")
def test_gradients_that_collectives_refill_are_divided_on_every_rank(two, kind, layout, name, how):
    first, second = two.run(refilled, kind, layout, name, how)
    assert first == second
    assert first == (stepped(INIT_SCALE), 1, INIT_SCALE * 2)

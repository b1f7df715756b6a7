"""A rank that raises or is cut off: the others get torch's error in time, and nothing of theirs is touched."""

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from rank_pool import RankPool, RankResult, limit_collectives
from torch import Tensor

from ranks import cases
from ranks.cases import INIT_SCALE, new_optimizer, new_scaler, plain_param

pytestmark = pytest.mark.distributed

LIMIT = 0.5  # Seconds that a collective may take here before torch gives up.
LATE = 3.0  # Seconds that a busy machine may add to that.
# What gloo and NCCL say, in every version: their own words, not ours.
TORCHS_ERROR = re.compile(
    r"^(RuntimeError|DistBackendError|DistNetworkError): .*(gloo|NCCL|imed out|timeout|closed|reset)", re.S
)


class Variant(NamedTuple):
    """A scaler and an optimizer, and how they are used first."""

    kind: str
    name: str
    method: str


VARIANTS = [
    Variant("sharded", "adamw", "step"),
    Variant("sharded", "adamw", "unscale_"),
    Variant("sharded", "adamw-fused", "step"),
    Variant("grad", "sgd", "step"),
    Variant("grad", "adamw-fused", "unscale_"),
]
EACH = pytest.mark.parametrize("variant", VARIANTS, ids="-".join)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own: these tests break them."""
    # Without that variable NCCL's watchdog ends the process instead of raising.
    with mock.patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT="1"), RankPool(2, group_timeout=10.0) as opened:
        yield opened


def run(pool: RankPool, case: Callable[..., Any], *args: Any) -> list[RankResult]:
    return pool.run(cases.strictly, case, args, {})


class Outcome(NamedTuple):
    """One call of one rank: what it raised and how long it took, and what is left."""

    error: str
    seconds: float
    stage: str
    params_changed: bool
    scale: float
    tracker: int
    flags: list[float]
    lends: bool  # whether scale or flag is left behind on the optimizer


SKIPS = (False, INIT_SCALE, 1, [1.0], False)  # of a step that is to be skipped, all but the first three


def assert_untouched(failed: Outcome, again: Outcome) -> None:
    """Assert torch's own error in time, and parameters, scale and tracker as they were; and that a step then skips."""
    assert TORCHS_ERROR.match(failed.error), failed.error
    assert failed.seconds < LIMIT + LATE
    assert (failed.stage, again.error) == ("UNSCALED", "")
    assert failed[3:] == again[3:] == SKIPS


def _set_up(variant: Variant, group: Any = None) -> tuple[Any, Any]:
    """Return a scaler over `group` and an optimizer that has taken one good step, with gradients for the next one."""
    scaler = new_scaler(variant.kind, process_group=group or dist.group.WORLD)
    params = [plain_param(3), plain_param(2, 2)]
    optimizer = new_optimizer(variant.name, params)
    cases.give_grads(scaler, params, 0)
    scaler.step(optimizer)
    scaler.update()
    cases.give_grads(scaler, params, 1)
    return scaler, optimizer


def _attempt(scaler: Any, method: str, optimizer: Any) -> Outcome:
    """Call a method of the scaler with the optimizer and look at what is left."""
    params = cases.params_of(optimizer)
    before, start = cases.digests(params), time.monotonic()
    error = cases.said(getattr(scaler, method), optimizer)
    seconds = time.monotonic() - start
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = [flag.item() for flag in state["found_inf_per_device"].values()]
    lends = hasattr(optimizer, "found_inf") or hasattr(optimizer, "grad_scale")
    numbers = scaler.get_scale(), int(scaler._growth_tracker), flags, lends
    return Outcome(error, seconds, state["stage"].name, cases.digests(params) != before, *numbers)


# A rank raises between scale and step.


def raises_between(rank: int, variant: Variant) -> list[Outcome]:
    """Rank 1 raises once it has scaled; the other steps alone: in a failed step, and once more."""
    dist.barrier()
    group = dist.new_group()
    scaler, optimizer = _set_up(variant, group)
    limit_collectives(LIMIT, group)  # now that they have met: busy machines are late for a first meeting
    outcomes: list[Outcome] = []
    if rank == 0:  # the other lives on, writing a log, say
        outcomes = [_attempt(scaler, method, optimizer) for method in (variant.method, "step")]
    dist.barrier()  # of the default group, which nothing has happened to
    return outcomes


@EACH
def test_a_rank_raises_between_scale_and_step(pool, variant):
    alone, other = run(pool, raises_between, variant)
    assert (alone.error, other.error, other.value) == (None, None, [])
    assert_untouched(*alone.value)


# The reduction fails half-way.


def fails_half_way(rank: int, variant: Variant, garbage: float) -> list[Outcome]:
    """The reduction raises on all ranks, having written garbage; then the step, an update and a good step."""
    scaler, optimizer = _set_up(variant)
    reduce = dist.all_reduce

    def failing(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        reduce(tensor, *args, **kwargs)
        tensor.fill_(garbage)
        raise ConnectionError("link lost")

    with mock.patch.object(dist, "all_reduce", failing):
        outcomes = [_attempt(scaler, variant.method, optimizer)]
    outcomes.append(_attempt(scaler, "step", optimizer))
    scaler.update()
    cases.give_grads(scaler, cases.params_of(optimizer), 2)
    return [*outcomes, _attempt(scaler, "step", optimizer)]


@EACH
@pytest.mark.parametrize("garbage", [0.0, 1.0, float("nan"), float("inf"), 1e-30])
def test_the_reduction_fails_half_way(pool, variant, garbage):
    """Whatever it left in the tensor: every rank skips and backs off alike, and the next step is right."""
    for result in run(pool, fails_half_way, variant, garbage):
        assert result.ok, result.traceback
        failed, again, good = result.value
        assert (failed.error, failed.stage, again.error) == ("ConnectionError: link lost", "UNSCALED", "")
        assert failed[3:] == again[3:] == SKIPS
        assert (good.error, good[3:]) == ("", (True, INIT_SCALE / 2, 0, [0.0], False))

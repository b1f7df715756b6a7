"""A rank that raises, dies or is cut off: the others get torch's error in time, and nothing of theirs is touched."""

import os
import re
import signal
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
    """A scaler and an optimizer, and how they are used."""

    kind: str
    name: str
    unscale: bool

    def call(self, scaler: Any) -> Callable[[Any], Any]:
        """What this variant calls first."""
        return scaler.unscale_ if self.unscale else scaler.step


VARIANTS = [
    Variant("sharded", "adamw", False),
    Variant("sharded", "adamw", True),
    Variant("sharded", "adamw-fused", False),
    Variant("grad", "sgd", False),
    Variant("grad", "adamw-fused", True),
]
EACH = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))


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
    params_changed: bool
    stage: str
    left: tuple[Any, ...]  # scale, tracker, flags, whether scale or flag is left behind on the optimizer


def assert_untouched(outcome: Outcome) -> None:
    """Assert torch's own error in time, and parameters, scale and tracker as they were; the step is to be skipped."""
    assert TORCHS_ERROR.match(outcome.error), outcome.error
    assert outcome.seconds < LIMIT + LATE
    assert outcome.stage == "UNSCALED"
    assert_skips(outcome)


def assert_skips(*outcomes: Outcome) -> None:
    for outcome in outcomes:
        assert (outcome.params_changed, outcome.left) == (False, (INIT_SCALE, 1, (1.0,), False))


def _set_up(variant: Variant, group: Any = None) -> tuple[Any, Any]:
    """Return a scaler over `group` and an optimizer that has taken one good step."""
    scaler = new_scaler(variant.kind, process_group=group or dist.group.WORLD)
    optimizer = new_optimizer(variant.name, [plain_param(3), plain_param(2, 2)])
    _give(scaler, optimizer, 0)
    scaler.step(optimizer)
    scaler.update()
    return scaler, optimizer


def _give(scaler: Any, optimizer: Any, step: int) -> None:
    cases.give_grads(scaler, cases.params_of(optimizer), step)


def _attempt(call: Callable[[Any], Any], scaler: Any, optimizer: Any) -> Outcome:
    """Call a method of the scaler with the optimizer and look at what is left."""
    params = cases.params_of(optimizer)
    before, start = cases.digests(params), time.monotonic()
    error = cases.said(call, optimizer)
    seconds = time.monotonic() - start
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = tuple(flag.item() for flag in state["found_inf_per_device"].values())
    lent = hasattr(optimizer, "found_inf") or hasattr(optimizer, "grad_scale")
    left = scaler.get_scale(), int(scaler._growth_tracker), flags, lent
    return Outcome(error, seconds, cases.digests(params) != before, state["stage"].name, left)


# A rank raises between scale and step.


def raises_between(rank: int, variant: Variant) -> list[Outcome]:
    """Rank 1 raises once it has scaled; the other steps alone: in a failed step, and once more."""
    dist.barrier()
    group = dist.new_group()
    scaler, optimizer = _set_up(variant, group)
    limit_collectives(LIMIT, group)  # now that they have met: busy machines are late for a first meeting
    _give(scaler, optimizer, 1)
    outcomes: list[Outcome] = []
    if rank == 0:  # the other lives on, writing a log, say
        outcomes = [_attempt(call, scaler, optimizer) for call in (variant.call(scaler), scaler.step)]
    dist.barrier()  # of the default group, which nothing has happened to
    return outcomes


@EACH
def test_a_rank_raises_between_scale_and_step(pool, variant):
    alone, other = run(pool, raises_between, variant)
    assert (alone.error, other.error, other.value) == (None, None, [])
    failed, again = alone.value
    assert_untouched(failed)
    assert again.error == ""
    assert_skips(again)


# The reduction fails half-way.

GARBAGE = [0.0, 1.0, float("nan"), float("inf"), 1e-30]


def fails_half_way(rank: int, variant: Variant) -> list[list[Outcome]]:
    """The reduction raises on all ranks, having written garbage; then the step, an update and a good step."""
    return [_fails_half_way(variant, value) for value in GARBAGE]


def _fails_half_way(variant: Variant, value: float) -> list[Outcome]:
    scaler, optimizer = _set_up(variant)
    _give(scaler, optimizer, 1)
    reduce = dist.all_reduce

    def failing(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        reduce(tensor, *args, **kwargs)
        tensor.fill_(value)
        raise ConnectionError("link lost")

    with mock.patch.object(dist, "all_reduce", failing):
        outcomes = [_attempt(variant.call(scaler), scaler, optimizer)]
    outcomes.append(_attempt(scaler.step, scaler, optimizer))
    scaler.update()
    _give(scaler, optimizer, 2)
    return [*outcomes, _attempt(scaler.step, scaler, optimizer)]


@EACH
def test_the_reduction_fails_half_way(pool, variant):
    """Whatever it left in the tensor: every rank skips and backs off alike, and the next step is right."""
    for result in run(pool, fails_half_way, variant):
        assert result.ok, result.traceback
        for failed, again, good in result.value:
            assert (failed.error, failed.stage, again.error) == ("ConnectionError: link lost", "UNSCALED", "")
            assert_skips(failed, again)
            assert (good.error, good.params_changed, good.left) == ("", True, (INIT_SCALE / 2, 0, (0.0,), False))


# A rank is killed in the reduction.


def killed(rank: int, variant: Variant, on_its_way: bool) -> list[Outcome]:
    """Rank 1 dies before it joins the reduction, or with it on its way."""
    scaler, optimizer = _set_up(variant)
    limit_collectives(LIMIT)
    _give(scaler, optimizer, 1)
    reduce = dist.all_reduce

    def dying(*args: Any, **kwargs: Any) -> None:
        if on_its_way:
            reduce(*args, **kwargs, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        with mock.patch.object(dist, "all_reduce", dying):
            scaler.step(optimizer)
    return [_attempt(call, scaler, optimizer) for call in (variant.call(scaler), scaler.step)]


@pytest.mark.parametrize(("variant", "on_its_way"), [(VARIANTS[2], False), (VARIANTS[0], True)], ids=["before", "amid"])
def test_a_rank_dies_in_the_reduction(pool, variant, on_its_way):
    survivor, dead = run(pool, killed, variant, on_its_way)
    assert dead.error == "RankDied: exit code -9"
    failed, again = survivor.value
    if on_its_way and not failed.error:
        assert failed.params_changed  # all had been sent: the step was agreed
        assert failed.left[2] == (0.0,)
    else:
        assert_untouched(failed)
        assert again.error == ""
        assert_skips(again)

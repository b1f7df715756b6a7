"""Whichever op of a step runs out of memory on one rank, it makes as many reductions as ranks on which none does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import sgd, started
from scaler_triton.agreement import Agreement
from scaler_triton.clipping.at_once import AtOnceMixin
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import ShardedGradScaler, agreeing

MOST = 300  # ops of a step: that many are not made


class OutOfMemoryAt(TorchDispatchMode):
    """Fails one op, by its number; those inside of a reduction do not count."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.reductions, self.inside = number, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside:
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))

    def reduce(self, values: Tensor, op: Any) -> None:
        """Stand for a reduction over this rank and another like it."""
        self.reductions, self.inside = self.reductions + 1, True
        if op is torch.distributed.ReduceOp.SUM:
            values.mul_(2)
        self.inside = False


@pytest.fixture(autouse=True)
def two_pretended_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "sharded_agreement", lambda parameters, group: Agreement((None,), (0, 1)))


def each(method: str) -> Callable[[Any, list[Any]], None]:
    def call(scaler: Any, optimizers: list[Any]) -> None:
        for optimizer in optimizers:
            getattr(scaler, method)(optimizer)

    return call


WAYS: dict[str, Callable[[Any, list[Any]], object]] = {
    "unscale_": each("unscale_"),
    "step": each("step"),
    "check": each("_check_inf_per_device"),
    "clip": lambda scaler, optimizers: scaler.clip_grad_norm_(optimizers, 1.0),
    "defer": lambda scaler, optimizers: scaler.clip_grad_norm_(optimizers, 1.0, defer=True),
    "largest": lambda scaler, optimizers: scaler.clip_grad_norm_(optimizers, 1.0, math.inf),
    "some": lambda scaler, optimizers: scaler.clip_grad_norm_(
        optimizers, 1.0, parameters=optimizers[0].param_groups[0]["params"]
    ),
}


def reductions(way: str, number: int, *, postponed: bool) -> tuple[int, bool]:
    """Return how many reductions one optimizer's calls made, and whether the op of that number failed."""
    optimizer = sgd([torch.ones(5), torch.ones(3, 2)], fused=way == "defer")
    scaler = started(ShardedGradScaler, "cpu", init_scale=16.0)
    if postponed:
        with mock.patch.object(Agreement, "_reduce_"):
            scaler.unscale_(optimizer)
            scaler.update()
    mode, failed = OutOfMemoryAt(number), False
    with mock.patch.object(Agreement, "_reduce_", mode.reduce), mode:
        try:
            WAYS[way](scaler, [optimizer])
        except torch.OutOfMemoryError:
            failed = True
    return mode.reductions, failed


def numbers_and_reductions(way: str, *, postponed: bool) -> Iterator[int]:
    for number in range(MOST):
        made, failed = reductions(way, number, postponed=postponed)
        if not failed:
            return
        yield made
    raise AssertionError(f"more than {MOST} ops")


@pytest.mark.parametrize(("way", "postponed"), [*((way, False) for way in WAYS), ("step", True)])
def test_a_rank_that_runs_out_of_memory_reduces_as_often_as_others(way: str, postponed: bool) -> None:
    want, failed = reductions(way, MOST, postponed=postponed)
    assert want
    assert not failed
    made = [*numbers_and_reductions(way, postponed=postponed)]
    assert made
    assert set(made) == {want}, [number for number, count in enumerate(made) if count != want]


@pytest.mark.parametrize("twice", [False, True])
def test_a_wrong_call_reduces_nothing_on_a_rank_without_a_scale_either(twice: bool) -> None:
    optimizer = sgd([torch.ones(5)])
    for scaler in (ShardedGradScaler("cpu"), started(ShardedGradScaler, "cpu")):
        with mock.patch.object(Agreement, "_reduce_") as reduce, pytest.raises((AssertionError, ValueError)):
            scaler.clip_grad_norm_([optimizer] * 2 * twice, 1.0)
        reduce.assert_not_called()


def test_a_deferred_clip_that_fails_at_its_end_leaves_nothing_to_the_step() -> None:
    optimizer = sgd([torch.ones(5)], fused=True)
    scaler = started(ShardedGradScaler, "cpu", init_scale=16.0)
    at_its_end = mock.patch.object(AtOnceMixin, "_finish", side_effect=torch.OutOfMemoryError)
    with mock.patch.object(Agreement, "_reduce_"), at_its_end, pytest.raises(torch.OutOfMemoryError):
        scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_after_a_failure_the_flag_lies_where_the_parameters_do() -> None:
    """As an offloaded fused optimizer needs it, whose kernels read it on the host."""
    optimizer = sgd([torch.ones(5)], fused=True)
    scaler = started(ShardedGradScaler, "cpu")
    scaler._scale = torch.ones((), device="meta")
    state = scaler._state(optimizer)
    scaler._skip(state)
    assert [flag.item() for flag in state["found_inf_per_device"].values()] == [1.0]

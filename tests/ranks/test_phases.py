"""Differences 18 and 23 over ranks: steps after `update`, and batches after a step that did not return."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ranks import cases
from ranks.cases import INIT_SCALE, LEARNING_RATE, Fault, collectives_of, new_optimizer, new_scaler
from scaler_triton import StepGuard

pytestmark = pytest.mark.distributed

WAYS = pytest.mark.parametrize(
    ("kind", "layout", "name"),
    # torch has no fused SGD on DTensors
    [("sharded", "plain", "sgd"), ("sharded", "plain", "sgd-fused"), ("grad", "dtensor", "sgd")],
    ids=lambda value: value,
)
GRADIENT = 8.0
NOBODY = -1


def outcome(scaler: Any, optimizer: Any, param: Tensor) -> tuple[list[float], int, float]:
    """Step and update; what this rank then holds of a parameter, how many collectives that took, and the scale."""
    count = collectives_of(scaler.step, optimizer)
    scaler.update()
    return cases.numbers(param), count, scaler.get_scale()


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


def postponed_step(rank: int, kind: str, layout: str, name: str, faults: Sequence[Fault], gradless: int) -> Any:
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
    for rank, (values, *rest) in enumerate(outcomes):  # one rank's overflow skips it everywhere
        assert values == ([1.0] * 6 if faults or rank == gradless else stepped(INIT_SCALE))
        assert rest == [*outcomes[0][1:]]


# Difference 23: a step that did not return.


def step_that_failed(rank: int, kind: str, layout: str, name: str, gradless: int) -> Any:
    """Rank 1 runs out of memory in a step, and so has no update: it goes on with the next batch, as the others do."""
    scaler, param = new_scaler(kind, growth_interval=100), _param(layout)  # their trackers part
    optimizer = new_optimizer(name, [param])
    _begin(scaler, param, without=rank == gradless)
    if rank == 1:
        with patch.object(optimizer, "step", side_effect=MemoryError), pytest.raises(MemoryError):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()
    _begin(scaler, param, without=rank == gradless)
    return outcome(scaler, optimizer, param)


@WAYS
@pytest.mark.parametrize("gradless", [NOBODY, 0, 1])
def test_23_a_rank_whose_step_failed_joins_the_reduction_of_the_next_batch(two, kind, layout, name, gradless):
    first, second = two.run(step_that_failed, kind, layout, name, gradless)
    assert first == ([1.0] * 6 if gradless == 0 else stepped(INIT_SCALE, INIT_SCALE), 1, INIT_SCALE)
    assert second == ([1.0] * 6 if gradless == 1 else stepped(INIT_SCALE), 1, INIT_SCALE)


def check_that_failed(rank: int, how: str, kind: str) -> list[float]:
    """Rank 1 cannot check a batch, which all drop: they go on with the next one, without an update but for a guard."""
    scaler: Any = StepGuard("cpu") if kind == "guard" else new_scaler(kind)
    params, drops = [cases.plain_param(4) for _ in range(2)], how.startswith("drop")
    optimizers = [new_optimizer("sgd", [param]) for param in params]
    calls: dict[str, Any] = {
        "unscale_": lambda: scaler.unscale_(optimizers[0]),
        "clip": lambda: scaler.clip_grad_norm_(optimizers[0], 100.0),
        "parameters": lambda: scaler.clip_grad_norm_(optimizers[0], 100.0, parameters=params[:1]),
        "together": lambda: scaler.clip_grad_norm_(optimizers, 100.0),
        "only here": lambda: batch == 1 and scaler.unscale_(optimizers[0]),
        "step": lambda: batch == 1 and [cases.said(scaler.step, optimizers[0]), scaler.unscale_(optimizers[0])],
    }
    for batch in range(3):
        _begin(scaler, *params)
        if (rank, batch) == (1, 1):
            params[0].grad = torch.ones(1).expand(4)
        with suppress(RuntimeError):
            calls["unscale_" if drops and batch == 1 else how.removeprefix("drop, ")]()
            if drops and batch == 1:
                continue
            for optimizer in optimizers if how == "together" else optimizers[:1]:
                scaler.step(optimizer)
            if kind != "guard":
                scaler.update()
        if kind == "guard" and not drops:  # as docs/guard.md asks of loops that drop a batch
            scaler.update()
    return [each for param in params for each in cases.numbers(param)]


@pytest.mark.parametrize(
    "how", ["unscale_", "clip", "parameters", "together", "only here", "drop, unscale_", "drop, parameters", "step"]
)
@pytest.mark.parametrize("kind", ["sharded", "guard"])
def test_a_rank_whose_check_failed_joins_those_of_the_next_batch(two, how, kind):
    first, second = two.run(check_that_failed, how, kind)
    assert first == second
    steps = 1 if (kind, how) == ("guard", "drop, parameters") else 2
    assert first[0] == 1.0 - steps * LEARNING_RATE * GRADIENT / (1.0 if kind == "guard" else INIT_SCALE)

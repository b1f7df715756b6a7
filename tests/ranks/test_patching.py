"""`patch_torch(strict=True)`: on FSDP1 a plain GradScaler is refused, before it has touched or sent anything."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler

from ranks import cases
from ranks.cases import METHODS, NAMES, Attempt, attempt
from ranks.models import WIDTH, WRAPPERS, Net
from scaler_triton import GradScaler, patch_torch

pytestmark = pytest.mark.distributed

FSDP1 = "fsdp1-full-flat"  # so that every rank has a gradient to look at
ONE_WEIGHT = "fsdp1 of one weight"  # all of which rank 0 has


class Tried(NamedTuple):
    """What one call came to, the warnings it gave, as files and texts, and how many elements this rank has."""

    attempt: Attempt
    warned: list[tuple[str, str]]
    held: int


def first_use(rank: int, wrapper: str, kind: str, name: str, method: str, *, strict: bool) -> Tried:
    """Build a scaler by torch's name, and call one method of it after a backward pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch's gradient scalers were taken", category=UserWarning)
        context = patch_torch(strict=strict)
    with context:
        if kind == "sharded":
            scaler = sharded_grad_scaler.ShardedGradScaler(cases.DEVICE)
        else:
            scaler = torch.amp.GradScaler(
                cases.DEVICE, **{"process_group": dist.group.WORLD} if kind == "world" else {}
            )
        optimizer = _after_backward(wrapper, name, scaler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tried = attempt(scaler, method, optimizer)
    warned = [(w.filename, str(w.message)) for w in caught if "GradScaler" in str(w.message)]
    return Tried(tried, warned, sum(param.numel() for param in cases.params_of(optimizer)))


def _after_backward(wrapper: str, name: str, scaler: Any) -> torch.optim.Optimizer:
    inputs = torch.ones(2, 1 if wrapper == ONE_WEIGHT else WIDTH)
    net = nn.Linear(1, 1, bias=False) if wrapper == ONE_WEIGHT else Net()
    model = WRAPPERS["fsdp1-full" if wrapper == ONE_WEIGHT else wrapper](net)
    optimizer = cases.new_optimizer(name, model.parameters())
    scaler.scale(model(inputs).sum()).backward()
    return optimizer


def strict_after_the_first_warning(rank: int, wrapper: str) -> list[str | None]:
    """Use one scaler on two FSDP1 models: warned about the first, it is to refuse the second."""
    scaler, errors = GradScaler(cases.DEVICE), []
    for strict in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with patch_torch(strict=strict):
                errors.append(attempt(scaler, "unscale_", _after_backward(wrapper, "adamw", scaler)).error)
    return errors


@METHODS
@NAMES
@pytest.mark.parametrize("wrapper", [FSDP1, ONE_WEIGHT])
def test_strict_refuses_a_plain_scaler_naming_the_fix(two, wrapper, name, method):
    """All refuse together, even a rank whose shard is empty: FSDP1 is told by the parameters."""
    results = two.run(first_use, wrapper, "grad", name, method, strict=True)
    assert wrapper != ONE_WEIGHT or [tried.held for tried in results] == [1, 0]
    for (error, collectives, *changed, stage), warned, _ in results:
        assert error.startswith("RuntimeError: GradScaler cannot tell which ranks share")
        assert "ShardedGradScaler" in error
        assert "process_group" in error
        assert (collectives, changed, stage, warned) == (0, [False, False], "READY", [])


@METHODS
@NAMES
def test_otherwise_it_warns_at_the_line_that_called_the_scaler(two, name, method):
    for tried in two.run(first_use, FSDP1, "grad", name, method, strict=False):
        assert tried.attempt.error is None
        ((file, text),) = tried.warned
        assert "ShardedGradScaler" in text
        assert file == cases.__file__  # which counts collectives around the call


@pytest.mark.parametrize(
    ("wrapper", "kind"), [(FSDP1, "sharded"), (FSDP1, "world"), ("ddp", "grad"), ("fsdp2", "grad")]
)
def test_strict_takes_scalers_that_know_their_ranks_and_a_plain_one_elsewhere(two, wrapper, kind):
    for tried in two.run(first_use, wrapper, kind, "adamw", "step", strict=True):
        assert (tried.attempt.error, tried.warned) == (None, [])
        assert tried.attempt.params_changed


def test_strict_refuses_also_what_was_warned_about_before(two):
    for first, second in two.run(strict_after_the_first_warning, FSDP1):
        assert first is None
        assert second.startswith("RuntimeError: GradScaler cannot tell")

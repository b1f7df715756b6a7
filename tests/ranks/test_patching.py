"""`patch_torch(strict=True)`: on FSDP1 a plain GradScaler is refused, before it has touched or sent anything."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import sharded_grad_scaler

from ranks import cases
from ranks.cases import METHODS, NAMES, Attempt, attempt
from ranks.models import WIDTH, WRAPPERS, Net
from scaler_triton import GradScaler, patch_torch

pytestmark = pytest.mark.distributed

FSDP1 = "fsdp1-full-flat"  # so that every rank has a gradient to look at


@dataclass(frozen=True)
class Tried:
    """What one call came to, and the warnings it gave, as files and texts."""

    attempt: Attempt
    warned: list[tuple[str, str]]


def first_use(rank: int, wrapper: str, kind: str, name: str, method: str, *, strict: bool) -> Tried:
    """Build a scaler by torch's name, and call one method of it after a backward pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch's gradient scalers were taken", category=UserWarning)
        context = patch_torch(strict=strict)
    with context:
        scaler = _scaler(kind)
        optimizer = _after_backward(wrapper, name, scaler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tried = attempt(scaler, method, optimizer)
    return Tried(tried, [(w.filename, str(w.message)) for w in caught if "GradScaler" in str(w.message)])


def an_empty_shard(rank: int, method: str) -> tuple[int, Attempt]:
    """Use a plain scaler on an FSDP1 model of one weight, all of which rank 0 has; how much of it this one has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with patch_torch(strict=True):
            scaler = torch.amp.GradScaler(cases.DEVICE)
            model = WRAPPERS["fsdp1-full"](torch.nn.Linear(1, 1, bias=False))
            optimizer = cases.new_optimizer("adamw", model.parameters())
            scaler.scale(model(torch.ones(2, 1)).sum()).backward()
            return sum(p.numel() for p in model.parameters()), attempt(scaler, method, optimizer)


def strict_after_the_first_warning(rank: int, wrapper: str) -> list[str | None]:
    """Use one scaler on two FSDP1 models: warned about the first, it is to refuse the second."""
    scaler, errors = GradScaler(cases.DEVICE), []
    for strict in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with patch_torch(strict=strict):
                errors.append(attempt(scaler, "unscale_", _after_backward(wrapper, "adamw", scaler)).error)
    return errors


def _scaler(kind: str) -> Any:
    if kind == "sharded":
        return sharded_grad_scaler.ShardedGradScaler(cases.DEVICE)
    return torch.amp.GradScaler(cases.DEVICE, **({"process_group": dist.group.WORLD} if kind == "world" else {}))


def _after_backward(wrapper: str, name: str, scaler: Any) -> torch.optim.Optimizer:
    model = WRAPPERS[wrapper](Net())
    optimizer = cases.new_optimizer(name, model.parameters())
    scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    return optimizer


@METHODS
@NAMES
def test_strict_refuses_a_plain_scaler_naming_the_fix(two, name, method):
    for tried in two.run(first_use, FSDP1, "grad", name, method, strict=True):
        assert tried.attempt.error.startswith("RuntimeError: GradScaler cannot tell which ranks share")
        assert "ShardedGradScaler" in tried.attempt.error
        assert "process_group" in tried.attempt.error
        assert tried.attempt.stage == "READY"
        assert not tried.attempt.grads_changed
        assert not tried.attempt.params_changed
        assert tried.attempt.collectives == 0
        assert tried.warned == []


@METHODS
@NAMES
def test_otherwise_it_warns_at_the_line_that_called_the_scaler(two, name, method):
    for tried in two.run(first_use, FSDP1, "grad", name, method, strict=False):
        assert tried.attempt.error is None
        ((file, text),) = tried.warned
        assert "ShardedGradScaler" in text
        assert file == cases.__file__  # which counts collectives around the call


@pytest.mark.parametrize("kind", ["sharded", "world"])
def test_strict_takes_scalers_that_know_their_ranks(two, kind):
    for tried in two.run(first_use, FSDP1, kind, "adamw", "step", strict=True):
        assert (tried.attempt.error, tried.warned) == (None, [])
        assert tried.attempt.params_changed


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_strict_takes_a_plain_scaler_elsewhere(two, wrapper):
    for tried in two.run(first_use, wrapper, "grad", "adamw", "step", strict=True):
        assert (tried.attempt.error, tried.warned) == (None, [])
        assert tried.attempt.params_changed


def test_strict_refuses_also_what_was_warned_about_before(two):
    for first, second in two.run(strict_after_the_first_warning, FSDP1):
        assert first is None
        assert second.startswith("RuntimeError: GradScaler cannot tell")


@METHODS
def test_strict_refuses_also_where_a_rank_has_an_empty_shard(two, method):
    """That one has no gradient, but all refuse together: FSDP1 is told by the parameters."""
    results = two.run(an_empty_shard, method)
    assert [held for held, _ in results] == [1, 0]
    for _, tried in results:
        assert tried.error.startswith("RuntimeError: GradScaler cannot tell which ranks share")
        assert tried.collectives == 0
        assert tried.stage == "READY"

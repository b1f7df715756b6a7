"""What the ranks run for the tests of `patch_torch`: scalers built by torch's names on wrapped models."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import cases
import torch
import torch.distributed as dist
from failure_cases import Attempt, attempt
from model_cases import WIDTH, WRAPPERS, Net
from torch.distributed.fsdp import sharded_grad_scaler

from scaler_triton import patch_torch


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
            model = WRAPPERS["fsdp1-full"](torch.nn.Linear(1, 1, bias=False), False)
            optimizer = cases.new_optimizer("adamw", model.parameters())
            scaler.scale(model(torch.ones(2, 1)).sum()).backward()
            return sum(p.numel() for p in model.parameters()), attempt(scaler, method, optimizer)


def strict_after_the_first_warning(rank: int, wrapper: str) -> list[str | None]:
    """Use one scaler on two FSDP1 models: warned about the first, it is to refuse the second."""
    from scaler_triton import GradScaler

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
    model = WRAPPERS[wrapper](Net(), False)
    optimizer = cases.new_optimizer(name, model.parameters())
    scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    return optimizer

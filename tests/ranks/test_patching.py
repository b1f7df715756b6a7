"""`patch_torch(strict=True)`: on FSDP1 a plain GradScaler is refused, before it has touched or sent anything."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ranks.cases import CollectiveCounter
from scaler_triton import patch_torch

pytestmark = pytest.mark.distributed

REFUSED = "RuntimeError: GradScaler cannot tell which ranks share"
WRAPPERS = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.ones(()).device, use_orig_params=True),
    "fsdp2": fully_shard,
}


class Used(NamedTuple):
    """What one call of a scaler did."""

    error: str
    warned: list[str]  # the files that warnings of the scaler point to
    grads_changed: bool
    params_changed: bool
    collectives: int
    numel: int  # of the parameters on this rank


def use(scaler: Any, method: str, *, wrapper: str = "fsdp1", width: int = 8, fused: bool = False) -> Used:
    """Call a method of a scaler after a backward pass."""
    model = WRAPPERS[wrapper](nn.Linear(width, width, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler.scale(model(torch.ones(2, width)).sum()).backward()
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    before = [tensor.detach().clone() for tensor in (*grads, *params)]
    error = ""
    with CollectiveCounter() as counter, warnings.catch_warnings(record=True, action="always") as caught:
        try:
            getattr(scaler, method)(optimizer)
        except RuntimeError as raised:
            error = f"RuntimeError: {raised}"
    changed = [not torch.equal(a, b) for a, b in zip(before, (*grads, *params), strict=True)]
    warned = [warning.filename for warning in caught if "ShardedGradScaler" in str(warning.message)]
    numel = sum(param.numel() for param in params)
    return Used(error, warned, any(changed[: len(grads)]), any(changed[len(grads) :]), counter.count, numel)


def patched(rank: int, strict: bool, kind: str, method: str, options: dict[str, Any]) -> Used:
    """Build a scaler by torch's name, and use it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch's gradient scalers were taken")
        context = patch_torch(strict=strict)
    device = torch.ones(()).device.type
    with context:
        if kind == "sharded":
            return use(dist.fsdp.sharded_grad_scaler.ShardedGradScaler(device), method, **options)
        group = {"process_group": dist.group.WORLD} if kind == "world" else {}
        return use(torch.amp.GradScaler(device, **group), method, **options)


def warned_then_strict(rank: int) -> list[str]:
    """Use one scaler on two FSDP1 models: warned about the first, it must refuse the second."""
    errors = []
    with warnings.catch_warnings(action="ignore"):
        with patch_torch():
            scaler = torch.amp.GradScaler(torch.ones(()).device.type)
            errors.append(use(scaler, "unscale_").error)
        with patch_torch(strict=True):
            errors.append(use(scaler, "unscale_").error)
    return errors


@pytest.mark.parametrize("method", ["unscale_", "step"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("width", [8, 1])  # of 1 x 1 weights rank 1 has an empty shard
def test_strict_refuses_a_plain_scaler_naming_the_fix(two: Any, method: str, fused: bool, width: int) -> None:
    results = two.run(patched, True, "grad", method, {"fused": fused, "width": width})
    assert [used.numel for used in results] == ([1, 0] if width == 1 else [32, 32])
    for used in results:
        assert used.error.startswith(REFUSED)
        assert "ShardedGradScaler" in used.error
        assert "process_group" in used.error
        assert used[1:5] == ([], False, False, 0)


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_otherwise_it_warns_at_the_line_that_called_the_scaler(two: Any, method: str) -> None:
    for used in two.run(patched, False, "grad", method, {}):
        assert (used.error, used.warned) == ("", [__file__])


@pytest.mark.parametrize(
    ("kind", "wrapper"), [("sharded", "fsdp1"), ("world", "fsdp1"), ("grad", "ddp"), ("grad", "fsdp2")]
)
def test_strict_takes_every_scaler_that_knows_its_ranks(two: Any, kind: str, wrapper: str) -> None:
    for used in two.run(patched, True, kind, "step", {"wrapper": wrapper}):
        assert (used.error, used.warned, used.params_changed) == ("", [], True)


def test_strict_refuses_also_what_was_warned_about_before(two: Any) -> None:
    for first, second in two.run(warned_then_strict):
        assert first == ""
        assert second.startswith(REFUSED)

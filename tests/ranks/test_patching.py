"""`patch_torch(strict=True)`: on FSDP1 a plain GradScaler is refused, before it has touched or sent anything."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import cases
from ranks.cases import METHODS, Attempt
from ranks.models import WRAPPERS
from scaler_triton import patch_torch

pytestmark = pytest.mark.distributed

REFUSED = "RuntimeError: GradScaler cannot tell which ranks share"


def use(scaler: Any, method: str, wrapper: str, width: int = 8, fused: bool = False) -> tuple[Attempt, list[str], int]:
    """Call a method after a backward pass; also the files that its warnings point to, and this rank's elements."""
    model = WRAPPERS[wrapper](nn.Linear(width, width, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler.scale(model(torch.ones(2, width)).sum()).backward()
    with warnings.catch_warnings(record=True, action="always") as caught:
        tried = cases.attempt(scaler, method, optimizer)
    warned = [warning.filename for warning in caught if "ShardedGradScaler" in str(warning.message)]
    return tried, warned, sum(param.numel() for param in model.parameters())


def patched(rank: int, strict: bool, kind: str, method: str, wrapper: str = "fsdp1-full", **options: Any) -> Any:
    """Make a scaler by torch's name, and use it; unless strictly, then twice more, in the end while that is strict."""
    group = {"process_group": dist.group.WORLD} if kind == "world" else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\[ST14\]")
        with patch_torch(strict=strict):
            sharded = dist.fsdp.sharded_grad_scaler.ShardedGradScaler
            scaler = (sharded if kind == "sharded" else torch.amp.GradScaler)(cases.DEVICE, **group)
            used = use(scaler, method, wrapper, **options)
            if strict:
                return used
            _, warned_again, _ = use(scaler, method, wrapper, **options)
        with patch_torch(strict=True):
            return *used[:2], warned_again, use(scaler, method, wrapper, **options)[0].error


@METHODS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("width", "numels"), [(8, [32, 32]), (1, [1, 0])])  # rank 1's shard may be empty
def test_strict_refuses_a_plain_scaler_naming_the_fix(two, method, fused, width, numels):
    results = two.run(patched, True, "grad", method, fused=fused, width=width)
    assert [numel for *_, numel in results] == numels
    for tried, warned, _ in results:
        assert tried.error.startswith(REFUSED)
        assert "ShardedGradScaler" in tried.error
        assert "process_group" in tried.error
        assert (warned, tried[1:4]) == ([], (0, False, False))


@METHODS
@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat"])
def test_otherwise_it_warns_once_at_the_line_that_called_the_scaler_and_strict_refuses_it_then(two, method, wrapper):
    """Difference 10 from torch."""
    for tried, warned, warned_again, error_then in two.run(patched, False, "grad", method, wrapper):
        assert (tried.error, warned, warned_again) == (None, [cases.__file__], [])
        assert error_then.startswith(REFUSED)


@pytest.mark.parametrize(
    ("kind", "wrapper"), [("sharded", "fsdp1-full"), ("world", "fsdp1-full"), ("grad", "ddp"), ("grad", "fsdp2")]
)
def test_strict_takes_every_scaler_that_knows_its_ranks(two, kind, wrapper):
    for tried, warned, _ in two.run(patched, True, kind, "step", wrapper):
        assert (tried.error, warned, tried.params_changed) == (None, [], True)

"""What callers may rely on who know torch's classes: names, what is written in place, and what a checkpoint holds."""

from typing import Any

import pytest
import torch
from helpers import parameters, started, update, values
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler

PAIRS = [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)]
both = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["plain", "sharded"])


@both
def test_is_a_torch_scaler_with_torchs_names_and_one_private_name_more(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs)
    assert ours.__qualname__ == theirs.__qualname__  # Composer's checkpoints are keyed by it
    mine, other = ours("cpu"), theirs("cpu")
    assert {name for name in dir(other) if not name.startswith("__")} <= set(dir(mine))
    more = {name for name in set(vars(mine)) - set(vars(other)) if name.startswith("_")}
    assert more <= {"_ours"}


@both
def test_is_no_instance_of_torchs_old_names_as_torchs_new_one_is_not(ours: type, theirs: type) -> None:
    old = torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler
    for cls in (theirs, ours):
        assert isinstance(cls("cpu"), torch.amp.GradScaler)
        assert not isinstance(cls("cpu"), old)


@both
@pytest.mark.parametrize("enabled", [False, True])
def test_programs_that_ask_whether_there_is_a_scale_get_torchs_answer(ours: type, theirs: type, enabled: bool) -> None:
    """As `scaler._scale.item() if hasattr(scaler, "_scale") else None`, on a machine without a GPU."""
    for name in ("_scale", "_growth_tracker"):
        assert [hasattr(cls("cpu", enabled=enabled), name) for cls in (theirs, ours)] == [enabled, enabled]


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_updates_write_into_the_same_scale_and_tracker(cls: type, two_ranks: Any) -> None:
    """Who holds one of them sees every update; torch's ShardedGradScaler replaces its tracker on the CPU."""
    scaler = started(cls, "cpu", init_scale=8.0)
    scale, tracker = scaler._scale, scaler._growth_tracker
    for _ in range(3):
        update(scaler, bad=False)
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert tracker.item() == 3


@pytest.mark.parametrize("explicit", [False, True])
def test_a_class_attribute_named_grad_scale_is_no_hindrance(explicit: bool) -> None:
    class Declares(torch.optim.SGD):
        grad_scale = None

    scaler = started(GradScaler, "cpu", init_scale=4.0)
    optimizer = Declares(parameters([torch.tensor([8.0])], "cpu"), lr=0.5, fused=True)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]

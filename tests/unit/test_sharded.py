"""ShardedGradScaler: torch's order of arguments, what it is in Python's eyes, and what it keeps of dtypes."""

import inspect
from typing import Any

import pytest
import torch
from helpers import sgd, started
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler


@pytest.mark.parametrize(("ours", "theirs"), [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)])
def test_arguments_are_torchs_in_its_order_then_ours_by_keyword(ours: Any, theirs: Any) -> None:
    mine, known = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    places = [name for name, each in mine.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert places == [*known]
    for name in {*places} - {"process_group"}:  # torch's is looked up once, when its module is imported
        assert mine[name].default == known[name].default
    extras = {"backend", "min_scale", "max_scale", "hysteresis", "max_consecutive_skips", "measure"}
    extras |= {"scale_policy", "headroom_bits", "headroom_window"}
    own = {*extras, "process_group", "allow_fp16_grads"}  # of the one for a single process or FSDP2
    assert {*mine} - {*known} == (extras if ours is ShardedGradScaler else own)


def test_each_argument_arrives_where_it_belongs() -> None:
    scaler = ShardedGradScaler("cpu", 8.0, 0.25, 4.0, 7, True, None, backend="torch", hysteresis=2, max_scale=64)
    numbers = scaler.get_scale(), scaler.get_backoff_factor(), scaler.get_growth_factor(), scaler.get_growth_interval()
    assert numbers == (8.0, 0.25, 4.0, 7)
    assert (scaler.process_group, scaler._ours.checks.requested) == (None, "torch")
    assert (scaler.limits.hysteresis, scaler.limits.max_scale) == (2, 64.0)


def test_without_gradients_there_is_a_flag_that_callers_may_reduce() -> None:
    scaler, found_inf = started(ShardedGradScaler, "cpu"), torch.zeros(())
    assert scaler._unscale_grads_(sgd([None]), torch.ones(()), found_inf) == {torch.device("cpu"): 0.0}


def test_it_is_one_of_both() -> None:
    """Fault 1: what is replaced on the one class reaches the other, and so do subclasses of both."""

    class Own(GradScaler):
        pass

    class OwnSharded(Own, ShardedGradScaler):
        pass

    assert issubclass(ShardedGradScaler, TorchSharded)
    assert ShardedGradScaler.__mro__[1] is GradScaler
    for cls, sharded in ((Own, False), (OwnSharded, True), (ShardedGradScaler, True), (GradScaler, False)):
        assert cls("cpu")._ours.checks.sharded is sharded


def test_without_a_default_group_torchs_error_is_raised_and_not_before_the_first_step() -> None:
    scaler, optimizer = started(ShardedGradScaler, "cpu"), sgd([torch.ones(1)])
    with pytest.raises(ValueError, match="Default process group has not been initialized") as raised:
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="Default") as torchs:
        torch.distributed.get_rank()
    assert str(raised.value) == str(torchs.value)
    (note,) = raised.value.__notes__
    assert note.startswith("For one process use scaler_triton.GradScaler;")

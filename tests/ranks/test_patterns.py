"""What public training code of several ranks does to a scaler ends as with torch's class, to the bit."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ranks import cases
from ranks.models import WRAPPERS, Net

pytestmark = pytest.mark.distributed

STEPS = 6
BAD = {1: 1, 4: 0}  # at which steps which rank's loss is infinite


class Run:
    """One class of scaler on one rank; takes down what each step leaves."""

    def __init__(self, rank: int, base: Any) -> None:
        self.rank, self.base = rank, base
        self.seen: list[str] = []

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of this rank's own batch."""
        inputs = cases.drawn((4, 8), torch.Generator().manual_seed(100 * step + self.rank))
        loss = (model(inputs) - inputs.sin()).square().mean()
        return loss * math.inf if BAD.get(step) == self.rank else loss

    def look(self, scaler: Any, parameters: Sequence[Tensor]) -> None:
        self.seen += [cases.digest(parameter) for parameter in parameters]
        self.seen += [f"{scaler.get_scale()} {scaler._get_growth_tracker()}"]

    def begin(self, model: nn.Module) -> tuple[Any, Any, Any]:
        """Return the model, a scaler and an optimizer."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        return model, self.base(cases.DEVICE, init_scale=8.0, growth_interval=2), optimizer

    def steps(self, model: nn.Module, scaler: Any, optimizer: Any, count: int = STEPS) -> Iterator[int]:
        """Yield each step's number after its backward, and then finish it."""
        for step in range(count):
            scaler.scale(self.loss(model, step)).backward()
            yield step
            self.finish(scaler, optimizer)

    def finish(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """End a step, and look at what it left."""
        scaler.step(optimizer)
        scaler.update()
        self.look(scaler, cases.params_of(optimizer))
        optimizer.zero_grad()


def fsdp1() -> Any:
    return WRAPPERS["fsdp1-full"](Net())


def flags_that_the_loop_reduces(run: Run) -> None:
    """Gradients differ by rank until the optimizer's step reduces them."""
    model, scaler, optimizer = run.begin(Net())
    for step in run.steps(model, scaler, optimizer):
        scaler.unscale_(optimizer)
        for flag in scaler._found_inf_per_device(optimizer).values():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX if step % 2 else dist.ReduceOp.SUM)


def a_scale_from_the_first_rank(run: Run) -> None:
    """Without an agreed flag the ranks' scales would part."""
    model, scaler, optimizer = run.begin(Net())
    for step in range(STEPS):
        scaler.scale(run.loss(model, step)).backward()
        run.finish(scaler, optimizer)
        dist.broadcast(scaler._scale, src=0)
        dist.all_reduce(scaler._growth_tracker, op=dist.ReduceOp.MIN, async_op=True).wait()


def a_first_rank_that_looks_and_saves(run: Run) -> None:
    """Whatever it asks for, the others take no part in it."""
    model, scaler, optimizer = run.begin(fsdp1())
    for _ in run.steps(model, scaler, optimizer):
        if run.rank == 0:
            look_around(scaler)
            scaler.unscale_(optimizer)  # which the others leave to `step`
            sum(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())
            look_around(scaler)


def look_around(scaler: Any) -> None:
    scaler.get_scale()
    scaler.state_dict()
    scaler._get_scale_async().item()
    if hasattr(scaler, "stats"):  # ours
        scaler.stats(wait=False)
        str(scaler.overflow_report())


def inputs_that_end_earlier_on_one_rank(run: Run) -> None:
    """DDP's ranks hold equal gradients, so a scaler needs no other rank, even one that is through."""
    begun = run.begin(nn.parallel.DistributedDataParallel(Net()))
    with begun[0].join():
        deque(run.steps(*begun, STEPS - 2 * run.rank), maxlen=0)


def a_compression_whose_memory_is_cleared_after_a_skip(run: Run) -> None:
    """PowerSGD keeps what was not sent, and its last factors, which an overflow leaves NaN for good."""
    model, scaler, optimizer = run.begin(nn.parallel.DistributedDataParallel(Net()))
    state = PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(STEPS):
        scaler.scale(run.loss(model, step)).backward()
        run.finish(scaler, optimizer)
        if step in BAD:
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
    assert scaler.get_scale() == 4.0  # the last step, which comes after a bad one, was taken


BOTH = [flags_that_the_loop_reduces]
GRAD = [a_scale_from_the_first_rank, inputs_that_end_earlier_on_one_rank]
GRAD += [a_compression_whose_memory_is_cleared_after_a_skip]
SHARDED = [a_first_rank_that_looks_and_saves]
PATTERNS = [*(("grad", each) for each in BOTH + GRAD), *(("sharded", each) for each in BOTH + SHARDED)]


def beside_torch(rank: int, pattern: Callable[[Run], None], kind: str) -> tuple[list[str], list[str]]:
    """What a pattern leaves with torch's class, and with ours."""
    runs = Run(rank, cases.TORCHS[kind]), Run(rank, cases.OURS[kind])
    for run in runs:
        torch.manual_seed(0)
        pattern(run)
    return runs[0].seen, runs[1].seen


@pytest.mark.parametrize(
    ("kind", "pattern"), PATTERNS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_a_pattern_ends_as_with_torch(two, kind, pattern):
    for theirs, ours in two.run(beside_torch, pattern, kind):
        assert ours == theirs
        scales = [float(line.split()[0]) for line in ours if " " in line]
        assert any(after < before for before, after in pairwise(scales))  # it did back off

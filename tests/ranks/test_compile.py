"""A whole step under FSDP2 compiled: every rank does what it does uncompiled, one rank's overflow is everybody's."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ranks import cases
from ranks.cases import KINDS, Fault
from scaler_triton import ops

pytestmark = pytest.mark.distributed

STEPS, WARM_UP = 6, 3


def whole_step(rank: int, kind: str, name: str, faults: list[Fault], *, compiled: bool) -> list[list[str]]:
    """Train two layers under FSDP2; return scales as hex and the digests of the local parameters after each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    fully_shard(net, mesh=cases.line())
    optimizer = cases.new_optimizer(name, net.parameters())
    scaler = cases.new_scaler(kind)
    plant = torch.compiler.disable(lambda: cases.plant(faults, rank, len(left), list(net.parameters())))
    left: list[list[str]] = []

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(net(inputs).square().mean()).backward()
        plant()
        scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()

    # Imports of torch's compiler meet deprecated parts of torch; where there is a GPU the reset is one of them.
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    # After a graph break Dynamo asks every tensor it meets for `.grad`, the scaled loss, too.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch.compiler.reset()
    counters.clear()
    if compiled:
        step = torch.compile(step, backend="aot_eager")
    while len(left) < STEPS:
        with torch._dynamo.config.patch(error_on_recompile=len(left) >= WARM_UP):
            step(torch.linspace(-1, 1, 8).reshape(2, 4))
        left.append([float(scaler.get_scale()).hex(), *map(cases.digest, net.parameters())])
    assert bool(counters["stats"]["unique_graphs"]) == compiled
    return left


def ops_on_shards(rank: int, *, compiled: bool) -> tuple[list[float], float, float]:
    """Unscale a DTensor, of which one rank holds an infinity; return this rank's shard, its flag and norm."""
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    gradient = DTensor.from_local(torch.tensor([6.0, math.inf if rank == 1 else 8.0]), cases.line(), [Shard(0)])

    def unscale(gradient: DTensor, found_inf: Tensor) -> Tensor:
        ops.unscale_([gradient], torch.full((), 0.5), found_inf)
        return ops.grad_norm([gradient])

    found_inf = torch.zeros(())
    norm = (torch.compile(unscale, backend="aot_eager", fullgraph=True) if compiled else unscale)(gradient, found_inf)
    return gradient.to_local().tolist(), found_inf.item(), norm.item()


FAULTS = [Fault(1, 1), Fault(4, 0)]  # while compiling, and after


@KINDS
def test_a_whole_step_compiled(two, kind):
    compiled = two.run(whole_step, kind, "adamw-fused", FAULTS, compiled=True)
    assert compiled == two.run(whole_step, kind, "adamw-fused", FAULTS, compiled=False)
    for steps in compiled:
        assert [scale for scale, *_ in steps] == [float(scale).hex() for scale in (8, 4, 4, 8, 4, 4)]


@pytest.mark.parametrize("compiled", [True, False])
def test_ops_take_this_ranks_shard(two, compiled):
    expected = [([3.0, 4.0], 0.0, 5.0), ([3.0, math.inf], 1.0, math.inf)]
    assert two.run(ops_on_shards, compiled=compiled) == expected

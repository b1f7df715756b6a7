"""What the ranks run in test_overflow_ranks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import cases
import dtensor_cases
import model_cases
import torch
import torch.distributed as dist
from cases import Fault, collectives_of
from scaler_triton.collectives import gather_bytes
from torch.distributed.tensor import DTensor, Partial, Replicate

from scaler_triton import audit


def reported(rank: int, kind: str, layout: str, faults: Sequence[Fault]) -> tuple[str, str, int]:
    """Skip one step; the report of this rank and that of all, and the collectives that the latter took."""
    scaler, params = cases.new_scaler(kind), dtensor_cases.LAYOUTS[layout]()
    optimizer = cases.new_optimizer("adamw", params)
    names = [("first", params[0]), ("second", params[1])]
    cases.give_grads(scaler, params, 0)
    cases.plant(faults, rank, 0, params)
    scaler.step(optimizer)
    scaler.update()
    reports: list[str] = []
    count = collectives_of(lambda: reports.append(str(scaler.overflow_report(names, gather=True))))
    assert collectives_of(lambda: reports.append(str(scaler.overflow_report(names)))) == 0
    return reports[1], reports[0], count


def reported_before_the_update(rank: int) -> tuple[str, str]:
    """A skipped step that is not counted yet; the report of this rank and that of all, which rank 1 gets wrong."""
    scaler, params = cases.new_scaler("sharded"), dtensor_cases.LAYOUTS["line-shards"]()
    optimizer = cases.new_optimizer("adamw", params)
    cases.give_grads(scaler, params, 0)
    cases.plant([Fault(0, 1)], rank, 0, params)
    scaler.step(optimizer)
    model: Any = params if rank == 1 else None  # parameters without names
    try:
        whole = str(scaler.overflow_report(model, gather=True))
    except TypeError as error:
        whole = str(error)
    return str(scaler.overflow_report()), whole


def told(rank: int, lengths: Sequence[int]) -> tuple[list[bytes], int]:
    """What the ranks tell each other, each so many bytes; and the collectives that it took."""
    answers: list[list[bytes]] = []
    data = bytes([rank + 1]) * lengths[rank]
    count = collectives_of(lambda: answers.append(gather_bytes(data, dist.group.WORLD, torch.device("cpu"))))
    return answers[0], count


def named_while_gathered(rank: int, reshard: bool) -> tuple[str, str]:
    """A skipped step of an FSDP2 model that then only looks forward: the names of what was bad, and an audit."""
    model = model_cases.WRAPPERS["fsdp2"](model_cases.Net(), False)
    for module in (model, *model.children()):
        module.set_reshard_after_forward(reshard)
    scaler, optimizer = cases.new_scaler("grad"), cases.new_optimizer("adamw", model.parameters())
    cases.give_grads(scaler, [*model.parameters()], 0)
    cases.plant([Fault(0, 1, param=3)], rank, 0, [*model.parameters()])
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        model(torch.ones(2, model_cases.WIDTH))
    seen = audit(optimizer, scaler, model, file=io.StringIO())
    return "".join(each.name for each in scaler.overflow_report(model, gather=True).bad), str(seen)


def partial_beside_plain(rank: int) -> list[tuple[str, str]]:
    """A finite plain gradient, then one that is yet a sum and infinite on rank 0; what every rank's report names."""
    scaler = cases.new_scaler("grad")
    plain, replicated = cases.plain_param(3), cases.dtensor_param(cases.line(), [Replicate()])
    plain.grad = torch.ones(3)
    local = torch.full((2, 3), float("inf") if rank == 0 else 1.0)
    replicated.grad = DTensor.from_local(local, cases.line(), [Partial()], run_check=False)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([plain, replicated], lr=1.0)
    scaler.unscale_(optimizer)
    report = scaler.overflow_report([("plain", plain), ("replicated", replicated)])
    return [(each.name, each.kinds) for each in report.bad]

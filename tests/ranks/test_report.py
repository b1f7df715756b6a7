"""What is known of a skip on every rank: which parameter on which rank."""

import io

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

from ranks import cases, models
from ranks.cases import Fault, give_grads, new_optimizer, new_scaler, plant
from scaler_triton import audit

pytestmark = pytest.mark.distributed


def reported(rank: int, kind: str) -> tuple[int, str, list[tuple[int, str, str]]]:
    """Skip one step; what all are told, by how many collectives, after what this rank knows alone."""
    scaler, params = new_scaler(kind), cases.LAYOUTS["line-shards"]()
    optimizer = new_optimizer("adamw", params)
    names = [("first", params[0]), ("second", params[1])]
    give_grads(scaler, params, 0)
    plant([Fault(0, 1, param=1), Fault(0, 0, param=0, value=float("nan"))], rank, 0, params)
    scaler.step(optimizer)
    scaler.update()
    assert [each.rank for each in scaler.overflow_report(names).bad] == [rank]
    with cases.CollectiveCounter() as counter:
        report = scaler.overflow_report(names, gather=True)
    return counter.count, str(report).splitlines()[0], [(each.rank, each.name, each.kinds) for each in report.bad]


@pytest.mark.parametrize("kind", ["grad", "sharded", "guard"])
def test_every_rank_is_told_which_parameter_on_which_rank(two, kind):
    text = "The last skip, at update 1: 2 bad gradients on ranks 0-1."
    assert two.run(reported, kind) == [(1, text, [(0, "first", "NaN"), (1, "second", "Inf")])] * 2


def named_while_gathered(rank: int, reshard: bool) -> tuple[str, str]:
    """A skipped step of an FSDP2 model that then only looks forward: the names of what was bad, and an audit."""
    model = models.WRAPPERS["fsdp2"](models.Net())
    for module in (model, *model.children()):
        module.set_reshard_after_forward(reshard)
    scaler, optimizer = new_scaler("grad"), new_optimizer("adamw", model.parameters())
    give_grads(scaler, [*model.parameters()], 0)
    plant([Fault(0, 1, param=3)], rank, 0, [*model.parameters()])
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        model(torch.ones(2, models.WIDTH))
    seen = audit(optimizer, scaler, model, file=io.StringIO())
    return "".join(each.name for each in scaler.overflow_report(model, gather=True).bad), str(seen)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_parameters_have_their_names_while_they_are_gathered(two, reshard):
    for name, seen in two.run(named_while_gathered, reshard):
        assert name == "up.bias"
        assert seen.endswith("Not compared: 6 DTensor shards (no other rank of its mesh holds a copy).")


def partial_beside_plain(rank: int) -> list[tuple[str, str]]:
    """A finite plain gradient, then one that is yet a sum and infinite on rank 0; what every rank's report names."""
    scaler = new_scaler("grad")
    plain, replicated = cases.plain_param(3), cases.dtensor_param(cases.line(), [Replicate()])
    plain.grad = torch.ones(3)
    replicated.grad = cases.placed(torch.full((2, 3), float("inf") if rank == 0 else 1.0), Partial())
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([plain, replicated], lr=1.0)
    scaler.unscale_(optimizer)
    report = scaler.overflow_report([("plain", plain), ("replicated", replicated)])
    return [(each.name, each.kinds) for each in report.bad]


def test_a_gradient_that_is_yet_a_sum_is_told_for_itself(two):
    assert two.run(partial_beside_plain) == [[("replicated", "Inf")], []]

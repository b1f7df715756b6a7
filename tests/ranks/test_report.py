"""What is known of a skip on every rank: which parameter on which rank."""

import io
import re
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate

from ranks import cases, models
from ranks.cases import Fault, give_grads, new_optimizer, new_scaler, plant
from scaler_triton import audit
from scaler_triton.core import meeting

pytestmark = pytest.mark.distributed


def reported(rank: int, kind: str) -> tuple[int, list[str], list[tuple[int, str, str]]]:
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
    return counter.count, str(report).splitlines()[:2], [(each.rank, each.name, each.kinds) for each in report.bad]


@pytest.mark.parametrize("kind", ["grad", "sharded", "guard"])
def test_every_rank_is_told_which_parameter_on_which_rank(two, kind):
    text = [
        "The last skip, at update 1: 2 bad gradients on ranks 0-1.",
        "Only first, second: overflow there. On all ranks: if these are sums over ranks, it may have been the batch of "
        "any.",
    ]
    assert two.run(reported, kind) == [(1, text, [(0, "first", "NaN"), (1, "second", "Inf")])] * 2


def of_one_rank(rank: int, shares: bool) -> list[str]:
    """All gradients are NaN on rank 1, and then a weight on rank 0, too: what is concluded from both."""
    params = cases.LAYOUTS["line-shards"]() if shares else [cases.plain_param(3), cases.plain_param(2)]
    scaler, optimizer, said = new_scaler("guard"), new_optimizer("adamw", params), []
    model = torch.nn.ParameterDict({"first": params[0], "second": params[1]})
    for spoils in (False, True):
        give_grads(scaler, params, 0)
        plant([Fault(0, 1, param=each, value=float("nan")) for each in range(len(params))], rank, 0, params)
        if spoils and rank == 0:
            local = params[1].detach()
            (local.to_local() if shares else local).fill_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
        said.append(scaler.overflow_report(model, gather=True).conclusion)
    return said


@pytest.mark.parametrize("shares", [False, True])
def test_a_report_of_one_ranks_gradients_concludes_whose_batch_it_was_only_if_that_is_known(two, shares):
    found = "All 2 gradients of rank 1 are NaN: so was the loss, or the first gradient that backward made from it. "
    batch = "Only rank 1: look at its batch, or what only it holds."
    if shares:
        batch = "Only on rank 1, but these are sums over ranks: it may have been the batch of any."
    spoiled = "second itself holds NaN: go back to a checkpoint."
    assert two.run(of_one_rank, shares) == [[found + batch, spoiled]] * 2


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


# A rank that asks alone.

CALLS = ["overflow_report(gather=True)", "audit"]


def asked(call: str, scaler: Any, optimizer: torch.optim.Optimizer, group: Any = None) -> str:
    """Ask for a report of all ranks; its first line, or the error."""
    if call == "audit":
        ask = partial(audit, optimizer, scaler, process_group=group, file=io.StringIO())
    else:
        ask = partial(scaler.overflow_report, gather=True)
    answers: list[Any] = []
    error = cases.said(lambda: answers.append(ask()))
    return error or str(answers[0]).splitlines()[0]


def asking_alone(rank: int, call: str, who: Sequence[int]) -> tuple[list[str], cases.Report]:
    """Train with a reduction in each step; before all of them ask together at its end, some asked before a step."""
    scaler, params = new_scaler("sharded"), [cases.plain_param(3)]
    optimizer = new_optimizer("sgd", params)
    train = partial(cases.train, rank, scaler, optimizer, cases.giving(scaler, params))
    train(steps=1)
    answers = []
    with mock.patch.object(meeting, "PATIENCE", 2.0):
        answers += [asked(call, scaler, optimizer) for _ in range(2) if rank in who]
    report = train([Fault(1, 0)])
    answers += [asked(call, scaler, optimizer), asked(call, scaler, optimizer)]
    return answers, report


@pytest.mark.parametrize(("call", "who"), [(CALLS[0], [0]), (CALLS[0], [0, 2, 3]), (CALLS[1], [1])])
def test_who_asks_alone_is_told_so_and_training_goes_on(four, call, who):
    told = f"TimeoutError: {call} must be called on all 4 ranks of its process group within 2 s, got some of them; "
    told += "nothing was gathered, and training can go on"
    together = "The last skip, at update 3: 1 bad gradient on rank 0."
    if call == "audit":
        together = "ShardedGradScaler of scaler_triton; SGD; 4 ranks"
    for rank, (answers, report) in enumerate(four.run(asking_alone, call, who)):
        counts = re.findall(r"got (\d) of", "".join(answers))
        assert all(1 <= int(each) <= len(who) for each in counts)  # of three, one may be late
        texts = [re.sub(r"got \d of", "got some of", each) for each in answers]
        assert texts == [told] * 2 * (rank in who) + [together] * 2
        assert (report.stepped, report.collectives) == ([True, False, True, True], [1] * 4)
        assert [float.fromhex(scale) for scale in report.scales] == [16.0, 8.0, 8.0, 16.0]


def different_reports(rank: int) -> str:
    """Each rank asks for something else."""
    scaler, params = new_scaler("sharded"), [cases.plain_param(3)]
    with mock.patch.object(meeting, "PATIENCE", 1.0):
        return asked(CALLS[rank], scaler, new_optimizer("sgd", params))


def test_different_reports_do_not_mix(two):
    for call, text in zip(CALLS, two.run(different_reports), strict=True):
        assert text.startswith(f"TimeoutError: {call} must be called on all 2 ranks")


def groups_of_one_name(rank: int) -> list[str]:
    """Two pairs of ranks whose groups share a store's names, as after `split_group`; the first of each asks alone."""
    pairs = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    group = pairs[rank // 2]
    optimizer = new_optimizer("sgd", [cases.plain_param(3)])
    store, answers = dist.distributed_c10d._get_default_store(), []
    with mock.patch.object(dist.distributed_c10d, "_get_process_group_store", return_value=store):
        if rank % 2 == 0:
            with mock.patch.object(meeting, "PATIENCE", 1.0):
                answers.append(asked("audit", new_scaler("grad"), optimizer, group))
        dist.barrier()
        answers.append(asked("audit", new_scaler("grad"), optimizer, group))
    return answers


def test_groups_of_other_ranks_do_not_mix(four):
    for rank, answers in enumerate(four.run(groups_of_one_name)):
        assert [each[:12] for each in answers] == ["TimeoutError"] * (rank % 2 == 0) + ["GradScaler o"]
        assert answers[-1].endswith("; 2 ranks")


def of_a_hook_that_keeps_errors(rank: int) -> tuple[list[str], list[bool]]:
    """One overflow under PowerSGD: what is concluded, and which steps are skipped until its state is cleared."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    scaler, optimizer = new_scaler("grad"), torch.optim.SGD(model.parameters(), lr=0.1)
    skips = []

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 64)).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        skips.append(scaler.was_skipped(optimizer))

    for factor in (1.0, 1.0, 1.0, 1.0, float("inf"), 1.0):
        step(factor)
    said = str(scaler.overflow_report(model)).splitlines()[1:2]
    state.error_dict.clear()
    state.p_memory_dict.clear()
    state.q_memory_dict.clear()
    step(1.0)
    return said, skips[3:]


def test_a_hook_that_keeps_an_overflow_is_named_as_the_cause(two):
    for said, skips in two.run(of_a_hook_that_keeps_errors):
        assert skips == [False, True, True, False]
        (line,) = said
        assert line.startswith("[ST10] The communication hook powerSGD_hook keeps NaN or Inf of an earlier step in ")
        assert "state.error_dict.clear()" in line

"""What is known of a skip on every rank: which parameter on which rank, and when too many skips came in a row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

from ranks import cases, models
from ranks.cases import KINDS, Fault, collectives_of, give_grads, new_optimizer, new_scaler, plant, said
from scaler_triton import SkipStreakError, audit

pytestmark = pytest.mark.distributed


def reported(rank: int, kind: str, faults: Sequence[Fault], suffix: str = "") -> tuple[str, str, int, list[str]]:
    """Skip one step; the report of this rank and that of all, the collectives that the latter took, and its names."""
    scaler, params = new_scaler(kind), cases.LAYOUTS["line-shards"]()
    optimizer = new_optimizer("adamw", params)
    names = [("first" + suffix, params[0]), ("second" + suffix, params[1])]
    give_grads(scaler, params, 0)
    plant(faults, rank, 0, params)
    scaler.step(optimizer)
    scaler.update()
    reports: list[Any] = []
    count = collectives_of(lambda: reports.append(scaler.overflow_report(names, gather=True)))
    assert collectives_of(lambda: reports.append(scaler.overflow_report(names))) == 0
    return str(reports[1]), str(reports[0]), count, [each.name for each in reports[0].bad]


BOTH = [Fault(0, 1, param=1), Fault(0, 0, param=0, value=float("nan"))]


@KINDS
def test_every_rank_is_told_which_parameter_on_which_rank(two, kind):
    whole = (
        "The last skip, at update 1: 2 bad gradients on ranks 0-1.\n"
        "rank  parameter  holds  numel\n"
        "----  ---------  -----  -----\n"
        "   0  first      NaN        6\n"
        "   1  second     Inf        6"
    )
    for local, gathered, collectives, _ in two.run(reported, kind, BOTH):
        assert gathered == whole
        assert collectives == 1
        assert "1 bad gradient on rank" in local


def test_long_names_arrive_whole(two):
    """One that does not fit the first message takes a second one, on all ranks."""
    suffix = "." + "x" * 20_000
    for _, _, collectives, names in two.run(reported, "sharded", BOTH, suffix):
        assert names == ["first" + suffix, "second" + suffix]
        assert collectives == 2


def test_a_rank_with_good_gradients_says_so(two):
    first, second = two.run(reported, "sharded", BOTH[:1])
    assert first[0] == "The last skip, at update 1: nothing known on this rank; ask with gather=True."
    assert first[1] == second[1]


def reported_before_the_update(rank: int) -> tuple[str, str]:
    """A skipped step that is not counted yet; the report of this rank and that of all, which rank 1 gets wrong."""
    scaler, params = new_scaler("sharded"), cases.LAYOUTS["line-shards"]()
    optimizer, reports = new_optimizer("adamw", params), []
    give_grads(scaler, params, 0)
    plant([Fault(0, 1)], rank, 0, params)
    scaler.step(optimizer)
    model: Any = params if rank == 1 else None  # parameters without names
    error = said(lambda: reports.append(str(scaler.overflow_report(model, gather=True))))
    return str(scaler.overflow_report()), error or reports[0]


def test_the_others_are_told_of_a_rank_that_cannot_report(two):
    (local, whole), (_, raised) = two.run(reported_before_the_update)
    assert local == "The last skip: nothing known on this rank; ask with gather=True."
    wrong = (
        "TypeError: model must be a module or what its named_parameters() gives, got DTensor for a name and a tensor"
    )
    assert raised == wrong
    assert whole == f"The last skip: nothing known on any rank.\nNot told: rank 1 raised {wrong}."


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


# Too many skips in a row.

BAD_STEPS = [1, 3, 4, 5, 6]
STREAK_STEPS, LIMIT = 12, 2
LAG = 4  # updates that an error may come late: no rank waits for its GPU


def streak(rank: int, kind: str, layout: str, name: str) -> tuple[dict[int, list[str]], Any]:
    """Overflow now on one rank, now on the other; which updates raised, and how; the error is caught."""
    scaler = new_scaler(kind, init_scale=2.0**40, max_consecutive_skips=LIMIT, hysteresis=2)
    param = cases.sharded_param() if layout == "dtensor" else cases.plain_param(2, 3)
    optimizer, raised = new_optimizer(name, [param]), {}
    for step in range(STREAK_STEPS):
        give_grads(scaler, [param], 0)
        plant([Fault(bad, bad % 2) for bad in BAD_STEPS], rank, step, [param])
        scaler.step(optimizer)
        try:
            scaler.update()
        except SkipStreakError as error:
            raised[step] = str(error).splitlines()
        assert scaler.was_skipped(optimizer) == (step in BAD_STEPS)
    return raised, scaler.stats()


@pytest.mark.parametrize(("kind", "layout"), [("sharded", "plain"), ("grad", "dtensor"), ("world", "plain")])
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_one_ranks_overflows_raise_everywhere_at_once(two, kind, layout, name):
    (first, stats), (second, same_stats) = two.run(streak, kind, layout, name)
    assert (stats, first.keys()) == (same_stats, second.keys())
    lag = min(first) - 5
    assert list(first) == [5 + lag, 6 + lag]
    assert 0 <= lag <= LAG
    known, unknown = (
        "1 bad gradient on rank 0, the only one asked.",
        "nothing known on this rank; ask with gather=True.",
    )
    for step, lines in first.items():  # the last skip was rank 0's, and each rank tells what it held
        assert lines[0] == second[step][0]
        assert lines[1] == f"The last skip, at update 7: {known}"
        assert second[step][1:] == [f"The last skip, at update 7: {unknown}"]
    assert (stats.updates, stats.skipped, stats.last_skip) == (STREAK_STEPS, len(BAD_STEPS), 7)
    assert stats.backoffs == len(BAD_STEPS) - 1  # hysteresis forgives one

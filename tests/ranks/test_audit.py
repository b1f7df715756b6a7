"""The audit over ranks: it finds every split, and calls nothing a split that is none."""

import io
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ranks import cases, models
from ranks.cases import DEVICE, local_of, new_scaler, plain_param
from scaler_triton import audit
from scaler_triton.auditing.report import AuditReport

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "why-skipped.md"
NOBODY = -1


def audited(optimizer: Any, scaler: Any = None, model: nn.Module | None = None, **options: Any) -> AuditReport:
    """Audit by one gather; the first rank of those that take part prints what all of them return."""
    file = io.StringIO()
    with cases.CollectiveCounter() as counter:
        report = audit(optimizer, scaler or new_scaler("grad"), model, file=file, **options)
    is_first = dist.get_rank(options.get("process_group")) == 0
    assert (counter.count, file.getvalue()) == (1, f"{report}\n" * is_first)
    return report


def flip(tensor: Tensor) -> None:
    """Change the last bit of the last fp32 element."""
    local_of(tensor.detach()).view(-1).view(torch.int32)[-1] ^= 1


def sgd(*params: Tensor) -> torch.optim.Optimizer:
    return cases.new_optimizer("sgd", params)


def ddp_ignoring(net: nn.Module) -> nn.Module:
    """DDP that leaves one parameter to the ranks."""
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["norm.weight"])
    wrapped = nn.parallel.DistributedDataParallel(net)
    net.norm.weight.data.fill_(dist.get_rank())
    return wrapped


def trained(rank: int, whose: str, wrapper: str, bad: list[int]) -> AuditReport:
    """Train a wrapped model for four steps, in the third of which some ranks' gradients overflow, then audit."""
    scaler = new_scaler("sharded", cases.TORCHS if whose == "torch" else cases.OURS)
    model = models.WRAPPERS[wrapper](models.Net())
    optimizer = cases.new_optimizer("adamw-fused", model.parameters())
    faults = [cases.Fault(2, each) for each in bad]
    cases.train(rank, scaler, optimizer, lambda step: models.backward(model, 0, (0, 1), scaler), faults)
    return audited(optimizer, scaler, model)


def flipped(rank: int, wrapper: str, bad: int, at: int = -1, with_model: bool = True, **options: Any) -> AuditReport:
    """Audit a wrapped model, in which one bit of one of the bad rank's parameters is flipped."""
    model = (ddp_ignoring if wrapper == "ddp, but one" else models.WRAPPERS[wrapper])(models.Net())
    if rank == bad:
        flip(list(model.parameters())[at])
    return audited(sgd(*model.parameters()), None, model if with_model else None, **options)


def flipped_mesh(rank: int, placements: Sequence[Any], bad: int) -> AuditReport:
    """Audit a DTensor on a 2 x 2 mesh, or on the first two ranks, which holds the coordinates of its shard."""
    mesh = cases.square() if len(placements) == 2 else DeviceMesh(DEVICE, torch.tensor([0, 1], device="cpu"))
    local = torch.ones(2, 3)
    at = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        local += 0 if placement.is_replicate() else at[dim] + 1
    param = nn.Parameter(cases.placed(local, *placements, on=mesh))
    if rank == bad and at is not None:  # else this rank holds nothing of it
        flip(param)
    return audited(sgd(param))


def own_parameters(rank: int, replicated: bool) -> AuditReport:
    """Audit a parameter of each rank's own, as in a pipeline, and one that is equal."""
    params = plain_param(3), plain_param(2)
    params[0].data.fill_(rank)
    return audited(sgd(*params), new_scaler("sharded"), replicated=replicated)


def a_rank_fails(rank: int, bad: int, what: str) -> AuditReport:
    optimizer = sgd(param := plain_param(3))
    if rank == bad and what == "steps":
        optimizer.state[param] = {"step": torch.ones((), device="meta")}
    return audited(optimizer, "none" if rank == bad and what == "scaler" else None)


def swapped(rank: int) -> str:
    return cases.said(audit, new_scaler("grad"), sgd(plain_param(3)))


def in_group(rank: int) -> AuditReport | str:
    """Only the last two ranks are in the group."""
    group, optimizer, scaler = dist.new_group([2, 3]), sgd(plain_param(3)), new_scaler("grad", init_scale=2.0**rank)
    call = audited if rank >= 2 else partial(cases.said, audit)
    return call(optimizer, scaler, process_group=group)


def agreed(answers: list[AuditReport]) -> AuditReport:
    """The ranks got the same report."""
    assert len({str(answer) for answer in answers}) == 1
    return answers[0]


def row(answer: AuditReport, rank: int) -> list[str]:
    """A rank's cells."""
    return next(line.split() for line in str(answer).splitlines()[4:] if line.split()[:1] == [str(rank)])


def test_torchs_scaler_and_a_fused_optimizer_split_and_the_page_shows_it(four):
    answer = agreed(four.run(trained, "torch", "fsdp1-full", [1]))
    assert list(answer.differences) == [
        "scale: 32 on ranks 0, 2-3; 8 on rank 1",
        "tracker: 0 on ranks 0, 2-3; 1 on rank 1",
        "steps: 4 on ranks 0, 2-3; 3 on rank 1",
    ]
    page = " ".join(PAGE.read_text().split())  # where long lines are wrapped
    assert " ".join(f"{answer}\n```".split()) in page


ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrapper", "bad", "replicated"),
    [("ddp", ALL, True), ("fsdp1-full", [1], False), ("fsdp2", [1], False), ("hsdp2", [1, 3], True)],
)
def test_ours_agree(four, wrapper, bad, replicated):
    answer = agreed(four.run(trained, "ours", wrapper, bad))
    assert (answer.verdict, row(answer, 0)[1]) == ("agree", "8")
    assert "AGREE: every rank holds the same scale, tracker, steps" in str(answer)
    assert ("6 replicated parameters." in str(answer)) == replicated


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-no-shard", "fsdp1-no-shard-flat"])
@pytest.mark.parametrize(("bad", "apart"), [(0, "rank 0 | ranks 1-3"), (2, "ranks 0-1, 3 | rank 2")])
def test_one_flipped_bit_of_a_replica_is_a_split(four, wrapper, bad, apart):
    answer = agreed(four.run(flipped, wrapper, bad))
    assert answer.differences[0].startswith("replicated parameters: 1 of ")
    assert answer.differences[1].endswith(f": {apart}")
    assert "differ" in row(answer, 0)


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [("hsdp2", "up.weight"), ("ddp-tp", "module.up.weight")],  # DDP over pairs of ranks, of which each holds half
)
def test_shards_are_compared_with_their_replicas_only(four, wrapper, name):
    assert agreed(four.run(flipped, wrapper, NOBODY)).verdict == "agree"
    answer = agreed(four.run(flipped, wrapper, 3, 2))
    assert list(answer.differences[1:]) == [f"  {name}: rank 1 | rank 3"]
    assert [row(answer, rank)[-2:] for rank in range(4)] == [["6", "equal"], ["6", "differ"]] * 2


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat", "fsdp2", "fsdp1-no-shard"])
def test_shards_are_no_replicas(two, wrapper):
    """Without its module FSDP1's NO_SHARD is taken for one."""
    options = {"with_model": False, "replicated": True} if wrapper == "fsdp1-no-shard" else {}
    answer = agreed(two.run(flipped, wrapper, 1, **options))
    assert (answer.verdict, "replicated" in str(answer)) == ("agree", False)
    assert re.search(r"^Not compared: \d (FSDP1|DTensor) shards? \(", str(answer), re.MULTILINE)


@pytest.mark.parametrize("bad", [NOBODY, 0, 3])
@pytest.mark.parametrize(
    ("placements", "apart"),
    [
        ((Replicate(), Replicate()), {0: "rank 0 | ranks 1-3", 3: "ranks 0-2 | rank 3"}),
        ((Replicate(), Shard(0)), {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"}),
        ((Replicate(), Partial()), {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"}),
        ((Shard(0), Replicate()), {0: "rank 0 | rank 1", 3: "rank 2 | rank 3"}),
        ((Shard(0), Shard(1)), {}),
        ((Replicate(),), {0: "rank 0 | rank 1"}),
    ],
)
def test_dtensors_are_compared_at_equal_coordinates(four, placements, apart, bad):
    answer = agreed(four.run(flipped_mesh, placements, bad))
    assert (answer.verdict, "DTensor shard " in str(answer)) == ("split" if bad in apart else "agree", not apart)
    assert ("\nNot compared: 1 DTensor (on a mesh without this rank)." in str(answer)) == (len(placements) == 1)
    assert bad not in apart or answer.differences[-1].endswith(f": {apart[bad]}")


def test_plain_parameters_that_differ_are_no_split_unless_they_are_replicas(two):
    unsaid, said = (agreed(two.run(own_parameters, replicated)) for replicated in (False, True))
    assert "Plain parameters: 1 of 2 differ: group 0 parameter 0 (3,). Nothing says" in str(unsaid)
    assert [(each.verdict, "Plain" in str(each)) for each in (unsaid, said)] == [("agree", True), ("split", False)]
    assert "6 of 6 are equal" in str(agreed(two.run(flipped, "ddp", NOBODY, with_model=False)))
    ignored = agreed(two.run(flipped, "ddp, but one", NOBODY))
    assert (ignored.verdict, "1 of 1 differ: module.norm.weight." in str(ignored)) == ("agree", True)


@pytest.mark.parametrize(("what", "text"), [("steps", "RuntimeError: "), ("scaler", "TypeError: scaler must ")])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_is_a_row_for_all(two, bad, what, text):
    answer = agreed(two.run(a_rank_fails, bad, what))
    assert (answer.verdict, row(answer, bad)[1]) == ("unknown", "error")
    assert f"\nrank {bad}: {text}" in str(answer)


def test_what_is_wrong_on_all_ranks_raises_on_all_of_them(two):
    assert len({*(said := two.run(swapped))}) == 1
    assert "optimizer must be an optimizer or a list of them, got GradScaler" in said[0]


def test_only_the_groups_ranks_take_part(four):
    *refused, first, second = four.run(in_group)
    assert all("process_group must contain this rank" in text for text in refused)
    differences = agreed([first, second]).differences
    assert list(differences) == ["scale: 4 (unused) on rank 2; 8 (unused) on rank 3"]

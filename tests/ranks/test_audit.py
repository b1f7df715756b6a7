"""The audit over ranks: it finds every split, and calls nothing one that is none."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import scaler_triton
from ranks import cases, models
from ranks.cases import Fault, dtensor_param, local_of, new_optimizer, new_scaler, params_of, plain_param, square
from ranks.models import WRAPPERS, Net

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
NOBODY = -1
GATHERS = 1


class Said(NamedTuple):
    """What an audit gave on one rank."""

    text: str
    printed: str
    verdict: str
    differences: tuple[str, ...]
    collectives: int


def audited(optimizer: Any, scaler: Any, model: nn.Module | None = None, **options: Any) -> Said:
    """Audit, and see that nothing was changed."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = _held(optimizers, scaler)
    file = io.StringIO()
    with cases.CollectiveCounter() as counter:
        report = scaler_triton.audit(optimizer, scaler, model, file=file, **options)
    assert _held(optimizers, scaler) == before
    return Said(str(report), file.getvalue(), report.verdict, tuple(report.differences), counter.count)


def _held(optimizers: list[Any], scaler: Any) -> list[object]:
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    held = cases.digests(params) + [str(optimizer.state) for optimizer in optimizers]
    lazy = getattr(scaler, "_scale", None), len(getattr(scaler, "_per_optimizer_states", ()))
    return [*held, *lazy, torch.get_rng_state().tolist(), [len(optimizer.state) for optimizer in optimizers]]


def agreed_on(answers: list[Said]) -> Said:
    """The ranks got the same report, for one gather each, and the first one printed it: return it."""
    assert len({answer.text for answer in answers}) == 1
    assert [answer.printed for answer in answers] == [answers[0].text + "\n"] + [""] * (len(answers) - 1)
    assert [answer.collectives for answer in answers] == [GATHERS] * len(answers)
    return answers[0]


def row(answer: Said, rank: int) -> list[str]:
    """A rank's cells."""
    return next(line.split() for line in answer.text.splitlines()[4:] if line.split()[:1] == [str(rank)])


def flip(tensor: Tensor, element: int = 0) -> None:
    """Change the last bit of one fp32 element."""
    local_of(tensor.detach()).view(-1).view(torch.int32)[element] ^= 1


# After a training.


def trained(rank: int, whose: str, wrapper: str, kind: str, name: str, faults: list[Fault]) -> Said:
    """Train a wrapped model with torch's class or ours, then audit."""
    scaler = cases.torch_scaler(kind) if whose == "torch" else cases.new_scaler(kind)
    model = WRAPPERS[wrapper](Net())
    optimizer, part = new_optimizer(name, model.parameters()), (rank, dist.get_world_size())
    cases.train(rank, scaler, [optimizer], lambda step: models.backward(model, step, part, scaler), faults)
    return audited(optimizer, scaler, model)


def test_torchs_scaler_and_a_fused_optimizer_split(ranks):
    last = ranks.world_size - 1
    answer = agreed_on(ranks.run(trained, "torch", "fsdp1-full", "sharded", "adamw-fused", [Fault(2, last)]))
    others = "rank 0" if last == 1 else f"ranks 0-{last - 1}"
    assert answer.verdict == "split"
    assert answer.differences == (
        f"scale: 32 on {others}; 8 on rank {last}",
        f"tracker: 0 on {others}; 1 on rank {last}",
        f"steps: 4 on {others}; 3 on rank {last}",
    )
    assert row(answer, 0) == ["0", "32", "0", "4"]
    assert row(answer, last)[1:] == ["8", "1", "3"]
    assert answer.text.startswith(f"ShardedGradScaler of torch; AdamW, fused; {ranks.world_size} ranks\n")
    assert "Not compared: 6 FSDP1 shards" in answer.text


def test_the_pages_show_an_audit_as_it_is(four):
    answer = agreed_on(four.run(trained, "torch", "fsdp1-full", "sharded", "adamw-fused", [Fault(2, 1)]))
    for page in ("README.md", "docs/why-skipped.md"):
        assert f"\n{answer.text}\n```" in (ROOT / page).read_text()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-full", "fsdp1-full-flat", "fsdp1-no-shard", "fsdp2"])
def test_ours_agree(two, wrapper):
    faults = [Fault(2, 0), Fault(2, 1)] if wrapper in ("ddp", "fsdp1-no-shard") else [Fault(2, 1)]
    answer = agreed_on(two.run(trained, "ours", wrapper, "sharded", "adamw-fused", faults))
    assert answer.verdict == "agree"
    assert "AGREE: every rank holds the same scale, tracker, steps" in answer.text
    assert ("6 replicated parameters." in answer.text) == (wrapper in ("ddp", "fsdp1-no-shard"))


def test_hsdp_agrees_in_its_replicas(four):
    answer = agreed_on(four.run(trained, "ours", "hsdp2", "grad", "adamw", [Fault(2, 1), Fault(2, 3)]))
    assert answer.verdict == "agree"
    assert "6 replicated parameters." in answer.text


# One bit of a replica.


def flipped_in(rank: int, wrapper: str, bad: int, *, with_model: bool = True, **options: Any) -> Said:
    """A wrapped model, untrained; one bit of its last parameter is flipped on the bad rank."""
    model = WRAPPERS[wrapper](Net())
    optimizer = new_optimizer("sgd", model.parameters())
    if rank == bad:
        flip(params_of(optimizer)[-1])
    return audited(optimizer, new_scaler("grad"), model if with_model else None, **options)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-no-shard", "fsdp1-no-shard-flat"])
@pytest.mark.parametrize("bad", [0, 1])
def test_one_flipped_bit_of_a_replica_is_a_split(two, wrapper, bad):
    answer = agreed_on(two.run(flipped_in, wrapper, bad))
    assert answer.verdict == "split"
    assert "replicated parameters: 1 of " in answer.differences[0]
    assert answer.differences[1].endswith(": rank 0 | rank 1")
    assert "differ" in row(answer, 0)


def test_the_rank_that_stands_alone_is_named(four):
    answer = agreed_on(four.run(flipped_in, "ddp", 2))
    assert answer.differences == (
        "replicated parameters: 1 of 6 differ: module.down.bias",
        "  module.down.bias: ranks 0-1, 3 | rank 2",
    )


def test_hsdp_compares_within_its_replicas_only(four):
    answer = agreed_on(four.run(flipped_in, "hsdp2", 3))
    assert answer.differences[1].endswith(": rank 1 | rank 3")
    assert [row(answer, rank)[-2:] for rank in range(4)] == [["6", "equal"], ["6", "differ"]] * 2


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat", "fsdp2"])
def test_shards_are_no_replicas(two, wrapper):
    answer = agreed_on(two.run(flipped_in, wrapper, 1))
    assert answer.verdict == "agree"
    assert "replicated" not in answer.text
    assert re.search(r"^Not compared: \d (FSDP1|DTensor) shards? \(", answer.text, re.MULTILINE)


def test_without_the_model_nothing_says_what_is_replicated(two):
    answer = agreed_on(two.run(flipped_in, "fsdp1-no-shard", 1, with_model=False, replicated=True))
    assert answer.verdict == "agree"
    assert "FSDP1 shards" in answer.text
    answer = agreed_on(two.run(flipped_in, "ddp", NOBODY, with_model=False))
    assert "Plain parameters: 6 of 6 are equal" in answer.text


# DTensors, by placements on a 2 x 2 mesh and who differs if rank 0 does, or rank 3.
PLACEMENTS: dict[str, tuple[Any, dict[int, str]]] = {
    "replicated": ((Replicate(), Replicate()), {0: "rank 0 | ranks 1-3", 3: "ranks 0-2 | rank 3"}),
    "hsdp": ((Replicate(), Shard(0)), {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"}),
    "tp": ((Shard(0), Replicate()), {0: "rank 0 | rank 1", 3: "rank 2 | rank 3"}),
    "sharded": ((Shard(0), Shard(1)), {}),
    "partial": ((Replicate(), Partial()), {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"}),
}


def flipped_mesh(rank: int, layout: str, bad: int) -> Said:
    """A DTensor that holds the coordinates of its shard; one bit is flipped on the bad rank."""
    placements, _ = PLACEMENTS[layout]
    param = dtensor_param(square(), placements)
    with torch.no_grad():
        for place, at in zip(placements, square().get_coordinate(), strict=True):
            if not place.is_replicate():
                local_of(param).add_(at + 1)
    if rank == bad:
        flip(param, 5)
    return audited(new_optimizer("sgd", [param]), new_scaler("grad"))


@pytest.mark.parametrize("layout", PLACEMENTS)
@pytest.mark.parametrize("bad", [NOBODY, 0, 3])
def test_dtensors_are_compared_at_equal_coordinates(four, layout, bad):
    answer = agreed_on(four.run(flipped_mesh, layout, bad))
    told = PLACEMENTS[layout][1].get(bad)
    assert answer.verdict == ("split" if told else "agree")
    assert ("DTensor shard " in answer.text) == (layout == "sharded")
    assert not told or answer.differences[-1].endswith(f": {told}")


def on_some_ranks(rank: int, bad: int) -> Said:
    """A DTensor on the first two of four ranks; one bit is flipped on the bad rank."""
    param = dtensor_param(cases.mesh((2,), ("pair",), (0, 1)), [Replicate()])
    if rank == bad:
        flip(param)
    return audited(new_optimizer("sgd", [param, plain_param(2)]), new_scaler("grad"), replicated=True)


@pytest.mark.parametrize("bad", [NOBODY, 1])
def test_dtensors_on_some_ranks_are_compared_among_these(four, bad):
    answer = agreed_on(four.run(on_some_ranks, bad))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    assert [row(answer, rank)[-2:] for rank in (2, 3)] == [["1", "equal"]] * 2
    assert "\nNot compared: 1 DTensor (on a mesh without this rank)." in answer.text
    assert bad == NOBODY or answer.differences[-1].endswith(": rank 0 | rank 1")


# DDP, and what is replicated by hand.


def ddp(rank: int, what: str, bad: int) -> Said:
    """DDP that leaves something out, or over some of the ranks; one bit is flipped on the bad rank."""
    net, scaler, options = Net(), new_scaler("grad"), {}
    if what == "ignores one":
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["norm.weight"])
        model = nn.parallel.DistributedDataParallel(net)
        net.norm.weight.data.fill_(rank)
    elif what == "over tensor parallel":  # after a step
        model, options = (
            nn.parallel.DistributedDataParallel(models.cut_by_tensor_parallel(net), device_mesh=square()["dp"]),
            {"replicated": True},
        )
        models.backward(model, 0, (0, 1), scaler)
        scaler.step(new_optimizer("sgd", model.parameters()))
        scaler.update()
    else:  # of pairs that differ from each other, as under tensor parallelism
        torch.manual_seed(rank % 2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=square()["dp"].get_group())
        if what == "of pairs, unlisted":
            del model._module_parameters  # torch's own name, not promised
    if rank == bad:
        flip(model.module.up.weight if what == "over tensor parallel" else model.module.weight)
    return audited(new_optimizer("sgd", model.parameters()), scaler, model, **options)


def test_what_ddp_ignores_is_not_taken_for_a_replica(two):
    answer = agreed_on(two.run(ddp, "ignores one", NOBODY))
    assert answer.verdict == "agree"
    assert "5 replicated parameters." in answer.text
    assert "1 of 1 differ: module.norm.weight." in answer.text


@pytest.mark.parametrize("bad", [NOBODY, 3])
@pytest.mark.parametrize(
    ("what", "name"),
    [("of pairs", "weight"), ("of pairs, unlisted", "weight"), ("over tensor parallel", "up.weight")],
)
def test_ddp_of_some_ranks_is_compared_among_them(four, bad, what, name):
    answer = agreed_on(four.run(ddp, what, bad))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    assert bad == NOBODY or answer.differences[-1] == f"  module.{name}: rank 1 | rank 3"


def own_parameters(rank: int, replicated: bool) -> Said:
    """A parameter of each rank's own, as in a pipeline, and one that is equal."""
    params = [plain_param(3), plain_param(2)]
    params[0].data.fill_(rank)
    return audited(new_optimizer("sgd", params), new_scaler("sharded"), replicated=replicated)


def test_plain_parameters_that_differ_are_no_split_until_it_is_said(two):
    unsaid = agreed_on(two.run(own_parameters, replicated=False))
    assert unsaid.verdict == "agree"
    assert "Plain parameters: 1 of 2 differ: group 0 parameter 0 (3,). Nothing says" in unsaid.text
    told = agreed_on(two.run(own_parameters, replicated=True))
    assert told.verdict == "split"
    assert "Plain" not in told.text


# Ranks that cannot be audited.


def unreadable(rank: int, what: str, bad: int) -> Said:
    """The bad rank cannot say what it holds."""
    optimizer, scaler = new_optimizer("sgd", [plain_param(3)]), new_scaler("sharded")
    if what == "steps" and rank == bad:
        optimizer.state[params_of(optimizer)[0]] = {"step": torch.ones((), device="meta")}
    return audited(optimizer, None if what == "scaler" and rank == bad else scaler)


@pytest.mark.parametrize(("what", "text"), [("steps", "NotImplementedError: "), ("scaler", "TypeError: scaler must ")])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_is_a_row_for_all(two, bad, what, text):
    answer = agreed_on(two.run(unreadable, what, bad))
    assert answer.verdict == "unknown"
    assert row(answer, bad)[1] == "error"
    assert f"\nrank {bad}: {text}" in answer.text
    assert "UNKNOWN" in answer.text


def in_group(rank: int) -> Said | str:
    """Only the last two ranks audit; the others are refused."""
    group, answers = dist.new_group([2, 3]), []
    optimizer, scaler = new_optimizer("sgd", [plain_param(3)]), new_scaler("grad", init_scale=2.0**rank)
    scaler.scale(torch.ones(()))
    refused = cases.said(lambda: answers.append(audited(optimizer, scaler, process_group=group)))
    return refused or answers[0]


def test_only_the_groups_ranks_take_part(four):
    *refused, first, second = four.run(in_group)
    assert all("ValueError: process_group must contain this rank" in text for text in refused)
    assert agreed_on([first, second]).differences == ("scale: 4 on rank 2; 8 on rank 3",)

"""The audit over ranks: it finds every split, and calls nothing one that is none."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import scaler_triton
from scaler_triton.placement import DDP_SPEC

PLACEMENTS = {
    "replicated": (Replicate(), Replicate()),
    "hsdp": (Replicate(), Shard(0)),
    "tp": (Shard(0), Replicate()),
    "sharded": (Shard(0), Shard(1)),
    "partial": (Replicate(), Partial()),
}


class Said(NamedTuple):
    """What an audit gave on one rank."""

    text: str
    printed: str
    verdict: str
    differences: tuple[str, ...]
    collectives: int


def said(optimizer: Any, scaler: Any, model: nn.Module | None = None, **options: Any) -> Said:
    """Audit, and see that nothing was changed."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before = _held(optimizers, scaler)
    file = io.StringIO()
    with CollectiveCounter() as counter:
        report = scaler_triton.audit(optimizer, scaler, model, file=file, **options)
    assert _held(optimizers, scaler) == before
    return Said(str(report), file.getvalue(), report.verdict, tuple(report.differences), counter.count)


def _held(optimizers: list[Any], scaler: Any) -> list[object]:
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    held = [cases.digest(param) for param in params] + [str(optimizer.state) for optimizer in optimizers]
    lazy = getattr(scaler, "_scale", None), len(getattr(scaler, "_per_optimizer_states", ()))
    return [*held, *lazy, torch.get_rng_state().tolist(), [len(optimizer.state) for optimizer in optimizers]]


def flip(tensor: Tensor, element: int = 0) -> None:
    """Change the last bit of one fp32 element."""
    local_of(tensor.detach()).view(-1).view(torch.int32)[element] ^= 1


def trained(rank: int, whose: str, wrapper: str, kind: str, name: str, faults: list[Fault]) -> Said:
    """Train a wrapped model with torch's class or ours, then audit."""
    make = {"torch": matrix_cases.torch_class, "ours": matrix_cases.our_class}[whose](kind)
    scaler = make(cases.DEVICE, init_scale=cases.INIT_SCALE, growth_interval=cases.GROWTH_INTERVAL)
    model = model_cases.WRAPPERS[wrapper](model_cases.Net(), False)
    optimizer = new_optimizer(name, model.parameters())

    def backward(step: int) -> None:
        x, y = model_cases._batch(step, (rank, dist.get_world_size()))
        scaler.scale(nn.functional.mse_loss(model(x).float(), y)).backward()

    cases.train(rank, scaler, [optimizer], backward, faults)
    return said(optimizer, scaler, model)


def flipped_in(rank: int, wrapper: str, bad: int, *, with_model: bool = True, **options: Any) -> Said:
    """A wrapped model, untrained; one bit of its last parameter is flipped on the bad rank."""
    model = model_cases.WRAPPERS[wrapper](model_cases.Net(), False)
    optimizer = new_optimizer("sgd", model.parameters())
    if rank == bad:
        flip(params_of(optimizer)[-1])
    return said(optimizer, new_scaler("grad"), model if with_model else None, **options)


def flipped_mesh(rank: int, layout: str, bad: int) -> Said:
    """A DTensor on a 2 x 2 mesh that holds the coordinates of its shard; one bit is flipped on the bad rank."""
    placements = PLACEMENTS[layout]
    param = dtensor_param(square(), placements)
    with torch.no_grad():
        for place, at in zip(placements, square().get_coordinate(), strict=True):
            if not place.is_replicate():
                local_of(param).add_(at + 1)
    if rank == bad:
        flip(param, 5)
    return said(new_optimizer("sgd", [param]), new_scaler("grad"))


def on_some_ranks(rank: int, bad: int) -> Said:
    """A DTensor on the first two of four ranks; one bit is flipped on the bad rank."""
    param = _replicated_on_two(torch.ones(2, 3))
    if rank == bad:
        flip(param)
    return said(new_optimizer("sgd", [param, plain_param(2)]), new_scaler("grad"), replicated=True)


def around_a_wrapper(rank: int) -> str:
    """DTensors whose shards are tensors of a class of its own."""
    param = _replicated_on_two(TwoTensor(torch.ones(2, 3), torch.ones(2, 3)))
    optimizer = new_optimizer("sgd", [param])
    return str(scaler_triton.audit(optimizer, new_scaler("grad"), replicated=True, file=io.StringIO()))


def _replicated_on_two(local: Tensor) -> Tensor:
    mesh = cases.mesh((2,), ("pair",), (0, 1))
    return nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))


def own_parameters(rank: int, replicated: bool) -> Said:
    """A parameter of each rank's own, as in a pipeline, and one that is equal."""
    params = [plain_param(3), plain_param(2)]
    params[0].data.fill_(rank)
    return said(new_optimizer("sgd", params), new_scaler("sharded"), replicated=replicated)


def own_shapes(rank: int) -> Said:
    """As many elements everywhere, and in the model's eyes the same name; the shape differs."""
    model = nn.Module()
    model.weight = plain_param(2, 3) if rank else plain_param(3, 2)
    return said(new_optimizer("sgd", model.parameters()), new_scaler("grad"), model, replicated=True)


def ignored_by_ddp(rank: int) -> Said:
    """DDP that leaves one parameter to the ranks."""
    net = model_cases.Net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["norm.weight"])
    model = nn.parallel.DistributedDataParallel(net)
    net.norm.weight.data.fill_(rank)
    return said(new_optimizer("sgd", model.parameters()), new_scaler("grad"), model)


def ddp_of_pairs(rank: int, bad: int, listed: bool) -> Said:
    """DDP over pairs of ranks that differ from each other, as under tensor parallelism."""
    torch.manual_seed(rank % 2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=square()["dp"].get_group())
    if not listed:
        del model._module_parameters  # torch's own name, not promised
    if rank == bad:
        flip(model.module.weight)
    return said(new_optimizer("sgd", model.parameters()), new_scaler("grad"), model)


def ddp_over_tensor_parallel(rank: int, bad: int) -> Said:
    """DDP over layers that tensor parallelism cut, after a step; one bit of a shard is flipped on the bad rank."""
    net, mesh = model_cases.Net(), square()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = nn.parallel.DistributedDataParallel(net, device_mesh=mesh["dp"])
    scaler, optimizer = new_scaler("grad"), new_optimizer("sgd", model.parameters())
    scaler.scale(model(torch.ones(2, model_cases.WIDTH)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    if rank == bad:
        flip(next(param for param in params_of(optimizer) if hasattr(param, DDP_SPEC)))
    return said(optimizer, scaler, model, replicated=True)


def a_rank_raises(rank: int, bad: int, what: str) -> Said:
    """One rank cannot say what it holds."""
    optimizer, scaler = new_optimizer("sgd", [plain_param(3)]), new_scaler("sharded")
    if rank == bad and what == "steps":
        optimizer.state[params_of(optimizer)[0]] = {"step": torch.ones((), device="meta")}
    if rank == bad and what == "scaler":
        scaler = None
    return said(optimizer, scaler)


def disabled_on(rank: int, ranks: list[int]) -> Said:
    """A scaler that is off on some ranks."""
    return said(new_optimizer("sgd", [plain_param(3)]), new_scaler("grad", enabled=rank not in ranks))


def in_group(rank: int) -> Said | str:
    """Only the last two ranks audit; the others are refused."""
    members = [2, 3]
    group = dist.new_group(members)
    optimizer, scaler = new_optimizer("sgd", [plain_param(3)]), new_scaler("grad", init_scale=2.0**rank)
    scaler.scale(torch.ones(()))
    try:
        return said(optimizer, scaler, process_group=group)
    except ValueError as error:
        return str(error)


def lists_of(rank: int, count: int) -> Said:
    """Two optimizers, the second of which stepped more often on one rank; with a third somewhere."""
    optimizers = [new_optimizer(name, [plain_param(2)]) for name in ("adamw", "adam", "sgd")[: count - (rank == 0)]]
    for number, optimizer in enumerate(optimizers):
        for _ in range(2 if rank and number == 1 else 1):
            params_of(optimizer)[0].grad = torch.ones(2)
            optimizer.step()
    return said(optimizers, new_scaler("sharded"))


ROOT = Path(__file__).parents[2]
NOBODY = -1
GATHERS = 1


def agreed_on(answers):
    """The ranks got the same report, for one gather each, and the first one printed it: return it."""
    assert len({answer.text for answer in answers}) == 1
    assert [answer.printed for answer in answers] == [answers[0].text + "\n"] + [""] * (len(answers) - 1)
    assert [answer.collectives for answer in answers] == [GATHERS] * len(answers)
    return answers[0]


def row(answer, rank):
    """A rank's cells."""
    return next(line.split() for line in answer.text.splitlines()[4:] if line.split()[:1] == [str(rank)])


def test_torchs_scaler_and_a_fused_optimizer_split(ranks):
    faults = [Fault(2, ranks.world_size - 1)]
    answer = agreed_on(ranks.run(trained, "torch", "fsdp1-full", "sharded", "adamw-fused", faults))
    others = "rank 0" if ranks.world_size == 2 else "ranks 0-2"
    last = f"rank {ranks.world_size - 1}"
    assert answer.verdict == "split"
    assert answer.differences == (
        f"scale: 32 on {others}; 8 on {last}",
        f"tracker: 0 on {others}; 1 on {last}",
        f"steps: 4 on {others}; 3 on {last}",
    )
    assert row(answer, 0) == ["0", "32", "0", "4"]
    assert row(answer, ranks.world_size - 1)[1:] == ["8", "1", "3"]
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
    faults = [Fault(2, 1), Fault(2, 3)]
    answer = agreed_on(four.run(trained, "ours", "hsdp2", "grad", "adamw", faults))
    assert answer.verdict == "agree"
    assert "6 replicated parameters." in answer.text


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


def test_fsdp1_needs_its_model_to_tell_that_nothing_is_sharded(two):
    answer = agreed_on(two.run(flipped_in, "fsdp1-no-shard", 1, with_model=False, replicated=True))
    assert answer.verdict == "agree"
    assert "FSDP1 shards" in answer.text


@pytest.mark.parametrize("layout", PLACEMENTS)
@pytest.mark.parametrize("bad", [NOBODY, 0, 3])
def test_dtensors_are_compared_at_equal_coordinates(four, layout, bad):
    answer = agreed_on(four.run(flipped_mesh, layout, bad))
    wrong = bad != NOBODY and layout != "sharded"
    assert answer.verdict == ("split" if wrong else "agree")
    assert ("DTensor shard " in answer.text) == (layout == "sharded")
    if wrong:
        told = {
            "replicated": {0: "rank 0 | ranks 1-3", 3: "ranks 0-2 | rank 3"},
            "hsdp": {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"},
            "partial": {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"},
            "tp": {0: "rank 0 | rank 1", 3: "rank 2 | rank 3"},
        }
        assert answer.differences[-1].endswith(f": {told[layout][bad]}")


@pytest.mark.parametrize("bad", [NOBODY, 1])
def test_dtensors_on_some_ranks_are_compared_among_these(four, bad):
    answer = agreed_on(four.run(on_some_ranks, bad))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    assert [row(answer, rank)[-2:] for rank in (2, 3)] == [["1", "equal"]] * 2
    assert "\nNot compared: 1 DTensor (on a mesh without this rank)." in answer.text
    if bad != NOBODY:
        assert answer.differences[-1].endswith(": rank 0 | rank 1")


def test_dtensors_around_tensors_of_a_class_of_its_own_are_not_compared(four):
    kinds = "on meta, sparse, quantized, lazy, or of a class of its own"
    for text in four.run(around_a_wrapper):
        assert f"\nNot compared: 1 parameter ({kinds}: no bits to read)." in text
        assert "replicated" not in text


def test_plain_parameters_that_differ_are_no_split_until_it_is_said(two):
    unsaid = agreed_on(two.run(own_parameters, replicated=False))
    assert unsaid.verdict == "agree"
    assert "Plain parameters: 1 of 2 differ: group 0 parameter 0 (3,). Nothing says" in unsaid.text
    told = agreed_on(two.run(own_parameters, replicated=True))
    assert told.verdict == "split"
    assert "Plain" not in told.text


def test_without_ddps_word_equal_parameters_are_reported_too(two):
    answer = agreed_on(two.run(flipped_in, "ddp", NOBODY, with_model=False))
    assert "Plain parameters: 6 of 6 are equal" in answer.text


def test_a_replica_of_another_shape_differs(two):
    assert agreed_on(two.run(own_shapes)).verdict == "split"


def test_what_ddp_ignores_is_not_taken_for_a_replica(two):
    answer = agreed_on(two.run(ignored_by_ddp))
    assert answer.verdict == "agree"
    assert "5 replicated parameters." in answer.text
    assert "1 of 1 differ: module.norm.weight." in answer.text


@pytest.mark.parametrize("bad", [NOBODY, 3])
@pytest.mark.parametrize("listed", [True, False])
def test_ddp_of_some_ranks_is_compared_among_them(four, bad, listed):
    answer = agreed_on(four.run(ddp_of_pairs, bad, listed))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    if bad != NOBODY:
        assert answer.differences[-1] == "  module.weight: rank 1 | rank 3"


@pytest.mark.parametrize("bad", [NOBODY, 3])
def test_shards_that_ddp_made_parameters_are_compared_among_its_ranks(four, bad):
    answer = agreed_on(four.run(ddp_over_tensor_parallel, bad))
    assert answer.verdict == ("agree" if bad == NOBODY else "split")
    if bad != NOBODY:
        assert answer.differences[1:] == ("  module.up.weight: rank 1 | rank 3",)


@pytest.mark.parametrize(("what", "text"), [("steps", "NotImplementedError: "), ("scaler", "TypeError: scaler must ")])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_is_a_row_for_all(two, bad, what, text):
    answer = agreed_on(two.run(a_rank_raises, bad, what))
    assert answer.verdict == "unknown"
    assert row(answer, bad)[1] == "error"
    assert f"\nrank {bad}: {text}" in answer.text
    assert "UNKNOWN" in answer.text


def test_a_scaler_that_is_off_on_one_rank_is_a_split(two):
    assert agreed_on(two.run(disabled_on, [1])).differences == (
        "scale: 8 (unused) on rank 0; disabled on rank 1",
    )
    assert agreed_on(two.run(disabled_on, [0, 1])).verdict == "agree"


def test_only_the_groups_ranks_take_part(four):
    *refused, first, second = four.run(in_group)
    assert all(isinstance(text, str) and "process_group must contain this rank" in text for text in refused)
    answer = agreed_on([first, second])
    assert answer.differences == ("scale: 4 on rank 2; 8 on rank 3",)


def test_each_optimizer_counts_for_itself(two):
    answer = agreed_on(two.run(lists_of, 3))
    assert answer.differences == ("steps of 1 (Adam): 1 on rank 0; 2 on rank 1",)
    assert row(answer, 0) == ["0", "8", "(unused)", "0", "1", "1", "-"]
    assert row(answer, 1) == ["1", "8", "(unused)", "0", "1", "2", "-"]

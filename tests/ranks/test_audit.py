"""The audit over ranks: it finds every split, and calls nothing a split that is none."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import scaler_triton
from ranks.cases import CollectiveCounter
from scaler_triton import GradScaler, ShardedGradScaler

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
NOBODY = -1


class Said(NamedTuple):
    """What an audit gave on one rank."""

    text: str
    printed: str
    verdict: str
    differences: tuple[str, ...]
    collectives: int


def device() -> torch.device:
    return torch.ones(()).device


def audited(optimizer: Any, scaler: Any = None, model: nn.Module | None = None, **options: Any) -> Said:
    """Audit, and see that nothing was changed."""
    scaler = GradScaler(device().type, init_scale=8.0) if scaler is None else scaler
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    before, file = held(optimizers, scaler), io.StringIO()
    with CollectiveCounter() as counter:
        report = scaler_triton.audit(optimizer, scaler, model, file=file, **options)
    assert held(optimizers, scaler) == before
    return Said(str(report), file.getvalue(), report.verdict, tuple(report.differences), counter.count)


def held(optimizers: list[Any], scaler: Any) -> list[object]:
    params = [param for optimizer in optimizers for param in params_of(optimizer)]
    lazy = getattr(scaler, "_scale", None), len(getattr(scaler, "_per_optimizer_states", ()))
    local = [str(local_of(param.detach()).reshape(-1).tolist()) for param in params if type(param) is not TwoTensor]
    return [*local, *lazy, torch.get_rng_state().tolist(), [str(optimizer.state) for optimizer in optimizers]]


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flip(tensor: Tensor, element: int = 0) -> None:
    """Change the last bit of one fp32 element."""
    local_of(tensor.detach()).view(-1).view(torch.int32)[element] ^= 1


def sgd(*params: Tensor) -> torch.optim.SGD:
    return torch.optim.SGD(list(params), lr=0.1)


def plain(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def square() -> DeviceMesh:
    return init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))


def net() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))


def fsdp1(strategy: str, orig: bool) -> Any:
    chosen = ShardingStrategy[strategy]
    return lambda m: FullyShardedDataParallel(m, sharding_strategy=chosen, device_id=device(), use_orig_params=orig)


def ddp_ignoring(model: nn.Module) -> nn.Module:
    """DDP that leaves one parameter to the ranks."""
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    wrapped = nn.parallel.DistributedDataParallel(model)
    model[0].weight.data.fill_(dist.get_rank())
    return wrapped


WRAPPERS = {
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp, but one": ddp_ignoring,
    "fsdp1": fsdp1("FULL_SHARD", True),
    "fsdp1, flat": fsdp1("FULL_SHARD", False),
    "no shard": fsdp1("NO_SHARD", True),
    "no shard, flat": fsdp1("NO_SHARD", False),
    "fsdp2": fully_shard,
    "hsdp2": lambda model: fully_shard(model, mesh=square()),
}


def trained(rank: int, cls: Any, wrapper: str, bad: list[int]) -> Said:
    """Train a wrapped model for four steps, in the third of which some ranks' gradients overflow, then audit."""
    scaler = cls(device().type, init_scale=8.0, growth_interval=2)
    model = WRAPPERS[wrapper](net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-4, fused=True)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        if step == 2 and rank in bad:
            grad = next(local for p in model.parameters() if p.grad is not None and (local := local_of(p.grad)).numel())
            grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return audited(optimizer, scaler, model)


def flipped(rank: int, wrapper: str, bad: int, with_model: bool = True, **options: Any) -> Said:
    """Audit a wrapped model, in which one bit of the bad rank's last parameter is flipped."""
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](net())
    if rank == bad:
        flip(list(model.parameters())[-1])
    return audited(sgd(*model.parameters()), None, model if with_model else None, **options)


def flipped_mesh(rank: int, placements: tuple[Any, Any], bad: int) -> Said:
    """Audit a DTensor on a 2 x 2 mesh, which holds the coordinates of its shard."""
    mesh = square()
    local = torch.ones(2, 3)
    for placement, at in zip(placements, mesh.get_coordinate(), strict=True):
        local += 0 if placement.is_replicate() else at + 1
    param = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    if rank == bad:
        flip(param, 5)
    return audited(sgd(param))


def on_two_of_four(rank: int, bad: int, opaque: bool = False) -> Said:
    """Audit a DTensor on the first two ranks, of an ordinary tensor or of one of a class of its own."""
    mesh = DeviceMesh(device().type, torch.tensor([0, 1], device="cpu"))
    local = TwoTensor(torch.ones(2, 3), torch.ones(2, 3)) if opaque else torch.ones(2, 3)
    param = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    if rank == bad:
        flip(param)
    if opaque:
        report = scaler_triton.audit(sgd(param), GradScaler(device().type), replicated=True, file=io.StringIO())
        return Said(str(report), "", report.verdict, (), 1)
    return audited(sgd(param, plain(2)), replicated=True)


def own_parameters(rank: int, replicated: bool) -> Said:
    """Audit a parameter of each rank's own, as in a pipeline, and one that is equal."""
    params = plain(3), plain(2)
    params[0].data.fill_(rank)
    return audited(sgd(*params), ShardedGradScaler(device().type), replicated=replicated)


def own_shapes(rank: int) -> Said:
    """Audit a parameter that differs in its shape only."""
    model = nn.ParameterDict({"weight": plain(2, 3) if rank else plain(3, 2)})
    return audited(sgd(*model.values()), None, model, replicated=True)


def ddp_of_pairs(rank: int, bad: int, tensor_parallel: bool) -> Said:
    """Audit DDP over pairs of ranks that differ from each other; with tensor parallelism after a step."""
    mesh = square()
    torch.manual_seed(0 if tensor_parallel else rank % 2)
    inner, scaler = net(), GradScaler(device().type, init_scale=8.0)
    if tensor_parallel:
        parallelize_module(inner, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        model = nn.parallel.DistributedDataParallel(inner, device_mesh=mesh["dp"])
        optimizer = sgd(*model.parameters())
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        model = nn.parallel.DistributedDataParallel(inner, process_group=mesh["dp"].get_group())
        del model._module_parameters  # a private name of torch's
        optimizer = sgd(*model.parameters())
    if rank == bad:
        flip(params_of(optimizer)[2])
    return audited(optimizer, scaler, model)


def a_rank_fails(rank: int, bad: int, what: str) -> Said:
    optimizer = sgd(plain(3))
    if rank == bad and what == "steps":
        optimizer.state[params_of(optimizer)[0]] = {"step": torch.ones((), device="meta")}
    return audited(optimizer, "none" if rank == bad and what == "scaler" else None)


def disabled_on(rank: int, ranks: list[int]) -> Said:
    return audited(sgd(plain(3)), GradScaler(device().type, init_scale=8.0, enabled=rank not in ranks))


def in_group(rank: int) -> Said | str:
    """Only the last two ranks are in the group."""
    group = dist.new_group([2, 3])
    try:
        return audited(sgd(plain(3)), GradScaler(device().type, init_scale=2.0**rank), process_group=group)
    except ValueError as error:
        return str(error)


def lists(rank: int) -> Said:
    """Two optimizers, the second of which stepped more often on one rank; and a third on the other."""
    optimizers = [cls([plain(2)]) for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)[: 2 + rank]]
    for number, optimizer in enumerate(optimizers):
        for _ in range(2 if rank and number == 1 else 1):
            params_of(optimizer)[0].grad = torch.ones(2)
            optimizer.step()
    return audited(optimizers)


def agreed(answers: list[Said]) -> Said:
    """The ranks got the same report, for one gather each, and the first one printed it."""
    assert len({answer.text for answer in answers}) == 1
    assert [answer.printed for answer in answers] == [answers[0].text + "\n"] + [""] * (len(answers) - 1)
    assert [answer.collectives for answer in answers] == [1] * len(answers)
    return answers[0]


def row(answer: Said, rank: int) -> list[str]:
    """A rank's cells."""
    return next(line.split() for line in answer.text.splitlines()[4:] if line.split()[:1] == [str(rank)])


def test_torchs_scaler_and_a_fused_optimizer_split_and_the_pages_show_it(four: Any) -> None:
    answer = agreed(four.run(trained, TorchSharded, "fsdp1", [1]))
    assert answer.differences == (
        "scale: 32 on ranks 0, 2-3; 8 on rank 1",
        "tracker: 0 on ranks 0, 2-3; 1 on rank 1",
        "steps: 4 on ranks 0, 2-3; 3 on rank 1",
    )
    for page in ("README.md", "docs/why-skipped.md"):
        assert f"\n{answer.text}\n```" in (ROOT / page).read_text()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "no shard", "fsdp2", "hsdp2"])
def test_ours_agree(four: Any, wrapper: str) -> None:
    replicated = wrapper in ("ddp", "no shard", "hsdp2")
    bad = {"ddp": [0, 1, 2, 3], "no shard": [0, 1, 2, 3], "hsdp2": [1, 3]}.get(wrapper, [1])
    answer = agreed(four.run(trained, ShardedGradScaler, wrapper, bad))
    assert answer.verdict == "agree"
    assert "AGREE: every rank holds the same scale, tracker, steps" in answer.text
    assert row(answer, 0)[1] == "8"
    assert ("6 replicated parameters." in answer.text) == replicated


@pytest.mark.parametrize("wrapper", ["ddp", "no shard", "no shard, flat"])
@pytest.mark.parametrize("bad", [0, 2])
def test_one_flipped_bit_of_a_replica_is_a_split(four: Any, wrapper: str, bad: int) -> None:
    answer = agreed(four.run(flipped, wrapper, bad))
    assert answer.differences[0].startswith("replicated parameters: 1 of ")
    assert answer.differences[1].endswith(": rank 0 | ranks 1-3" if bad == 0 else ": ranks 0-1, 3 | rank 2")
    assert "differ" in row(answer, 0)


def test_hsdp_compares_within_its_replicas_only(four: Any) -> None:
    answer = agreed(four.run(flipped, "hsdp2", 3))
    assert answer.differences[1].endswith(": rank 1 | rank 3")
    assert [row(answer, rank)[-2:] for rank in range(4)] == [["6", "equal"], ["6", "differ"]] * 2


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [("fsdp1", {}), ("fsdp1, flat", {}), ("fsdp2", {}), ("no shard", {"with_model": False, "replicated": True})],
)
def test_shards_are_no_replicas(two: Any, wrapper: str, options: dict[str, Any]) -> None:
    answer = agreed(two.run(flipped, wrapper, 1, **options))
    assert (answer.verdict, "replicated" in answer.text) == ("agree", False)
    assert re.search(r"^Not compared: \d (FSDP1|DTensor) shards? \(", answer.text, re.MULTILINE)


@pytest.mark.parametrize("bad", [NOBODY, 0, 3])
@pytest.mark.parametrize(
    ("placements", "apart"),
    [
        ((Replicate(), Replicate()), {0: "rank 0 | ranks 1-3", 3: "ranks 0-2 | rank 3"}),
        ((Replicate(), Shard(0)), {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"}),
        ((Replicate(), Partial()), {0: "rank 0 | rank 2", 3: "rank 1 | rank 3"}),
        ((Shard(0), Replicate()), {0: "rank 0 | rank 1", 3: "rank 2 | rank 3"}),
        ((Shard(0), Shard(1)), {}),
    ],
)
def test_dtensors_are_compared_at_equal_coordinates(
    four: Any, placements: Any, apart: dict[int, str], bad: int
) -> None:
    answer = agreed(four.run(flipped_mesh, placements, bad))
    assert (answer.verdict, "DTensor shard " in answer.text) == ("split" if bad in apart else "agree", not apart)
    assert bad not in apart or answer.differences[-1].endswith(f": {apart[bad]}")


def test_dtensors_on_some_ranks_are_compared_among_these(four: Any) -> None:
    for bad in (NOBODY, 1):
        answer = agreed(four.run(on_two_of_four, bad))
        assert answer.verdict == ("agree" if bad == NOBODY else "split")
        assert [row(answer, rank)[-2:] for rank in (2, 3)] == [["1", "equal"]] * 2
        assert "\nNot compared: 1 DTensor (on a mesh without this rank)." in answer.text
    assert answer.differences[-1].endswith(": rank 0 | rank 1")
    opaque = four.run(on_two_of_four, NOBODY, True)[0].text
    kinds = "on meta, sparse, quantized, lazy, or of a class of its own"
    assert f"\nNot compared: 1 parameter ({kinds}: no bits to read)." in opaque


def test_plain_parameters_that_differ_are_no_split_unless_they_are_replicas(two: Any) -> None:
    unsaid = agreed(two.run(own_parameters, replicated=False))
    assert unsaid.verdict == "agree"
    assert "Plain parameters: 1 of 2 differ: group 0 parameter 0 (3,). Nothing says" in unsaid.text
    told = agreed(two.run(own_parameters, replicated=True))
    assert (told.verdict, "Plain" in told.text) == ("split", False)
    assert agreed(two.run(own_shapes)).verdict == "split"
    assert "6 of 6 are equal" in agreed(two.run(flipped, "ddp", NOBODY, with_model=False)).text


def test_what_ddp_ignores_is_not_taken_for_a_replica(two: Any) -> None:
    answer = agreed(two.run(flipped, "ddp, but one", NOBODY))
    assert (answer.verdict, "5 replicated parameters." in answer.text) == ("agree", True)
    assert "1 of 1 differ: module.0.weight." in answer.text


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_ddp_of_some_ranks_is_compared_among_them(four: Any, tensor_parallel: bool) -> None:
    assert agreed(four.run(ddp_of_pairs, NOBODY, tensor_parallel)).verdict == "agree"
    answer = agreed(four.run(ddp_of_pairs, 3, tensor_parallel))
    assert answer.differences[1:] == ("  module.1.weight: rank 1 | rank 3",)


@pytest.mark.parametrize(("what", "text"), [("steps", "RuntimeError: "), ("scaler", "TypeError: scaler must ")])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_is_a_row_for_all(two: Any, bad: int, what: str, text: str) -> None:
    answer = agreed(two.run(a_rank_fails, bad, what))
    assert (answer.verdict, row(answer, bad)[1]) == ("unknown", "error")
    assert f"\nrank {bad}: {text}" in answer.text


def test_a_scaler_that_is_off_on_one_rank_is_a_split(two: Any) -> None:
    off = agreed(two.run(disabled_on, [1]))
    assert off.differences == ("scale: 8 (unused) on rank 0; disabled on rank 1",)
    assert agreed(two.run(disabled_on, [0, 1])).verdict == "agree"


def test_only_the_groups_ranks_take_part(four: Any) -> None:
    *refused, first, second = four.run(in_group)
    assert all("process_group must contain this rank" in text for text in refused)
    assert agreed([first, second]).differences == ("scale: 4 (unused) on rank 2; 8 (unused) on rank 3",)


def test_each_optimizer_counts_for_itself(two: Any) -> None:
    answer = agreed(two.run(lists))
    assert answer.differences == ("steps of 1 (Adam): 1 on rank 0; 2 on rank 1",)
    assert row(answer, 1) == ["1", "8", "(unused)", "0", "1", "2", "-"]

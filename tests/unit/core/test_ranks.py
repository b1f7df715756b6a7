"""Who must agree: by process group or by the parameters' meshes; and where what they reduce or gather travels."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placed import fsdp1, mesh_of, on, plain
from torch import Tensor

from scaler_triton.core import ranks
from scaler_triton.core.check import Checks
from scaler_triton.core.ranks import Ranks, group_ranks, mesh_ranks
from scaler_triton.core.update import Counters

CPU = torch.device("cpu")
BARE: Any = SimpleNamespace(allreduce=None, size=lambda: 3, rank=lambda: 2)
ALONE: Any = SimpleNamespace(allreduce=None, size=lambda: 1, rank=lambda: 0)


# Groups


def test_without_other_ranks_nobody_must_agree(world: Any) -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        group_ranks([], None)
    assert (mesh_ranks([plain()]), ranks.default_group(), ranks.several_ranks()) == (None, None, False)
    assert (ranks.own_rank(None), ranks.gathering_group(None)) == (0, None)
    world(1)
    assert (group_ranks([], None), mesh_ranks([on(mesh_of(1))]), ranks.several_ranks()) == (None, None, False)


def test_a_groups_ranks_are_all_of_it(world: Any) -> None:
    world(4, 3)
    group = dist.new_group([1, 3])
    assert group_ranks([plain()], None) == Ranks((dist.group.WORLD,), (0, 1, 2, 3))
    assert group_ranks([plain()], group) == Ranks((group,), (1, 3))
    assert (ranks.own_rank(None), ranks.several_ranks(), ranks.gathering_group(None)) == (3, True, dist.group.WORLD)
    assert group_ranks([], dist.new_group([3])) is None


def test_a_group_must_hold_this_rank_and_the_parameters_meshes(world: Any) -> None:
    world(4)
    with pytest.raises(ValueError, match="^process_group must contain this rank, 0, got a group made for other ranks$"):
        group_ranks([], dist.new_group([1, 2]))
    text = r"^process_group must contain every rank of DeviceMesh.* got a group of ranks \[0, 2\] without \[1, 3\]$"
    with pytest.raises(ValueError, match=text):
        group_ranks([plain(), on(mesh_of(4))], dist.new_group([0, 2]))


@pytest.mark.parametrize(
    ("group", "error", "text"),
    [
        ([0, 1], TypeError, "^process_group must be a torch.distributed.ProcessGroup, got list$"),
        (dist.GroupMember.NON_GROUP_MEMBER, ValueError, "^process_group must contain this rank, 0, got a group made"),
    ],
)
def test_what_is_no_group_is_refused(group: Any, error: type[Exception], text: str, world: Any) -> None:
    world(2)
    with pytest.raises(error, match=text):
        ranks.checked_group(group)


def test_a_bare_group_is_taken_as_it_is(world: Any) -> None:
    """Without a default group, too: torchft makes such ones."""
    for _ in range(2):
        assert ranks.is_bare(BARE)
        assert group_ranks([plain()], BARE) == Ranks((BARE,), (0, 1, 2))
        assert group_ranks([plain()], ALONE) is None
        assert ranks.own_rank(BARE) == (0 if dist.is_initialized() else 2)
        if not dist.is_initialized():
            world(4)
    assert not ranks.is_bare(dist.group.WORLD)
    assert not ranks.is_bare(None)


def test_a_group_that_torch_does_not_know_is_bare(world: Any) -> None:
    """A destroyed one, and one of somebody's own that torch knows under this rank alone."""
    world(2)
    gone, own = dist.new_group([0, 1]), dist.new_group([0])
    dist.destroy_process_group(gone)
    assert ranks.is_bare(gone)
    kind = type("Own", (dist.ProcessGroup,), {"size": lambda self: 2})
    spans: Any = kind(0, 2)
    dist.distributed_c10d._world.pg_group_ranks[spans] = {0: 0}
    dist.distributed_c10d._world.pg_map[spans] = ("own", None)
    assert ranks.is_bare(spans)
    assert not ranks.is_bare(own)


# Meshes


def test_more_dimensions_agree_by_the_world_or_by_a_group_each(world: Any) -> None:
    world(8)
    whole = mesh_of(2, 4)
    everybody = Ranks((dist.group.WORLD,), tuple(range(8)))
    assert mesh_ranks([on(whole)]) == mesh_ranks([on(whole["a"]), on(whole["b"])]) == everybody
    half = mesh_of(ranks=[[0, 1], [2, 3]])
    found = mesh_ranks([on(half)])
    assert found == Ranks((half.get_group(0), half.get_group(1)), (0, 1, 2, 3))
    flat = mesh_of(ranks=[[0], [2]])  # a dimension of one rank needs no reduction
    assert mesh_ranks([on(flat)]) == Ranks((flat.get_group(0),), (0, 2))


def test_of_several_roots_the_widest_decides_the_one_with_fewest_dimensions(world: Any) -> None:
    world(8)
    line, square, part = (mesh_of(ranks=each) for each in ([0, 1, 2, 3], [[0, 1], [2, 3]], [0, 1]))
    for meshes in ((part, square, line), (line, part, square)):
        assert mesh_ranks(map(on, meshes)) == Ranks((line.get_group(),), (0, 1, 2, 3))
    assert mesh_ranks([on(mesh_of(2, 4)), on(line)]) == Ranks((dist.group.WORLD,), tuple(range(8)))
    with pytest.raises(ValueError, match=r"^process_group is needed: .* different ranks \[\[0, 1\], \[0, 2\]\], so "):
        mesh_ranks([on(part), on(mesh_of(ranks=[0, 2]))])


def test_this_rank_must_be_in_the_mesh(world: Any) -> None:
    world(4, 3)
    with pytest.raises(ValueError, match="^process_group must contain this rank, 3, got parameters on DeviceMesh"):
        mesh_ranks([on(mesh_of(ranks=[0, 1]))])


def test_where_this_torch_does_not_tell_a_root_the_whole_world_agrees(world: Any, monkeypatch: Any) -> None:
    world(4)
    mesh: Any = SimpleNamespace(ndim=2, mesh=torch.tensor([[0, 1]]))
    monkeypatch.setattr(ranks, "_meshes", lambda parameters: [mesh])
    assert mesh_ranks([]) == Ranks((dist.group.WORLD,), (0, 1, 2, 3))


# A scaler's


@pytest.mark.parametrize("size", [1, 2])
def test_fsdp1_parameters_are_warned_of_once_where_there_are_other_ranks(size: int, world: Any) -> None:
    world(size)
    checks = Checks(Counters(), sharded=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [checks.find_peers([fsdp1()], None) for _ in range(2)] == [None, None]
    assert [each.filename for each in caught] == [__file__] * (size - 1)


def test_strictly_fsdp1_parameters_are_refused(world: Any, monkeypatch: Any) -> None:
    world(2)
    monkeypatch.setattr(ranks, "strict", True)
    with pytest.raises(RuntimeError, match="^GradScaler cannot tell which ranks share FullyShardedDataParallel's"):
        Checks(Counters(), sharded=False).find_peers([fsdp1()], None)
    for sharded, group in ((True, None), (False, dist.group.WORLD)):
        found = Checks(Counters(), sharded=sharded).find_peers([fsdp1()], group)
        assert found == Ranks((dist.group.WORLD,), (0, 1))


def test_optimizers_on_meshes_over_other_ranks_are_warned_of_once() -> None:
    groups: Any = ((1,), (2,), (3,))
    mine, same, other = map(Ranks, groups, ((0, 1), (0, 1), (0, 2)))
    known: set[str] = set()
    ranks.warn_if_apart(known, None, [other])
    ranks.warn_if_apart(known, mine, [None, same])
    with pytest.warns(UserWarning, match=r"over different ranks, here \[0, 2\] and \[0, 1\]: an overflow") as warned:
        ranks.warn_if_apart(known, mine, [same, other])
    ranks.warn_if_apart(known, mine, [other])
    assert [each.filename for each in warned] == [__file__]


# What travels


@pytest.mark.parametrize(
    ("config", "gpu", "bound", "device", "where"),
    [
        ("cpu:gloo,cuda:nccl", True, None, "cpu", "cpu"),
        ("cuda:nccl", True, None, "cpu", "cuda:3"),  # NCCL alone takes no host tensors
        ("cuda:nccl", False, None, "cpu", "cpu"),
        ("cuda:nccl,xpu:xccl", False, None, "cpu", "cpu"),
        ("cpu:gloo", True, None, "cuda:0", "cpu"),
        # By `init_process_group(device_id=)`: where `set_device` was not called, the current one is another rank's.
        ("cuda:nccl", True, "cuda:5", "cpu", "cuda:5"),
        ("cuda:nccl", True, "cuda:5", "cuda:0", "cuda:5"),
        ("cpu:gloo,cuda:nccl", True, "cuda:5", "cuda:0", "cuda:5"),
        ("cpu:gloo,cuda:nccl", True, "cuda:5", "cpu", "cpu"),
        ("cpu:gloo", True, "cuda:5", "cuda:0", "cpu"),
    ],
)
def test_a_flag_travels_where_the_group_reduces(
    config: str, gpu: bool, bound: str | None, device: str, where: str, monkeypatch: Any
) -> None:
    module = SimpleNamespace(is_available=lambda: gpu, current_device=lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    group: Any = SimpleNamespace(bound_device_id=torch.device(bound)) if bound else SimpleNamespace()
    assert ranks._serving_device(group, torch.device(device)) == torch.device(where)
    assert ranks._serving_device(BARE, torch.device(device)) == torch.device(device)


@pytest.mark.parametrize("away", [False, True])
def test_a_reduction_is_made_over_each_group_in_turn_and_comes_back(away: bool, monkeypatch: Any) -> None:
    status, sent = torch.tensor([0.0, 1.0]), []

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        sent.append((op, group, tensor.data_ptr() == status.data_ptr()))
        tensor += 1.0

    # "cpu:0" is not "cpu": as another device, as far as this code can tell.
    monkeypatch.setattr(ranks, "_serving_device", lambda group, device: torch.device("cpu", 0) if away else device)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    both = Ranks(("one", "two"), (0, 1, 2, 3))  # type: ignore[arg-type]
    both.reduce_(status, "MAX")
    both.reduce_(status, "SUM")
    operations = [dist.ReduceOp.MAX] * 2 + [dist.ReduceOp.SUM] * 2
    assert sent == list(zip(operations, ["one", "two"] * 2, [not away] * 4, strict=True))
    assert status.tolist() == [4.0, 5.0]


FITS = ranks._AT_ONCE - ranks._LENGTH


@pytest.mark.parametrize("theirs", [0, 1, FITS, FITS + 1, 3 * FITS])
@pytest.mark.parametrize("mine", [0, FITS, FITS + 7])
def test_bytes_of_any_length_are_gathered_in_one_round_or_two(mine: int, theirs: int, monkeypatch: Any) -> None:
    other = (bytes(range(256)) * (theirs // 256 + 1))[:theirs]
    message, rounds = theirs.to_bytes(ranks._LENGTH, "little") + other, []

    def all_gather(parts: list[Tensor], own: Tensor, group: Any) -> None:
        size, sent = own.numel(), sum(rounds)
        parts[0].copy_(own)
        data = message[sent : sent + size].ljust(size, b"\0")
        parts[1].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        rounds.append(size)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    data = b"\xff" * mine
    assert ranks.gather_bytes("audit", data, BARE, CPU) == [data, other]
    longest = max(mine, theirs)
    assert rounds == [ranks._AT_ONCE] + [longest - FITS] * (longest > FITS)


GATHERS = [("cpu", "cuda:2", "cpu"), ("cuda:0", "cuda:2", "cuda:2"), ("cuda:0", "cuda", "cuda:0")]


@pytest.mark.parametrize(("served", "home", "where"), [*GATHERS, ("cuda:0", "cpu", "cuda:0")])
def test_a_gpu_gathers_where_the_scale_is(served: str, home: str, where: str, monkeypatch: Any) -> None:
    """Not on the current device, which is every rank's first GPU where `set_device` was not called."""
    used: list[torch.device] = []

    def all_gather(data: bytes, size: int, group: Any, device: torch.device) -> list[bytes]:
        used.append(device)
        return [data]

    monkeypatch.setattr(ranks, "_serving_device", lambda group, device: torch.device(served))
    monkeypatch.setattr(ranks, "_all_gather", all_gather)
    monkeypatch.setattr(ranks, "_store_of", lambda group: None)
    assert ranks.gather_bytes("audit", b"ab", object(), torch.device(home)) == [b"ab"]
    assert used == [torch.device(where)]


def test_ranks_meet_where_torch_tells_their_store(world: Any, monkeypatch: Any) -> None:
    """Not over a fake backend, a bare group, nor where this torch lacks the private name."""
    world(2)
    monkeypatch.setattr(ranks, "_all_gather", lambda data, size, group, device: [data])
    monkeypatch.setattr(ranks, "meet", lambda store, size, call: met.append((store, size, call)))
    met: list[Any] = []

    def gathered(group: Any) -> list[Any]:
        met.clear()
        assert ranks.gather_bytes("audit", b"ab", group, CPU) == [b"ab"]
        return met

    assert gathered(dist.group.WORLD) == gathered(BARE) == []
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    ((store, size, call),) = gathered(dist.group.WORLD)
    assert (type(store), size, call) == (dist.PrefixStore, 2, "audit")
    monkeypatch.delattr(dist.distributed_c10d, "_get_process_group_store")
    assert gathered(dist.group.WORLD) == []

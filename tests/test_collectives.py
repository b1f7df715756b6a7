"""Who must agree where this torch does not tell, and where the flag travels when the group serves another device."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scaler_triton import GradScaler, agreeing, agreement, collectives
from scaler_triton.auditing import audit
from scaler_triton.demo import rank_process

CPU = torch.device("cpu")


def test_ranks_start_on_a_torch_that_cannot_lower_their_limit(monkeypatch: Any) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout", raising=False)
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    rank_process.limit_collectives(1.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp1_parameters_are_warned_of_where_there_are_other_ranks(ranks: int, monkeypatch: Any) -> None:
    """Difference 10 from torch."""
    monkeypatch.setattr(agreeing, "has_fsdp1", lambda parameters: True)
    monkeypatch.setattr(collectives, "default_group", object)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    scaler = GradScaler("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler._warn_of_fsdp1([])
    assert len(caught) == ranks - 1


def test_without_a_root_mesh_the_whole_world_agrees(monkeypatch: Any) -> None:
    assert agreement._root_of(object()) is None  # type: ignore[arg-type]
    mesh = SimpleNamespace(ndim=2, mesh=torch.tensor([[0, 1]]))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(agreement, "_meshes", lambda parameters: [mesh])
    everybody = agreement.inferred_agreement([])
    assert everybody is not None
    assert (everybody.groups, everybody.size) == ((dist.group.WORLD,), 4)


@pytest.mark.parametrize(
    ("config", "gpu", "where"),
    [
        ("cpu:gloo,cuda:nccl", True, CPU),
        ("cuda:nccl", True, torch.device("cuda", 3)),
        ("cuda:nccl", False, CPU),
        ("cuda:nccl,xpu:xccl", False, CPU),
    ],
)
def test_a_host_flag_travels_where_the_group_reduces(
    config: str, gpu: bool, where: torch.device, monkeypatch: Any
) -> None:
    """NCCL alone takes no host tensors: parameters offloaded to the host have their flag there."""
    module = SimpleNamespace(is_available=lambda: gpu, current_device=lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert collectives._serving_device(object(), CPU) == where  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "device", "where"),
    [
        ("cuda:nccl", "cpu", "cuda:5"),
        ("cuda:nccl", "cuda:0", "cuda:5"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "cuda:5"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo", "cuda:0", "cpu"),
    ],
)
def test_a_group_that_is_bound_to_a_device_gets_no_other_of_its_type(
    config: str, device: str, where: str, monkeypatch: Any
) -> None:
    """By `init_process_group(device_id=)`: where `set_device` was not called, the current one is another rank's."""
    group: Any = SimpleNamespace(bound_device_id=torch.device("cuda:5"))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert collectives._serving_device(group, torch.device(device)) == torch.device(where)


@pytest.mark.parametrize(
    ("served", "home", "where"),
    [
        ("cpu", "cuda:2", "cpu"),
        ("cuda:0", "cuda:2", "cuda:2"),
        ("cuda:0", "cuda", "cuda:0"),
        ("cuda:0", "cpu", "cuda:0"),
    ],
)
def test_what_a_gpu_gathers_is_where_the_scale_is(served: str, home: str, where: str, monkeypatch: Any) -> None:
    """Not on the current device, which is every rank's first GPU where `set_device` was not called."""
    monkeypatch.setattr(collectives, "_serving_device", lambda group, device: torch.device(served))
    assert collectives._gathering_device(object(), torch.device(home)) == torch.device(where)


def test_an_audit_gathers_where_the_scale_is() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert audit._home(scaler) == CPU
    scaler._scale = torch.ones((), device="meta")
    assert audit._home(scaler) == torch.device("meta")


def test_what_was_reduced_elsewhere_comes_back(monkeypatch: Any) -> None:
    status, sent = torch.tensor([0.0, 1.0]), []

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        sent.append((tensor.tolist(), tensor.data_ptr() == status.data_ptr(), op, group))
        tensor.fill_(1.0)

    # "cpu:0" is not "cpu": as another device, as far as this code can tell.
    monkeypatch.setattr(collectives, "_serving_device", lambda group, device: torch.device("cpu", 0))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    agreement.Agreement(("the group",), (0, 1)).maximum_(status)  # type: ignore[arg-type]
    assert sent == [([0.0, 1.0], False, dist.ReduceOp.MAX, "the group")]
    assert status.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("enabled", "used", "where"), [(True, False, "meta"), (True, True, "meta"), (False, False, "cpu")]
)
def test_a_bare_group_gathers_a_report_where_it_reduces_the_flag(
    enabled: bool, used: bool, where: str, monkeypatch: Any
) -> None:
    """torchft's NCCL groups take no host tensors."""
    seen: list[torch.device] = []

    def all_gather(parts: list[Tensor], mine: Tensor, group: Any) -> None:
        seen.extend({each.device for each in (*parts, mine)})
        raise ConnectionError

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    group: Any = SimpleNamespace(allreduce=None, rank=lambda: 0)
    scaler = GradScaler("cpu", enabled=enabled, process_group=group)
    scaler._device = "meta"  # stands for a GPU
    if used:
        scaler._scale = torch.ones((), device="meta")
    with pytest.raises(ConnectionError):
        scaler.overflow_report(gather=True)
    assert seen == [torch.device(where)]

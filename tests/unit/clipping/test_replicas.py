"""How many ranks hold a shard: told by placements, by FSDP1's modules, else all."""

from typing import Any

import pytest
import torch
from placed import fsdp1, mesh_of, on, plain
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from scaler_triton.clipping import replicas
from scaler_triton.core.ranks import Ranks


def test_each_shard_is_counted_once(world: Any) -> None:
    world(2)
    shard = DTensor.from_local(torch.ones(2), mesh_of(2), [Shard(0)], run_check=False)
    by_ddp: Any = plain()
    by_ddp._st_info = shard
    held = [plain(), nn.Parameter(shard), on(mesh_of(2)), by_ddp]
    for count, want in ((2, [2, 1, 2, 1]), (4, [4, 2, 4, 2]), (1, [1, 1, 1, 1])):
        assert replicas.replicas_of(held, Ranks((), tuple(range(count))), None) == want
    assert replicas.replicas_of(held, None, None) == [1] * 4


def test_fsdp1s_modules_are_asked(world: Any, monkeypatch: Any) -> None:
    world(2)
    flat, model = fsdp1(), nn.ReLU()
    for pieces, count, want in ((1, 2, 2), (2, 4, 2), (2, 2, 1)):
        monkeypatch.setattr(replicas, "_fsdp1_shards", {model: {id(flat): pieces}}.get)
        assert replicas.replicas_of([plain(), flat], Ranks((), tuple(range(count))), model) == [count, want]
    with pytest.raises(ValueError, match="^process_group is needed: parameter 1 .*, cut into 2 pieces, .* that of 1;"):
        replicas.replicas_of([plain(), flat], None, model)

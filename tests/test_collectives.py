"""Who must agree, where this torch does not tell which mesh another was sliced from."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from scaler_triton import collectives
from scaler_triton.demo import ranks


def test_ranks_start_on_a_torch_that_cannot_lower_their_limit(monkeypatch: Any) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout", raising=False)
    ranks._limit_collectives(1.0)


def test_without_a_root_mesh_the_whole_world_agrees(monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert collectives._root_of(object()) is None  # type: ignore[arg-type]
    assert collectives._root_ranks([object()]) == (0, 1, 2, 3)  # type: ignore[list-item]

"""Ranks on the GPU: two over gloo where that runs, else one over NCCL; the note says which."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from scaler_triton.demo.checks import judge
from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.device import place
from scaler_triton.demo.show import train_ranks
from scaler_triton.demo.single_process import train_reference

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

tried_once = cache(place)  # a mode is tried in ranks of its own, and one that hangs takes its time


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp1", "fsdp2"])
def test_ranks_agree_on_the_gpu(
    mode: str, optimizer: str, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    placement = tried_once(mode)
    record_property("placement", placement.note)
    with capsys.disabled():
        print(f"\n{mode}: {placement.note}")
    assert placement.device_type == "cuda"
    config = DemoConfig("ours", mode, optimizer, 12, placement.ranks, placement.device_type)
    results = train_ranks(config, placement)
    assert [result.error for result in results] == [None] * placement.ranks
    failed = [
        check.text for check in judge([result.value for result in results], train_reference(config)) if not check.ok
    ]
    assert failed == []

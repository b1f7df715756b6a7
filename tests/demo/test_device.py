"""Where the ranks go, on machines that are not this one."""

from __future__ import annotations

import pytest
import torch

from scaler_triton.demo import device
from scaler_triton.demo.device import Placement, place
from scaler_triton.demo.ranks import RankResult, RankTimeout


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """A machine with so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "gloo_works", "mode", "where"),
    [
        (0, False, "fsdp2", ("cpu", "gloo", 2)),
        (0, False, "single", ("cpu", "gloo", 1)),
        (1, True, "fsdp2", ("cuda", "gloo", 2)),
        (1, False, "fsdp2", ("cuda", "nccl", 1)),
        (1, False, "single", ("cuda", "nccl", 1)),
        (4, False, "ddp", ("cuda", "nccl", 2)),
    ],
)
def test_placement(
    gpus: int, gloo_works: bool, mode: str, where: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, gpus)
    monkeypatch.setattr(device, "one_gpu_gloo_works", lambda mode, ranks: gloo_works)
    placement = place(mode)
    assert placement == Placement(*where, placement.note)
    if gpus == 1 and mode != "single" and not gloo_works:
        assert "only 1 rank" in placement.note


def test_without_a_gpu_the_record_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, 0)
    device.main()
    assert capsys.readouterr().out == "no GPU\n"


def test_the_record_gives_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, 1)
    answers = {"ddp": [RankResult(0), RankResult(1)], "fsdp1": [RankResult(0), RankResult(1, error="E: no")]}

    def run(self: object, function: object, mode: str, ranks: int, timeout: float) -> list[RankResult]:
        if mode == "fsdp2":
            raise RankTimeout("late", [RankResult(0, error="RankTimeout: no answer"), RankResult(1)])
        return answers[mode]

    monkeypatch.setattr(device.RankPool, "run", run)
    device.main()
    assert capsys.readouterr().out.splitlines() == [
        "ddp with 2 gloo ranks on one GPU: yes",
        "fsdp1 with 2 gloo ranks on one GPU: no: E: no",
        "fsdp2 with 2 gloo ranks on one GPU: no: RankTimeout: no answer",
    ]

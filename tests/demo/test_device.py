"""Where the ranks go, on machines that are not this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaler_triton.demo import device
from scaler_triton.demo.device import Placement, place
from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankTimeout

ROOT = Path(__file__).parents[2]


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
    monkeypatch.setattr(device, "why_not_one_gpu_gloo", lambda mode: "" if gloo_works else "E: no")
    placement = place(mode)
    assert placement == Placement(*where, placement.note)
    if gpus == 1 and mode != "single" and not gloo_works:
        assert "only 1 rank" in placement.note


def test_without_a_gpu_the_record_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, 0)
    device.main()
    assert capsys.readouterr().out == "no GPU\n"


def test_the_record_is_a_program() -> None:
    """As `make gpu-tests` calls it."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "scaler_triton.demo.device"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "no GPU\n"


def test_trials_that_all_hang_are_all_recorded() -> None:
    (limit,) = re.findall(r"timeout (\d+) python3 -m scaler_triton.demo.device", (ROOT / "Makefile").read_text())
    assert int(limit) > 3 * device.TRIAL_LIMIT


def test_ranks_that_do_not_start_are_no_ranks_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise RuntimeError("rank 0 did not start: E: no\nTraceback")

    monkeypatch.setattr(device.RankPool, "run", run)
    assert device.why_not_one_gpu_gloo("fsdp2") == "rank 0 did not start: E: no"


def test_ranks_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    used = [device.use_device("cuda", rank) for rank in range(3)]
    assert used == current == [torch.device("cuda", index) for index in (0, 1, 0)]


def test_the_record_gives_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, 1)
    answers = {"ddp": [RankResult(0), RankResult(1)], "fsdp1": [RankResult(0), RankResult(1, error="E: no")]}

    def run(self: object, function: object, mode: str, timeout: float) -> list[RankResult]:
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

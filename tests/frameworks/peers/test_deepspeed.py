"""DeepSpeed's own loss scalers beside ours: a run that changes over keeps its scale, but for what the page says."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import started, update
from side_by_side import imported, trace

from scaler_triton import GradScaler, ShardedGradScaler, SkipStreakError
from scaler_triton.migration import from_deepspeed

theirs = imported("deepspeed.runtime.fp16.loss_scaler")
fused = imported("deepspeed.runtime.fp16.fused_optimizer")
unfused = imported("deepspeed.runtime.fp16.unfused_optimizer")

HERE = Path(__file__).parent
BOTH = pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask for their rank before they log."""
    for module in (theirs, unfused):
        monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 0))
    for cls in (GradScaler, ShardedGradScaler):
        monkeypatch.setattr(cls, "_is_sharded", False)


def drawn(draw: random.Random) -> dict[str, Any]:
    """Return what DeepSpeed's scaler is built with, but for whether it raises at the lowest scale."""
    return {
        "init_scale": 2.0 ** draw.randint(3, 16),
        "scale_window": draw.randint(1, 6),
        "min_scale": 2.0 ** draw.randint(0, 3),
        "delayed_shift": draw.randint(1, 4),
        "consecutive_hysteresis": draw.random() < 0.5,
    }


def built(**numbers: Any) -> Any:
    return theirs.CreateLossScaler(torch.half, 1.0, True, {"raise_error_at_min_scale": False, **numbers})


def good_steps(run: Any) -> int:
    return int(run.cur_iter - run.last_overflow_iter - 1)


def converted(cls: type, state: dict[str, Any]) -> Any:
    ours = started(cls, "cpu")
    ours.load_state_dict(from_deepspeed(state))
    return ours


def scale_after(run: Any, bad: bool) -> float:
    run.update_scale(bad)
    return float(run.cur_scale)


@BOTH
def test_a_run_goes_on_as_it_would_have(cls: type) -> None:
    """All of it: the one good step more that DeepSpeed needs after an overflow is given to it here."""
    seen = {"grew": 0, "backed off": 0, "held": 0, "at the bottom": 0}
    for seed in range(16):
        draw = random.Random(seed)
        numbers = drawn(draw)
        run, bads = built(**numbers), trace(draw)
        for step, bad in enumerate(bads):
            if step % 12 == 0:
                other, ours = copy.deepcopy(run), converted(cls, vars(run))
                for later, each in enumerate(bads[step:], step):
                    if not each and good_steps(other) == 0:
                        other.update_scale(False)
                    assert update(ours, each) == scale_after(other, each), (seed, numbers, step, later)
            before = run.cur_scale
            after = scale_after(run, bad)
            seen["grew"] += after > before
            seen["backed off"] += after < before
            seen["held"] += bad and after == before > numbers["min_scale"]
            seen["at the bottom"] += bad and after == numbers["min_scale"]
    assert min(seen.values()) > 30, seen


def test_until_a_growth_after_an_overflow_nothing_differs_and_that_comes_a_step_earlier() -> None:
    """As docs/checkpoints.md says of a run that is past its first good step."""
    growths = 0
    for seed in range(40):
        draw = random.Random(seed)
        run = built(**drawn(draw), raise_error_at_min_scale=False)
        for bad in [*trace(draw), False]:
            run.update_scale(bad)
        if good_steps(run) == 0:
            run.update_scale(False)
        ours, overflowed = converted(GradScaler, vars(run)), False
        for bad in trace(draw):
            overflowed |= bad
            mine, their = update(ours, bad), scale_after(run, bad)
            if overflowed and mine > their:
                assert mine == scale_after(run, False) == 2 * their, seed
                growths += 1
                break
            assert mine == their, seed
    assert growths > 10


def test_where_deepspeed_raises_ours_counts_the_skips() -> None:
    run = built(init_scale=4.0, scale_window=5, min_scale=2.0, delayed_shift=1, consecutive_hysteresis=False)
    run.raise_error_at_min_scale = True
    ours = converted(GradScaler, vars(run))
    ours.set_max_consecutive_skips(1)
    assert update(ours, True) == scale_after(run, True) == 2.0
    with pytest.raises(Exception, match="already at minimum"):
        run.update_scale(True)
    with pytest.raises(SkipStreakError):
        assert [update(ours, True) for _ in range(10)] == []  # a few updates late
    assert ours.get_scale() == 2.0


def optimizer(cls: Any, numbers: dict[str, Any]) -> Any:
    """Return DeepSpeed's optimizer around a parameter, with the parameter as `.held`."""
    held = torch.nn.Parameter(torch.ones(3, dtype=torch.half))
    found = cls(torch.optim.SGD([held], lr=0.0), dynamic_loss_scale=True, dynamic_loss_args=numbers)
    found.held = held
    return found


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "FP16_UnfusedOptimizer"])
def test_its_optimizers_go_on_too(kind: str, tmp_path: Path) -> None:
    """They back off at every overflow, whatever their configuration says of hysteresis; all steps are real."""
    cls = getattr(fused, kind, None) or getattr(unfused, kind)
    for seed in range(8):
        draw = random.Random(seed)
        numbers = drawn(draw)
        run, bads = optimizer(cls, numbers), trace(draw, 30)
        for step, bad in enumerate(bads):
            if step == 15:
                torch.save(run.state_dict(), tmp_path / "optimizer.pt")
                state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
                ours = converted(GradScaler, {**state, "min_scale": numbers["min_scale"]})
            config = run.loss_scale_config
            if step >= 15 and not bad and config.cur_iter - config.last_overflow_iter == 1:
                stepped(run, False)
            stepped(run, bad)
            assert step < 15 or update(ours, bad) == run.loss_scale, (seed, numbers, step)


def stepped(run: Any, bad: bool) -> None:
    for group in run.fp16_groups:
        for held in group:
            held.grad = torch.full_like(held, torch.inf if bad else 0.0)
    run.step()
    assert run.overflow == bad


@pytest.mark.parametrize("kind", ["FP16_Optimizer", "FP16_UnfusedOptimizer"])
def test_a_static_scale_stays(kind: str) -> None:
    cls = getattr(fused, kind, None) or getattr(unfused, kind)
    held = torch.nn.Parameter(torch.ones(3, dtype=torch.half))
    run = cls(torch.optim.SGD([held], lr=0.0), static_loss_scale=128.0)
    for state in (run.state_dict(), vars(theirs.CreateLossScaler(torch.half, 128.0, False, None))):
        ours = converted(GradScaler, state)
        assert [update(ours, bad) for bad in (False, True, True, False)] == [128.0] * 4


@pytest.mark.heavy
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_of_its_engine_is_converted_as_the_page_says(stage: int, tmp_path: Path) -> None:
    """Trained by DeepSpeed, stopped after an overflow, read from its files; the rest of the run is as there."""
    command = [sys.executable, "-W", "ignore", str(HERE / "deepspeed_run.py"), str(stage), str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    bads, scales = json.loads((tmp_path / "rest.json").read_text())
    (folder,) = tmp_path.glob("global_step*")
    if stage == 0:
        state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"]
        ours = converted(GradScaler, {**state, "min_scale": 1.0})
    else:
        (file,) = folder.glob("*_optim_states.pt")
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        ours = converted(GradScaler, vars(state["loss_scaler"]))
    assert [update(ours, bad) for bad in bads] == scales
    assert len(set(scales)) > 2

"""Composer's own State, checkpoints and Trainer with our scaler, beside torch's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import composer_parts
import pytest
import torch
from helpers import started, update
from scaler_triton.limits import KEY
from side_by_side import imported

from scaler_triton import GradScaler, ShardedGradScaler

composer_parts.make_importable()
core = imported("composer.core")
checkpoints = imported("composer.utils.checkpoint")
devices = imported("composer.devices")
loggers = imported("composer.loggers")

HERE = Path(__file__).parent
EXTRAS: dict[str, Any] = {"min_scale": 0.25, "hysteresis": 2, "max_consecutive_skips": 50}
EACH_CLASS = pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])


def torchs(cls: type) -> type:
    """Return torch's class of the same name."""
    return next(base for base in cls.__mro__[1:] if base.__name__ == cls.__name__)


def alone(cls: type) -> dict[str, Any]:
    """Return what builds a sharded scaler without a process group."""
    return {"process_group": None} if cls.__name__ == "ShardedGradScaler" else {}


def trained(cls: type, **extras: Any) -> Any:
    scaler = started(cls, "cpu", init_scale=64.0, growth_interval=2, **alone(cls), **extras)
    scaler._is_sharded = False  # nobody else is here to agree with
    for bad in (False, True, False):
        update(scaler, bad)
    return scaler


def state_with(scaler: Any) -> Any:
    model = composer_parts.line()
    return core.State(
        model=model,
        rank_zero_seed=0,
        run_name="run",
        device=devices.DeviceCPU(),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=scaler,
    )


def loaded(path: str, cls: type) -> Any:
    """Return a new scaler after Composer has loaded a checkpoint with it."""
    scaler = started(cls, "cpu", **alone(cls))
    state = state_with(scaler)
    checkpoints.load_checkpoint(path, state, loggers.Logger(state))
    return scaler


@EACH_CLASS
@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
def test_its_checkpoint_holds_our_state_and_each_side_loads_it(
    cls: type, extras: dict[str, Any], tmp_path: Path
) -> None:
    ours = trained(cls, **extras)
    path = checkpoints.save_checkpoint(state_with(ours), str(tmp_path / "1.pt"))
    saved = torch.load(path, weights_only=False)["state"]["scaler"]
    assert saved == {cls.__name__: ours.state_dict()}
    assert (KEY in saved[cls.__name__]) == bool(extras)
    assert loaded(path, cls).state_dict() == ours.state_dict()
    theirs = loaded(path, torchs(cls)).state_dict()
    assert theirs == {name: value for name, value in ours.state_dict().items() if name != KEY}
    assert (theirs["scale"], theirs["growth_interval"], theirs["_growth_tracker"]) == (ours.get_scale(), 2, 1)


@EACH_CLASS
def test_a_checkpoint_with_torchs_scaler_is_loaded_by_ours(cls: type, tmp_path: Path) -> None:
    theirs = started(torchs(cls), "cpu", **alone(cls))
    theirs.load_state_dict(trained(cls).state_dict())
    path = checkpoints.save_checkpoint(state_with(theirs), str(tmp_path / "1.pt"))
    assert loaded(path, cls).state_dict() == theirs.state_dict() == trained(cls).state_dict()


def run(which: str, folder: Path, *options: str) -> dict[str, Any]:
    """Train an epoch of twelve batches in a process of its own."""
    command = [sys.executable, str(HERE / "composer_run.py"), which, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert ("scaler_triton" in found["home"]) == (which == "ours")
    return found


def saved_scaler(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "1.pt", weights_only=False)["state"]["scaler"]
    return found


@pytest.mark.heavy
def test_its_trainer_trains_and_resumes_as_with_torchs_scaler(tmp_path: Path) -> None:
    """To the bit, patched by `patch_torch()`; each also from the other's checkpoint."""
    ours, theirs = (run(which, tmp_path / which) for which in ("ours", "torch"))
    assert ours["steps"] == theirs["steps"]
    assert len({scale for scale, _ in ours["steps"]}) > 1
    assert saved_scaler(tmp_path / "ours") == saved_scaler(tmp_path / "torch")
    assert set(saved_scaler(tmp_path / "ours")) == {"GradScaler"}
    ours = run("ours", tmp_path / "second", "--load", str(tmp_path / "torch" / "1.pt"))
    theirs = run("torch", tmp_path / "third", "--load", str(tmp_path / "ours" / "1.pt"))
    assert ours["steps"] == theirs["steps"]
    assert len({scale for scale, _ in ours["steps"]}) > 1


@pytest.mark.heavy
def test_with_sam_its_own_subclass_is_one_of_ours(tmp_path: Path) -> None:
    ours, theirs = (run(which, tmp_path / which, "--sam") for which in ("ours", "torch"))
    assert ours["steps"] == theirs["steps"]
    assert len({scale for scale, _ in ours["steps"]}) > 1
    assert saved_scaler(tmp_path / "ours") == saved_scaler(tmp_path / "torch")
    assert set(saved_scaler(tmp_path / "ours")) == {"ClosureGradScaler"}

"""Where a scaler's state goes: files, torch.distributed.checkpoint, frameworks' dicts."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import EXTRAS, started, trained
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.policy import KEY

# DCP says once a process that it works alone.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
THEIRS = {GradScaler: torch.amp.GradScaler, ShardedGradScaler: TorchSharded}
EACH_CLASS = pytest.mark.parametrize("cls", THEIRS)


@pytest.fixture(autouse=True)
def ranks(two_ranks: None) -> None:
    """The sharded class has somebody to agree with."""


@EACH_CLASS
def test_a_file_is_loaded_safely_with_all_extras(cls: type, tmp_path: Path) -> None:
    scaler = trained(cls, **EXTRAS)
    torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    other = cls("cpu")
    other.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True, map_location="cpu"))
    assert other.state_dict() == scaler.state_dict()
    assert other.state_dict()[KEY]["counters"] == {
        "updates": 5,
        "skipped": 2,
        "consecutive_skips": 1,
        "growths": 1,
        "backoffs": 0,
        "last_skip": 5,
        "strikes": 1,
        "spikes": 0,
    }
    assert other.limits._asdict() == EXTRAS
    theirs: Any = THEIRS[cls]("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert (theirs.get_scale(), theirs._init_growth_tracker) == (scaler.get_scale(), scaler._get_growth_tracker())


@pytest.mark.parametrize("tracker", [2, 2.0, torch.tensor(2), torch.tensor(2.0)], ids=repr)
def test_a_tracker_may_be_any_whole_number(tracker: Any) -> None:
    """As with torch's class, whose checkpoints somebody has edited."""
    scaler = started(GradScaler, "cpu")
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": tracker})
    assert scaler._get_growth_tracker() == 2
    with pytest.raises(TypeError, match="_growth_tracker must be an int, got"):
        scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": tracker * 1.25})


@ALONE
@EACH_CLASS
def test_dcp_brings_back_what_the_new_scaler_would_save(cls: Any, tmp_path: Path) -> None:
    """Every number lies there under a name of its own, as docs/checkpoints.md says."""
    scaler, other, plain = trained(cls, **EXTRAS), cls("cpu", **EXTRAS), cls("cpu")
    dcp.save({"scaler": scaler}, checkpoint_id=tmp_path / "extras", no_dist=True)
    for each in (other, plain):
        dcp.load({"scaler": each}, checkpoint_id=tmp_path / "extras", no_dist=True)
    assert other.state_dict() == scaler.state_dict()
    assert plain.state_dict() == {name: value for name, value in scaler.state_dict().items() if name != KEY}
    names = dcp.FileSystemReader(tmp_path / "extras").read_metadata().state_dict_metadata
    assert {"scaler.scale", "scaler.scaler_triton.counters.strikes"} <= set(names)
    dcp.save({"scaler": plain}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="scaler_triton"):
        dcp.load({"scaler": scaler}, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert scaler.state_dict() == other.state_dict()


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_checkpoint_of_version_0_1_is_loaded(consecutive: bool) -> None:
    """It counted no spikes; with one warning if it asks for the hysteresis that is gone."""
    scaler = trained(GradScaler, **EXTRAS)
    state = scaler.state_dict()
    state[KEY]["consecutive_hysteresis"] = consecutive
    del state[KEY]["counters"]["spikes"]
    other = GradScaler("cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load_state_dict(state)
    assert other.state_dict() == scaler.state_dict()
    assert ["consecutive_hysteresis" in str(each.message) for each in warned] == [True] * consecutive

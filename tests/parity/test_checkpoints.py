"""Where a scaler's state goes: files, torch.distributed.checkpoint, frameworks' dicts."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import EXTRAS, sgd, started, trained
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.integrations.dcp import ScalerLoadPlanner
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


COUNTERS_OF_0_1 = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes")
SCALERS: dict[str, Any] = {
    "torch": lambda: torch.amp.GradScaler("cpu", 64.0),
    "plain": lambda: trained(GradScaler),
    "extras": lambda: trained(GradScaler, **EXTRAS),
    "headroom": lambda: trained(GradScaler, scale_policy="headroom"),
    "guard": lambda: guarded(),
}
OF_0_1 = "0.1", "0.1, consecutive"


def guarded() -> StepGuard:
    """Return a guard that remembers norms and counts."""
    guard, optimizer = StepGuard("cpu"), sgd([torch.ones(1)])
    for _ in range(3):
        guard.step(optimizer)
        guard.update()
    return guard


def saved_by(kind: str) -> dict[str, Any]:
    """Return a state of some kind of scaler, or of version 0.1, which counted less."""
    if kind not in OF_0_1:
        return SCALERS[kind]().state_dict()  # type: ignore[no-any-return]
    state: dict[str, Any] = trained(GradScaler, **EXTRAS).state_dict()
    counters = {name: state[KEY]["counters"][name] for name in COUNTERS_OF_0_1}
    return state | {KEY: {**EXTRAS, "counters": counters, "consecutive_hysteresis": kind != "0.1"}}


@ALONE
@pytest.mark.filterwarnings("ignore:the checkpoint was made with consecutive_hysteresis")
@pytest.mark.parametrize("into", [name for name in SCALERS if name != "torch"])
@pytest.mark.parametrize("kind", [*SCALERS, *OF_0_1])
def test_dcp_loads_as_a_file_does_whatever_the_checkpoint_has(kind: str, into: str, tmp_path: Path) -> None:
    """By the planner, as an object or a dict, anywhere in the state; in a used scaler, too."""
    state = saved_by(kind)
    by_file, stateful, nested = (SCALERS[into]() for _ in range(3))
    by_file.load_state_dict(state)
    dcp.save(
        {"scaler": state, "deep": [{"down": state, "weight": torch.ones(2)}]}, checkpoint_id=tmp_path, no_dist=True
    )
    wanted = {"scaler": stateful, "deep": [{"down": nested.state_dict(), "weight": torch.zeros(2)}]}
    dcp.load(wanted, checkpoint_id=tmp_path, planner=ScalerLoadPlanner(), no_dist=True)
    nested.load_state_dict(wanted["deep"][0]["down"])
    assert wanted["deep"][0]["weight"].tolist() == [1.0, 1.0]
    for each in (stateful, nested):
        assert each.state_dict() == by_file.state_dict()
        assert each.stats() == by_file.stats()
        assert each.limits == by_file.limits


@ALONE
@pytest.mark.parametrize("missing", ["weight", "scaler.scale"])
def test_the_planner_still_raises_for_what_else_is_missing(missing: str, tmp_path: Path) -> None:
    saved = {"weight": torch.ones(2), "scaler": GradScaler("cpu").state_dict()}
    del (saved if missing == "weight" else saved["scaler"])[missing.rpartition(".")[2]]
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    wanted = {"weight": torch.ones(2), "scaler": GradScaler("cpu", **EXTRAS)}
    with pytest.raises(dcp.api.CheckpointException, match=rf"Missing key in checkpoint state_dict: {missing}\."):
        dcp.load(wanted, checkpoint_id=tmp_path, planner=ScalerLoadPlanner(), no_dist=True)


@ALONE
def test_the_planner_takes_the_default_ones_arguments(tmp_path: Path) -> None:
    as_one = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"scaler": saved_by("torch")}, checkpoint_id=tmp_path, planner=as_one, no_dist=True)
    scaler = GradScaler("cpu", **EXTRAS)
    planner = ScalerLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True)
    dcp.load({"scaler": scaler, "weight": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert (scaler.get_scale(), scaler.limits._asdict()) == (64.0, EXTRAS)


@ALONE
def test_a_scalers_state_may_be_the_whole_checkpoint(tmp_path: Path) -> None:
    dcp.save(saved_by("torch"), checkpoint_id=tmp_path, no_dist=True)
    scaler = trained(GradScaler, **EXTRAS)
    state = scaler.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, planner=ScalerLoadPlanner(), no_dist=True)
    assert state == {**saved_by("torch"), KEY: {}}
    scaler.load_state_dict(state)
    assert (scaler.get_scale(), scaler.stats().updates, scaler.limits._asdict()) == (64.0, 0, EXTRAS)


@pytest.mark.parametrize("kind", OF_0_1)
def test_a_checkpoint_of_version_0_1_is_loaded(kind: str) -> None:
    """It counted no spikes; with one warning if it asks for the hysteresis that is gone."""
    other = GradScaler("cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load_state_dict(saved_by(kind))
    assert other.state_dict() == saved_by("extras")
    assert ["consecutive_hysteresis" in str(each.message) for each in warned] == [True] * (kind != "0.1")

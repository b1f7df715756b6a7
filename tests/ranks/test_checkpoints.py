"""torch.distributed.checkpoint with another number of ranks: the scaler comes back to the bit, the run goes on."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ranks import cases
from scaler_triton.integrations.dcp import ScalerLoadPlanner

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BATCH, WIDTH = 8, 4
EXTRAS: dict[str, Any] = {"min_scale": 0.5, "max_scale": 64.0, "hysteresis": 2, "max_consecutive_skips": 30}
COUNTERS = ("updates", "skipped", "consecutive_skips", "growths", "backoffs", "last_skip", "strikes", "spikes")
BAD_STEPS = (1, 4, 5)


class Training(Stateful):
    """One layer: its gradients are sums of inputs, exact whatever the number of ranks."""

    def __init__(self, kind: str, name: str, **extras: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(WIDTH, 6)
        fully_shard(self.net, mesh=cases.line())
        self.optimizer = cases.new_optimizer(name, self.net.parameters())
        self.scaler = cases.new_scaler(kind, **extras)

    def state_dict(self) -> dict[str, Any]:
        """Return what DCP saves; every rank's scaler holds the same."""
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def step(self, number: int) -> None:
        share = BATCH // torch.distributed.get_world_size()
        rank = torch.distributed.get_rank()
        inputs = cases.drawn((BATCH, WIDTH), torch.Generator().manual_seed(number)).round().clamp(-1, 1)
        self.optimizer.zero_grad()
        loss = self.net(inputs[rank * share : (rank + 1) * share]).sum(1).mean()
        self.scaler.scale(loss * (float("inf") if number in BAD_STEPS and rank == 0 else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def outcome(self) -> dict[str, Any]:
        """Return the scaler's state and all parameters, whole and on every rank equal, with the optimizer's."""
        moments = [self.optimizer.state.get(parameter, {}) for parameter in self.net.parameters()]
        parameters = [*self.net.parameters(), *(each[name] for each in moments for name in sorted(each))]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
        return {"scaler": self.scaler.state_dict(), "parameters": cases.digests(whole)}


def train(rank: int, kind: str, name: str, steps: range, save: str | None = None, load: str | None = None) -> Any:
    """Train for `steps`, from a saved state or the beginning; return what there was before and after them."""
    training = Training(kind, name, **EXTRAS)
    if load is not None:
        training.step(BAD_STEPS[0])  # leaves a scale, trackers and counters, all to be replaced
        dcp.load({"training": training}, checkpoint_id=load)
    before = training.outcome()
    for number in steps:
        training.step(number)
    if save is not None:
        dcp.save({"training": training}, checkpoint_id=save)
    return before, training.outcome()


@pytest.mark.parametrize(
    ("kind", "name", "stop"), [("sharded", "adamw-fused", 3), ("sharded", "sgd", 5), ("grad", "adamw-fused", 5)]
)
@pytest.mark.parametrize("grows", [False, True], ids=["to two", "to four"])
def test_from_four_ranks_to_two_and_back(four, two, tmp_path, kind, name, stop, grows):
    first, second, folder = *((two, four) if grows else (four, two)), str(tmp_path)
    until = first.run(train, kind, name, range(stop), save=folder)
    after = second.run(train, kind, name, range(stop, 9), load=folder)
    whole = second.run(train, kind, name, range(9))
    left = [end for _, end in until]
    loaded = [start for start, _ in after]
    assert all(each == left[0] for each in [*left, *loaded])  # scaler, parameters, moments: on every rank of both
    assert left[0]["scaler"]["scaler_triton"]["counters"]["strikes"] == 1  # which hysteresis forgave
    assert left[0]["scaler"]["scale"] == (8.0 if stop == 3 else 16.0)
    assert all(end == whole[0][1] for _, end in [*after, *whole])


# Checkpoints that have less than the scaler that loads them.


def save_less(rank: int, what: str, folder: str) -> None:
    """Save a run of torch's scaler, of ours without extras, or of ours when it counted one thing less."""
    training = Training("sharded", "adamw-fused", **(EXTRAS if what == "counters" else {}))
    if what == "torch":
        training.scaler = cases.new_scaler("sharded", cases.TORCHS)
    for number in range(3):
        training.step(number)
    state = training.state_dict()
    if what == "counters":
        del state["scaler"]["scaler_triton"]["counters"]["spikes"]
    dcp.save({"training": state}, checkpoint_id=folder)


def load_less(rank: int, folder: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Load it into a used scaler with extras and go on; how DCP's own planner failed, the new state, and the end."""
    training = Training("sharded", "adamw-fused", **EXTRAS)
    training.step(BAD_STEPS[0])
    try:
        dcp.load({"training": training}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        failed = str(error)
    dcp.load({"training": training}, checkpoint_id=folder, planner=ScalerLoadPlanner())
    loaded = training.scaler.state_dict()
    for number in range(3, 9):
        training.step(number)
    return failed, loaded, training.outcome()


@pytest.mark.parametrize(("what", "scale"), [("torch", 4.0), ("plain", 4.0), ("counters", 8.0)])
@pytest.mark.parametrize("grows", [False, True], ids=["to two", "to four"])
def test_a_smaller_state_is_loaded_by_the_planner(four, two, tmp_path, what, scale, grows):
    folder = str(tmp_path)
    two.run(save_less, what, folder)
    answers = (four if grows else two).run(load_less, folder)
    counters = {"updates": 3, "skipped": 1, "consecutive_skips": 0, "growths": 0, "backoffs": 0, "last_skip": 2}
    counters = {**counters, "strikes": 1, "spikes": 0} if what == "counters" else dict.fromkeys(COUNTERS, 0)
    for failed, loaded, end in answers:
        assert "Missing key in checkpoint state_dict: training.scaler.scaler_triton." in failed
        assert loaded["scale"] == scale
        assert loaded["scaler_triton"] == {**EXTRAS, "counters": counters}
        assert end == answers[0][2]


def run_the_page(rank: int, lines: str, folder: str) -> tuple[dict[str, Any], bool]:
    """Resume a run of torch's scaler by the page's lines."""
    old, new = (Training("sharded", "adamw-fused", **EXTRAS) for _ in range(2))
    old.scaler = cases.new_scaler("sharded", cases.TORCHS)
    for number in range(3):
        old.step(number)
    dcp.save({"model": old.net, "scaler": old.scaler}, checkpoint_id=folder)
    exec(lines, {"model": new.net, "scaler": new.scaler, "folder": folder})
    saved, loaded = (cases.digests(each.net.parameters()) for each in (old, new))
    return new.scaler.state_dict(), loaded == saved


def test_the_pages_lines_resume_a_run_of_torchs_scaler(two, tmp_path):
    (lines,) = re.findall(r"```python\n([^`]*ScalerLoadPlanner\(\)[^`]*)```", PAGE.read_text())
    for state, equal in two.run(run_the_page, lines, str(tmp_path)):
        assert (state["scale"], equal) == (4.0, True)
        assert state["scaler_triton"] == {**EXTRAS, "counters": dict.fromkeys(COUNTERS, 0)}

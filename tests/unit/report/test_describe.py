"""`repr` of a scaler and a guard: what it says in each state, and that it waits for nothing and breaks nothing."""

import copy
import pickle
import pydoc
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import sgd
from torch._subclasses.fake_tensor import FakeTensorMode

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.core import dispatch
from scaler_triton.core.memory import HostCopy
from scaler_triton.report import describe


def trained(scaler: Any, gradients: list[float]) -> Any:
    """Take a step and an update with each gradient; return the optimizer."""
    optimizer = sgd([torch.zeros(1)])
    for gradient in gradients:
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([gradient])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    return optimizer


def test_a_scaler_says_where_it_is_its_scale_and_its_skips() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**24)
    assert repr(scaler) == "GradScaler(cpu, torch; scale 16777216; no update yet)"
    kept = [trained(scaler, [1.0])]
    assert repr(scaler) == "GradScaler(cpu, torch; scale 16777216; 1 update, none skipped)"
    kept.append(trained(scaler, [torch.inf, 1.0]))
    said = "GradScaler(cpu, torch; scale 8388608; 3 updates, 1 skipped, the last at 2)"
    assert repr(scaler) == said
    assert [repr(each) for each in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler))] == [said, said]
    assert repr(ShardedGradScaler("cpu", 3.0)) == "ShardedGradScaler(cpu, torch; scale 3; no update yet)"
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler(cpu, disabled)"


def test_a_guard_says_the_last_norm_and_the_limit_that_it_was_judged_by() -> None:
    guard = StepGuard("cpu", spike_sigma=2.0, window=4)
    assert repr(guard) == "StepGuard(cpu, torch; no norm yet; no update yet)"
    said = []
    kept = trained(guard, [1.0])
    for gradient in (3.0, 2.0, 9.0, 2.5, torch.nan):
        kept.param_groups[0]["params"][0].grad = torch.tensor([gradient])
        guard.step(kept)
        guard.update()
        said.append(repr(guard).removesuffix(")").split("; ")[1:])
    assert said == [
        ["norm 3, no limit before 2 norms", "2 updates, none skipped"],
        ["norm 2, limit 4.828", "3 updates, none skipped"],  # 2 + 2 * sqrt(2)
        ["norm 9, limit 4", "4 updates, 1 skipped, the last at 4"],  # 2 + 2 * 1
        ["norm 2.5, limit 5.082", "5 updates, 1 skipped, the last at 4"],  # of 1, 3, 2 and the limit of the spike, 4
        ["norm nan, limit 4.583", "6 updates, 2 skipped, the last at 6"],
    ]
    windows = guard._ours.guard.windows()
    assert [window.spike(0) for window in windows] == [(9.0, 4.0)]
    assert repr(StepGuard("cpu")) == "StepGuard(cpu, torch; no spike_sigma; no update yet)"


def test_a_guard_that_loaded_a_checkpoint_says_how_many_norms_it_holds_until_one_is_judged() -> None:
    guard, fresh, used, empty = (StepGuard("cpu", spike_sigma=2.0, window=4) for _ in range(4))
    kept = [trained(guard, [1.0, 3.0, 2.0]), trained(used, [5.0, 7.0, torch.nan])]
    for each in (fresh, used):
        each.load_state_dict(guard.state_dict())
        assert repr(each) == "StepGuard(cpu, torch; 3 norms loaded; 3 updates, none skipped)"
        assert not {"guard/norm", "guard/limit"} & each.metrics().keys()
    kept.append(trained(fresh, [4.5]))
    assert repr(fresh) == "StepGuard(cpu, torch; norm 4.5, limit 4; 4 updates, 1 skipped, the last at 4)"
    used.load_state_dict(empty.state_dict())
    assert repr(used) == "StepGuard(cpu, torch; no norm yet; no update yet)"
    kept.append(trained(empty, [torch.nan]))  # a first norm that never enters is one that was judged
    assert "; norm nan, no limit before 2 norms; " in repr(empty)
    assert len(kept) == 4


def test_a_subclass_need_not_run_any_init_of_ours() -> None:
    class Theirs(GradScaler):
        def __init__(self) -> None:
            torch.amp.GradScaler.__init__(self, "cpu")

    class Nobodys(GradScaler):
        def __init__(self) -> None:
            pass

    assert repr(Theirs()) == "Theirs(cpu, torch; scale 65536; no update yet)"
    assert repr(Nobodys()) == repr(Nobodys.__new__(Nobodys)) == "Nobodys(no __init__ has run)"


def test_in_a_fake_mode_it_shows_what_it_knows_and_metrics_go_on() -> None:
    scaler = GradScaler("cpu", 8.0)
    kept = trained(scaler, [torch.inf])
    with FakeTensorMode():
        assert repr(scaler).startswith("GradScaler(cpu, torch; scale ")
        fake = GradScaler("cpu", 8.0)
        fake.scale(torch.ones(()))
        assert repr(fake) == f"GradScaler(cpu, torch; scale 8; no update yet; {describe._BEHIND})"
    assert scaler.metrics()["scaler/scale"] == 4.0
    assert repr(scaler) == "GradScaler(cpu, torch; scale 4; 1 update, 1 skipped, the last at 1)"
    assert kept.state == {}


def test_what_has_not_arrived_is_not_waited_for_and_while_a_graph_is_captured_nothing_is_started() -> None:
    scaler = GradScaler("cpu", 8.0)
    kept = trained(scaler, [torch.inf])
    with mock.patch.object(HostCopy, "has_arrived", return_value=False):
        assert repr(scaler).endswith(f"; {describe._BEHIND})")
    assert repr(scaler) == "GradScaler(cpu, torch; scale 4; 1 update, 1 skipped, the last at 1)"
    scaler.update(2.0)
    with (
        mock.patch.object(describe, "is_captured", return_value=True),
        mock.patch.object(HostCopy, "start", side_effect=AssertionError),
        mock.patch.object(HostCopy, "has_arrived", side_effect=AssertionError),
    ):
        said = f"GradScaler(cpu, torch; scale 4; 1 update, 1 skipped, the last at 1; {describe._BEHIND})"
        assert repr(scaler) == said
    assert "scale 2;" in repr(scaler)
    assert kept.state == {}


@pytest.mark.parametrize(
    ("chosen", "kind", "requested", "said"),
    [
        ([], "cuda", "auto", "auto"),
        ([], "cpu", "auto", "torch"),
        ([], "cuda", "triton", "triton"),
        ([("cuda:1", "float32", "auto", "triton")], "cuda", "auto", "triton"),
        ([("cuda:0", "float32", "torch", "torch")], "cuda", "auto", "auto"),
        (
            [("cuda:0", "float32", "auto", "triton"), ("cuda:0", "half", "auto", "torch")],
            "cuda",
            "auto",
            "triton and torch",
        ),
    ],
)
def test_the_backend_is_the_one_chosen_so_far_and_nothing_is_tried(
    chosen: list[tuple[str, ...]], kind: str, requested: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {(torch.device(at), getattr(torch, dtype), by, "unscaling"): (is_, "") for at, dtype, by, is_ in chosen}
    monkeypatch.setattr(dispatch, "_chosen", keys)
    assert dispatch.backend_so_far(kind, requested) == said
    assert len(keys) == len(chosen)


def test_help_shows_no_objects_at_addresses() -> None:
    for each in (GradScaler, ShardedGradScaler, StepGuard, scaler_triton.ScalerStats, scaler_triton.ops):
        text = pydoc.plain(pydoc.render_doc(each))
        assert " at 0x" not in text
        assert "limits = <" not in text or "limits = <min_scale, max_scale, hysteresis and max_conse" in text

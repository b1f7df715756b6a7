"""Turns and their numbers: rotations, ratios, medians of runs, CSVs, and the gradients that are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perf import measure
from perf.measure import Rounds, Subject, WrongResult, interleaved
from perf.rows import Machine, Place, pooled, read_csv, write_csv
from perf.subjects import Gradients, Still, require_equal, resting_adamw, scalers
from scaler_triton import GradScaler

MACHINE = Machine("card", "1.2", "2.13", "3.7", "3.11", "abc", "2025-01-01")
PLACE = Place("host", "alone", "10 gradients")


def test_each_subject_is_first_equally_often() -> None:
    orders = list(Rounds(0.0, 4).orders(["a", "b", "c"]))
    assert [order[0] for order in orders] == ["a", "b", "c"] * 2
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_only_the_run_is_timed() -> None:
    seen: list[str] = []
    subject = Subject(lambda: seen.append("run"), lambda: seen.append("before"), lambda: seen.append("after"))
    assert interleaved({"a": subject}, Rounds(0.0, 2), clock=lambda run: float(run() is None), warmup=0) == {
        "a": [1, 1]
    }
    assert seen == ["before", "run", "after"] * 2


def test_ratios_are_medians_over_rounds() -> None:
    rows = PLACE.times("step", {"torch": [1.0, 100.0, 2.0], "ours": [0.5, 50.0, 4.0], "copy": [1.0, 1.0, 1.0]})
    found = {row.subject: (row.p50, row.unit) for row in rows}
    assert found["ours"] == (4e6, "us")
    assert found["ours / torch"] == (0.5, "ratio")
    assert set(found) == {"torch", "ours", "copy", "ours / torch", "copy / ours", "copy / torch"}


def test_of_several_runs_the_medians_count() -> None:
    rows = [row for count in (1.0, 9.0, 3.0) for row in PLACE.counts("calls", {"ours": count})]
    (row,) = pooled(rows)
    assert (row.p50, row.samples) == (3.0, 3)


def test_a_csv_gives_back_what_was_written(tmp_path: Path) -> None:
    rows = [*PLACE.times("step", {"torch": [1.0], "ours": [0.5]}), *PLACE.counts("calls", {"ours": 3})]
    write_csv(tmp_path / "new" / "host.csv", rows, MACHINE)
    assert read_csv(tmp_path / "new" / "host.csv") == [(row, MACHINE) for row in rows]


def test_gradients_move_only_when_they_are_renewed() -> None:
    gradients = Gradients([3, 5])
    before = [parameter.grad.data_ptr() for parameter in gradients.parameters]
    gradients.restore()
    assert [parameter.grad.data_ptr() for parameter in gradients.parameters] == before
    gradients.renew()
    assert all(p.grad.data_ptr() != old for p, old in zip(gradients.parameters, before, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_resting_optimizer_is_one_of_torchs(fused: bool) -> None:
    (parameter,) = Gradients([4]).parameters
    optimizer, before = resting_adamw([parameter], fused=fused), parameter.detach().clone()
    optimizer.step()
    assert torch.equal(parameter, before)
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) == fused


def test_scalers_differ_only_in_their_class() -> None:
    pair = scalers("cpu")
    assert [*pair] == ["torch", "ours"]
    assert isinstance(pair["ours"], GradScaler)
    assert pair["torch"].state_dict() == pair["ours"].state_dict()


@pytest.mark.parametrize("fused", [False, True])
def test_equal_scalers_pass(fused: bool) -> None:
    gradients = Gradients([3, 5])
    require_equal("some list", gradients.parameters, "cpu", fused=fused)
    assert all(map(torch.equal, gradients.locals, gradients.pieces()))


def test_a_wrong_gradient_is_refused() -> None:
    def step(scaler: object, optimizer: Still) -> None:
        scaler.step(optimizer)
        scaler.update()
        if isinstance(scaler, GradScaler):
            optimizer.param_groups[0]["params"][1].grad.view(torch.int32)[0] ^= 1

    with pytest.raises(WrongResult, match="some list: ours leaves another gradient 1"):
        require_equal("some list", Gradients([3, 5]).parameters, "cpu", step, fused=False)


def test_an_overflow_that_is_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaler_triton.torch_ops.check", lambda *arguments: None)
    with pytest.raises(
        WrongResult, match="ours leaves another number of steps, of an infinity|another scale, of an inf"
    ):
        require_equal("some list", Gradients([3, 5]).parameters, "cpu", fused=True)


def test_requiring_names_what_does_not_hold() -> None:
    measure.require(True, "never")
    with pytest.raises(WrongResult, match="because"):
        measure.require([], "because")

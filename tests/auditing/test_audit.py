"""`audit` in one process: what it reads, what it shows, and that it changes nothing."""

from __future__ import annotations

import io
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import started, stepped

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.auditing import running as audit_module
from scaler_triton.auditing.replicas import hashed_copies
from scaler_triton.auditing.report import AuditReport
from scaler_triton.auditing.report import UNKNOWN


def audited(optimizer: Any, scaler: Any, *more: Any, **options: Any) -> AuditReport:
    """The report, and see that it was printed."""
    file = io.StringIO()
    report = scaler_triton.audit(optimizer, scaler, *more, file=file, **options)
    assert file.getvalue() == f"{report}\n"
    return report


def shown(report: AuditReport) -> dict[str, str]:
    """The only rank's cells."""
    (state,) = report.ranks
    return {name: reading.shown for name, reading in state.readings.items()}


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler, ShardedGradScaler])
def test_one_process_is_shown_and_has_nothing_to_compare_with(cls: Any) -> None:
    report = audited(stepped(steps=3), started(cls, "cpu", init_scale=4.0))
    assert shown(report) == {"scale": "4", "tracker": "0", "steps": "3"}
    assert (report.verdict, report.split) == ("nothing", False)
    assert str(report).startswith(f"{cls.__name__} of {cls.__module__.partition('.')[0]}; AdamW; 1 rank\n")


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_nothing_is_changed(cls: Any) -> None:
    optimizer, scaler = stepped(steps=0), cls("cpu", init_scale=4.0)
    model = torch.nn.ParameterList(optimizer.param_groups[0]["params"])
    before = torch.get_rng_state(), random.getstate(), vars(scaler).copy()
    assert shown(audited(optimizer, scaler, model)) == {"scale": "4 (unused)", "tracker": "0", "steps": "-"}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert vars(scaler) == before[2]
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert not scaler._per_optimizer_states
    assert not optimizer.state


def test_a_disabled_scaler_is_called_that() -> None:
    report = audited(stepped(), torch.amp.GradScaler("cpu", enabled=False))
    assert shown(report) == {"scale": "disabled", "tracker": "-", "steps": "1"}


def test_the_first_rank_prints_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    report = scaler_triton.audit(stepped(), started(GradScaler, "cpu"))
    assert capsys.readouterr().out == f"{report}\n"


@pytest.mark.parametrize(
    ("states", "steps"),
    [
        ([{"step": 3}, {"step": 5.0}], "3..5"),
        ([{"step": torch.tensor(7.0)}, {}], "7"),
        ([{"momentum": 1}, {}], "-"),
        ([["step"], {"step": torch.ones(2)}], "-"),  # not what torch's optimizers count by
    ],
)
def test_steps_are_numbers_or_tensors(states: list[Any], steps: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in states])
    optimizer.state.update(zip(optimizer.param_groups[0]["params"], states, strict=True))
    assert shown(audited(optimizer, started(GradScaler, "cpu")))["steps"] == steps


def test_a_group_may_count_the_steps() -> None:
    optimizer = stepped("SGD")
    optimizer.param_groups[0]["step"] = 9
    assert shown(audited(optimizer, started(GradScaler, "cpu")))["steps"] == "9"


def test_wrappers_and_lists() -> None:
    inner = stepped("Adam", 2, fused=True)
    wrapper = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)
    report = audited([wrapper, stepped("SGD")], started(GradScaler, "cpu"))
    assert shown(report)["steps of 0 (Adam)"] == "2"
    assert shown(report)["steps of 1 (SGD)"] == "-"
    assert report.subject.endswith("; Adam, fused; SGD")


@pytest.mark.parametrize(
    ("optimizer", "scaler", "text"),
    [
        ("adam", GradScaler("cpu"), "TypeError: optimizer must be an optimizer or a list of them, got str"),
        (None, 3, "TypeError: optimizer must be"),
        ([], 3, "TypeError: scaler must be a torch.amp.GradScaler, got int"),
    ],
)
def test_what_cannot_be_read_is_in_the_table(optimizer: Any, scaler: Any, text: str) -> None:
    report = audited(optimizer, scaler)
    assert report.verdict == "unknown"
    assert f"\nrank 0: {text}" in str(report)


def test_a_model_is_a_module() -> None:
    optimizer = stepped()
    assert "\nrank 0: TypeError: model must be a module, got AdamW" in str(
        audited(optimizer, GradScaler("cpu"), optimizer)
    )


def test_a_rank_may_have_no_optimizer() -> None:
    assert str(audited([], GradScaler("cpu"))).startswith("GradScaler of scaler_triton; 1 rank\n")


def test_one_rank_alone_hashes_nothing() -> None:
    with mock.patch.object(audit_module, "hashed_copies", side_effect=AssertionError):
        assert not audited(stepped(), GradScaler("cpu")).ranks[0].error


def test_at_the_prompt_a_report_takes_one_line() -> None:
    assert repr(audited(stepped(), GradScaler("cpu"))) == "<AuditReport: nothing, 1 rank>"


def test_a_process_group_needs_a_default_one() -> None:
    with pytest.raises(ValueError, match="process group"):
        scaler_triton.audit(stepped(), GradScaler("cpu"), process_group=object())  # type: ignore[arg-type]


def test_a_backend_without_known_ranks_is_refused(tmp_path: Path) -> None:
    group = torch.distributed.ProcessGroupGloo(torch.distributed.FileStore(str(tmp_path / "store"), 1), 0, 1)
    with pytest.raises(TypeError, match=r"^process_group must be one whose ranks torch knows, got \w+Gloo$"):
        scaler_triton.audit(stepped(), GradScaler("cpu"), process_group=group)  # type: ignore[arg-type]


def test_parameters_without_bits_are_counted() -> None:
    optimizer = stepped("SGD")
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device="meta"))]})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.eye(2).to_sparse())]})
    model = torch.nn.Module()
    model.lazy = torch.nn.LazyLinear(2)
    with warnings.catch_warnings(action="ignore"):  # torch's, of its quantized tensors
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    model.quantized = torch.nn.Parameter(quantized, requires_grad=False)
    copies, left_out = hashed_copies([optimizer], model, [0, 1], False)
    assert [(copy.name, copy.among) for copy in copies] == [("group 0 parameter 0 (3,)", UNKNOWN)]
    assert list(left_out.values()) == [5]


def test_a_parameter_is_hashed_once_and_by_its_name_in_the_model() -> None:
    optimizer, other = stepped("SGD"), stepped("SGD")
    optimizer.add_param_group({"params": other.param_groups[0]["params"]})
    model = torch.nn.Module()
    model.weight = optimizer.param_groups[0]["params"][0]
    copies, _ = hashed_copies([optimizer, other], model, [0, 1], True)
    names = ["weight", "optimizer 0 group 1 parameter 0 (3,)"]
    assert [(copy.name, copy.among) for copy in copies] == [(name, "0-1") for name in names]
    assert len({copy.digest for copy in copies}) == 1

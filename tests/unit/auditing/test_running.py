"""`audit` in one process: what it reads, what it shows, and that it changes nothing; the hash of a tensor."""

import io
import random
import warnings
import zlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import stepped
from torch import Tensor, nn

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.auditing import fingerprint, running
from scaler_triton.auditing.replicas import hashed_copies
from scaler_triton.auditing.report import UNKNOWN, AuditReport


def audited(optimizer: Any, scaler: Any, *more: Any, **options: Any) -> AuditReport:
    """The report, which was printed, too."""
    file = io.StringIO()
    report = scaler_triton.audit(optimizer, scaler, *more, file=file, **options)
    assert file.getvalue() == f"{report}\n"
    return report


def shown(report: AuditReport) -> dict[str, str]:
    """The only rank's cells."""
    (state,) = report.ranks
    return {name: reading.shown for name, reading in state.readings.items()}


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler, ShardedGradScaler])
def test_one_process_is_shown_and_has_nothing_to_compare_with(cls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scaler = cls("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with mock.patch.object(running, "hashed_copies", side_effect=AssertionError):
        report = scaler_triton.audit(stepped(steps=3), scaler)
    assert capsys.readouterr().out == f"{report}\n"
    assert shown(report) == {"scale": "4", "tracker": "0", "steps": "3"}
    assert (report.verdict, report.split, report.ranks[0].error) == ("nothing", False, "")
    assert str(report).startswith(f"{cls.__name__} of {cls.__module__.partition('.')[0]}; AdamW; 1 rank\n")
    assert repr(report) == "<AuditReport: nothing, 1 rank>"


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_nothing_is_changed(cls: Any) -> None:
    optimizer, scaler = stepped(steps=0), cls("cpu", init_scale=4.0)
    before = torch.get_rng_state().tolist(), random.getstate(), vars(scaler).copy()
    report = audited(optimizer, scaler, nn.ParameterList(optimizer.param_groups[0]["params"]))
    assert shown(report) == {"scale": "4 (unused)", "tracker": "0", "steps": "-"}
    assert (torch.get_rng_state().tolist(), random.getstate(), vars(scaler)) == before
    assert not optimizer.state


@pytest.mark.parametrize(
    ("states", "steps"),
    [
        ([{"step": 3}, {"step": 5.0}], "3..5"),
        ([{"step": torch.tensor(7.0)}, {}], "7"),
        ([["step"], {"step": torch.ones(2)}], "-"),  # not what torch's optimizers count by
    ],
)
def test_steps_are_numbers_or_tensors(states: list[Any], steps: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1)) for _ in states])
    optimizer.state.update(zip(optimizer.param_groups[0]["params"], states, strict=True))
    assert shown(audited(optimizer, GradScaler("cpu")))["steps"] == steps
    optimizer.state.clear()
    optimizer.param_groups[0]["step"] = 9  # a few optimizers count them there
    assert shown(audited(optimizer, GradScaler("cpu")))["steps"] == "9"


def test_wrappers_and_lists() -> None:
    inner = stepped("Adam", 2, fused=True)
    wrapper = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)
    report = audited([wrapper, stepped("SGD")], GradScaler("cpu"))
    assert (shown(report)["steps of 0 (Adam)"], shown(report)["steps of 1 (SGD)"]) == ("2", "-")
    assert report.subject.endswith("; Adam, fused; SGD")
    report = audited([], torch.amp.GradScaler("cpu", enabled=False))
    assert shown(report) == {"scale": "disabled", "tracker": "-"}
    assert report.subject == "GradScaler of torch"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda o, s: (s, o), "optimizer must be an optimizer or a list of them, got GradScaler; the arguments are "),
        (lambda o, s: ([o, s], s), "optimizer must be an optimizer or a list of them, got GradScaler; the arguments"),
        (lambda o, s: (o, None), "scaler must be a torch.amp.GradScaler, got NoneType; the arguments are "),
        (lambda o, s: (o, nn.Linear(1, 1), s), "model must be a module, got GradScaler; the arguments are optimizer, "),
    ],
)
def test_wrong_arguments_raise_and_nothing_is_printed(wrong: Any, text: str, capsys: Any) -> None:
    with pytest.raises(TypeError, match=f"^{text}"):
        scaler_triton.audit(*wrong(stepped(steps=0), GradScaler("cpu")))
    assert capsys.readouterr().out == ""


def test_parameters_without_bits_are_counted() -> None:
    optimizer = stepped("SGD")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="meta"))]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.eye(2).to_sparse())]})
    with warnings.catch_warnings(action="ignore"):  # of quantized tensors
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    model = nn.ModuleDict({"lazy": nn.LazyLinear(2), "list": nn.ParameterList([nn.Parameter(quantized, False)])})
    copies, left_out = hashed_copies([optimizer], model, [0, 1], False)
    assert [(copy.name, copy.among) for copy in copies] == [("group 0 parameter 0 (3,)", UNKNOWN)]
    assert list(left_out.values()) == [5]


def test_a_parameter_is_hashed_once_and_by_its_name_in_the_model() -> None:
    optimizer, other = stepped("SGD"), stepped("SGD")
    optimizer.add_param_group({"params": other.param_groups[0]["params"]})
    model = nn.ParameterDict({"weight": optimizer.param_groups[0]["params"][0]})
    copies, _ = hashed_copies([optimizer, other], model, [0, 1], True)
    names = ["weight", "optimizer 0 group 1 parameter 0 (3,)"]
    assert [(copy.name, copy.among) for copy in copies] == [(name, "0-1") for name in names]
    assert len({copy.digest for copy in copies}) == 1


# The hash.


def hashed(tensor: Tensor) -> int:
    return int(fingerprint.fingerprint(tensor), 16)


def mixed(word: int) -> int:
    """The mixing of one word, in Python's integers."""
    for shift, factor in zip(fingerprint.SHIFTS, (*fingerprint.FACTORS, 1), strict=True):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("chunk", [8, 64, 2**24])
def test_the_hash_is_its_definition_whatever_the_chunk(dtype: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CHUNK", chunk)
    for size in (0, 1, 7, 8, 9, 64, 65, 200):
        stored = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
        data = bytes(stored.tolist())
        words = [int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(data), 8)]
        sums = sum(mixed((word + (i + 1) * fingerprint.STEP) % 2**64) for i, word in enumerate(words))
        assert hashed(stored.view(dtype)) == (zlib.crc32(f"{dtype} {(size,)}".encode()) + sums) % 2**64


def test_values_count_and_not_how_they_are_stored() -> None:
    tensor = torch.randn(6, 4)
    strided = torch.empty(4, 6).t().copy_(tensor)
    assert {*map(hashed, (strided, nn.Parameter(tensor), torch.cat([tensor] * 2)[6:]))} == {hashed(tensor)}
    assert len({hashed(torch.zeros(shape)) for shape in [(4,), (2, 2), (4, 1), (0,), (5,)]}) == 5
    assert hashed(torch.zeros(2)) != hashed(torch.zeros(2, dtype=torch.int32))
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    assert hashed(conjugate) == hashed(conjugate.clone())

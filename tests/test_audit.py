"""The audit in one process: what it reads, its hash, its words, and the states that ranks have saved."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import started
from torch import Tensor

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler, cli
from scaler_triton.auditing import fingerprint
from scaler_triton.auditing.replicas import copies_of
from scaler_triton.auditing.report import (
    UNKNOWN,
    AuditReport,
    Copy,
    RankState,
    Reading,
    judge,
    number,
    one_line,
    ranges,
    scaler_readings,
    steps_reading,
)


def stepped(name: str = "AdamW", steps: int = 1, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of one parameter that took some steps."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, name)([parameter], **options)
    for _ in range(steps):
        parameter.grad = torch.ones(3)
        optimizer.step()
    return optimizer


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


# One process, no group.


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
    [([{"step": 3}, {"step": 5.0}], "3..5"), ([{"step": torch.tensor(7.0)}, {}], "7"), ([{"momentum": 1}, {}], "-")],
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


def test_a_process_group_needs_a_default_one() -> None:
    with pytest.raises(ValueError, match="process group"):
        scaler_triton.audit(stepped(), GradScaler("cpu"), process_group=object())  # type: ignore[arg-type]


def test_parameters_without_bits_are_counted() -> None:
    optimizer = stepped("SGD")
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device="meta"))]})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.eye(2).to_sparse())]})
    copies, left_out = copies_of([optimizer], None, [0, 1], False)
    assert [(copy.name, copy.among) for copy in copies] == [("group 0 parameter 0 (3,)", UNKNOWN)]
    assert list(left_out.values()) == [2]


def test_a_parameter_is_hashed_once_and_by_its_name_in_the_model() -> None:
    optimizer, other = stepped("SGD"), stepped("SGD")
    optimizer.add_param_group({"params": other.param_groups[0]["params"]})
    model = torch.nn.Module()
    model.weight = optimizer.param_groups[0]["params"][0]
    copies, _ = copies_of([optimizer, other], model, [0, 1], True)
    names = ["weight", "optimizer 0 group 1 parameter 0 (3,)"]
    assert [(copy.name, copy.among) for copy in copies] == [(name, "0-1") for name in names]
    assert len({copy.digest for copy in copies}) == 1


# The hash.


def mixed(word: int) -> int:
    """The mixing of one word, in Python's integers."""
    for shift, factor in zip(fingerprint.SHIFTS, (*fingerprint.FACTORS, 1), strict=True):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word


def expected(data: bytes, empty: int) -> int:
    """The definition, beside the hash of an empty tensor of the same dtype and shape."""
    words = [int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(data), 8)]
    return (empty + sum(mixed((w + (i + 1) * fingerprint.STEP) % 2**64) for i, w in enumerate(words))) % 2**64


def hashed(tensor: Tensor) -> int:
    return int(fingerprint.fingerprint(tensor)) % 2**64


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [8, 64, 2**24])
def test_the_hash_is_its_definition_whatever_the_chunk(size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CHUNK", chunk)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    kind = fingerprint.zlib.crc32(f"torch.uint8 {(size,)}".encode())
    assert hashed(data) == expected(bytes(data.tolist()), kind)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0)])
def test_every_flipped_bit_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape).to(dtype)
    before = hashed(tensor)
    data = tensor.reshape(-1).view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert hashed(tensor) != before, (byte, bit)
            data[byte] ^= 1 << bit
    assert hashed(tensor) == before


def test_two_changes_do_not_cancel() -> None:
    """Flipped signs would in a plain weighted sum: 2^63 twice is 2^64."""
    tensor = torch.arange(1.0, 65.0, dtype=torch.float64)
    seen = {hashed(tensor)}
    for first in range(64):
        for second in range(first):
            changed = tensor.clone()
            changed[[first, second]] *= -1
            swapped = tensor.clone()
            swapped[[first, second]] = tensor[[second, first]]
            seen |= {hashed(changed), hashed(swapped)}
    assert len(seen) == 1 + 2 * 64 * 63 // 2


def test_values_count_and_not_how_they_are_stored() -> None:
    tensor = torch.randn(6, 4)
    strided = torch.empty(4, 6).t().copy_(tensor)
    assert (
        hashed(strided) == hashed(tensor) == hashed(torch.nn.Parameter(tensor)) == hashed(torch.cat([tensor] * 2)[6:])
    )
    assert len({hashed(torch.zeros(shape)) for shape in [(4,), (2, 2), (4, 1), (0,), (5,)]}) == 5
    assert hashed(torch.zeros(2)) != hashed(torch.zeros(2, dtype=torch.int32))
    assert hashed(torch.ones(2, dtype=torch.complex64).conj()) == hashed(
        torch.ones(2, dtype=torch.complex64).conj().clone()
    )


# The report.


def state(rank: int, scale: float = 4.0, **more: Any) -> RankState:
    return RankState(rank, scaler_readings(scale, 0), **more)


def test_a_state_travels_as_json() -> None:
    whole = state(3, copies=[Copy("w", "0-1", "ab")], left_out={"shard": 2}, error="no", subject="it")
    assert RankState.from_bytes(whole.to_bytes()) == whole


@pytest.mark.parametrize(
    ("value", "text"),
    [(65536.0, "65536"), (0.5, "0.5"), (2.0**127, "1.7014118346046923e+38"), (float("inf"), "inf"), (3, "3")],
)
def test_numbers_keep_their_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_scale_is_compared_to_the_bit_and_a_nan_is_itself() -> None:
    assert judge([state(0, 4.0), state(1, 4.000000476837158)]).split
    assert not judge([state(0, float("nan")), state(1, float("nan"))]).split
    assert judge([state(0, 0.0), state(1, float("inf"))]).differences == ("scale: 0 on rank 0; inf on rank 1",)


def test_the_most_steps_are_compared_not_the_fewest() -> None:
    assert steps_reading([1.0, 5.0]) == Reading("1..5", "5")
    readings = [{"steps": steps_reading(steps)} for steps in ([1.0, 5.0], [5.0], [])]
    report = judge([RankState(rank, each) for rank, each in enumerate(readings)])
    assert (report.verdict, report.compared) == ("agree", ("steps (on ranks 0-1)",))


def test_ranks_are_written_as_ranges() -> None:
    assert ranges([5, 0, 1, 2, 8, 7]) == "0-2, 5, 7-8"


def test_many_ranks_share_rows() -> None:
    report = judge([state(rank, 8.0 if rank == 7 else 4.0) for rank in range(512)])
    rows = str(report).splitlines()
    assert rows[4].split() == ["0-6,", "8-511", "4", "0"]
    assert rows[5].split() == ["7", "8", "0"]
    assert report.differences == ("scale: 4 on ranks 0-6, 8-511; 8 on rank 7",)
    few = str(judge([state(rank) for rank in range(16)])).splitlines()
    assert [row.split()[0] for row in few[4:20]] == [str(rank) for rank in range(16)]


def test_what_is_too_wide_for_a_table_is_a_list() -> None:
    columns = [f"checkpoint-{step}/rank*.pt scale" for step in range(8)]
    report = judge([RankState(rank, {name: Reading("4", "4") for name in columns}) for rank in range(3)])
    assert str(report).splitlines()[2:10] == [f"{name}: 4 on ranks 0-2" for name in columns]


def test_values_that_look_alike_still_differ() -> None:
    states = [RankState(rank, {"scale": Reading("4", f"{rank}")}) for rank in range(2)]
    assert judge(states).differences == ("scale: 4 on rank 0; 4 on rank 1",)


def test_an_error_of_many_ranks_is_one_line() -> None:
    report = judge([state(0), *(RankState(rank, error="OSError: gone") for rank in range(1, 100))])
    assert report.verdict == "unknown"
    assert str(report).count("OSError") == 1
    assert "\nranks 1-99: OSError: gone\n" in str(report)


def test_a_split_is_one_also_when_a_rank_could_not_be_read() -> None:
    assert judge([state(0, 2.0), state(1, 4.0), RankState(2, error="no")]).verdict == "split"


def test_only_some_of_the_parameters_that_differ_are_named() -> None:
    copies = [[Copy(f"w{i}", "0-1", f"{rank}") for i in range(20)] for rank in range(2)]
    report = judge([state(rank, copies=copies[rank]) for rank in range(2)])
    assert report.differences[0] == "replicated parameters: 20 of 20 differ: w0, w1, w2, w3, w4, w5 and 14 more"
    assert len(report.differences) == 7


def test_a_replica_without_its_other_is_not_compared() -> None:
    report = judge([state(0, copies=[Copy("w", "0-1", "a")]), state(1)])
    assert report.verdict == "agree"
    assert "replicated" not in str(report)


def test_no_control_character_reaches_the_terminal() -> None:
    assert one_line("a\x1b[31m\n\tb\x07") == "a?[31m b?"
    assert len(one_line("x " * 10**6)) <= 160


# What ranks have saved.


def scaler_state(scale: Any = 4.0, tracker: Any = 1) -> dict[str, Any]:
    rest = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    return {"scale": scale, **rest, "_growth_tracker": tracker}


def save(folder: Path, contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / name)


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `audit` on the folder and gives its status and its only output."""

    def run(*words: str) -> tuple[int, str]:
        status = cli.main(["audit", str(tmp_path), *words])
        said = capsys.readouterr()
        assert not (said.out and said.err)
        assert "Traceback" not in said.out + said.err
        return status, said.out or said.err

    return run


@pytest.mark.parametrize(
    "name",
    ["rank{}.pt", "scaler_rank_{}.pth", "scaler_{}.pt", "optim-{}.bin", "rank-{}/scaler.pt", "mp_rank_0{}_model.pt"],
)
def test_saved_states_that_agree_and_that_split(tmp_path: Path, command: Command, name: str) -> None:
    save(tmp_path, {name.format(rank): scaler_state() for rank in range(3)})
    status, text = command()
    assert (status, "AGREE: every rank holds the same scale, tracker." in text) == (0, True)
    assert name.replace("{}", "*").replace("_0*", "_*") in text.splitlines()[0]
    save(tmp_path, {name.format(1): scaler_state(8.0)})
    status, text = command()
    assert (status, "SPLIT" in text) == (1, True)
    assert "\n  scale: 4 on ranks 0, 2; 8 on rank 1\n" in text + "\n"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"scaler": inner},
        lambda inner: {"grad_scaler": inner},
        lambda inner: {"state": {"x": [1, (2, inner)]}, "step": 3},
        lambda inner: [{"rng": torch.get_rng_state()}, inner],
    ],
)
def test_a_scaler_is_found_wherever_it_is(tmp_path: Path, command: Command, wrap: Callable[[Any], Any]) -> None:
    save(tmp_path, {f"rank{rank}.pt": wrap(scaler_state(2.0**rank)) for rank in range(2)})
    status, text = command()
    assert (status, "scale: 1 on rank 0; 2 on rank 1" in text) == (1, True)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_optimizers_that_stepped_apart(tmp_path: Path, command: Command, name: str) -> None:
    states = {f"optimizer_{rank}.bin": {"opt": stepped(name, 2 + rank).state_dict()} for rank in range(2)}
    save(tmp_path, states | {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    status, text = command()
    assert (status, "\n  steps: 2 on rank 0; 3 on rank 1" in text) == (1, True)
    assert text.count("tracker") == 1


def test_two_scalers_are_told_apart(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"rank{r}.pt": {"g": scaler_state(), "d": scaler_state(2.0**r)} for r in range(2)})
    status, text = command()
    assert (status, "\n  rank*.pt d scale: 1 on rank 0; 2 on rank 1\n" in text) == (1, True)


def test_the_torchs_scale_that_went_to_inf_is_shown(tmp_path: Path, command: Command) -> None:
    tensors = scaler_state(torch.tensor(float("inf")), torch.tensor(3))
    save(tmp_path, {"rank0.pt": tensors, "rank1.pt": scaler_state(float("inf"), 3)})
    assert command()[0] == 0


def test_a_pattern_says_where_the_rank_is(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"epoch_1/ckpt-{rank}.pt": scaler_state(2.0**rank) for rank in range(2)})
    assert command()[0] == 2
    status, text = command("--pattern", "**/ckpt-{rank}.pt")
    assert (status, text.startswith(f"epoch_1/ckpt-*.pt in {one_line(tmp_path)}; 2 ranks\n")) == (1, True)
    assert command("--pattern", "*/ckpt-*.pt")[0] == 2


def test_a_pattern_chooses_the_files(tmp_path: Path, command: Command) -> None:
    save(
        tmp_path,
        {f"{step}/rank{rank}.pt": scaler_state(2.0 ** (rank * step)) for rank in range(2) for step in range(2)},
    )
    assert command()[0] == 1
    assert command("--pattern", "0/*")[0] == 0
    assert command("--pattern", "{rank}/rank0.pt")[0] == 0


@pytest.mark.parametrize(
    "names",
    [
        ["scaler.pt", "optimizer.pt"],  # one rank's, for all
        ["optimizer.bin", "optimizer_1.bin"],  # Accelerate's second optimizer
        ["optimizer.bin", "optimizer_0.bin", "optimizer_1.bin"],
        ["optimizer_1.bin", "optimizer_2.bin"],
        ["checkpoint_0.pt", "checkpoint_1.pt"],  # epochs
        ["rank0.pt"],
        ["frank_0.pt", "frank_1.pt"],
        [],
    ],
)
def test_numbers_that_are_no_ranks_raise_no_alarm(tmp_path: Path, command: Command, names: list[str]) -> None:
    save(tmp_path, {name: scaler_state(2.0**number) for number, name in enumerate(names)})
    status, text = command()
    assert status == 2
    assert "NOTHING TO COMPARE" in text
    assert text.startswith("rank*.pt in " if "rank0.pt" in names else "no states of ranks in ")
    assert "call scaler_triton.audit(optimizer, scaler, model) in the running job" in text


def test_states_without_scaler_and_optimizer_say_nothing(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"model_rank{rank}.pt": {"w": torch.ones(3)} for rank in range(2)})
    save(tmp_path, {f"tensor_rank{rank}.pt": torch.ones(3) for rank in range(2)})
    status, text = command()
    assert (status, "no states of ranks" in text) == (2, True)


def test_a_missing_rank_is_named(tmp_path: Path, command: Command) -> None:
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in (0, 3)})
    status, text = command()
    assert (status, text.endswith("There is no state of rank 1-2.\n")) == (0, True)


@pytest.mark.parametrize("words", [["--pattern", ""], ["--pattern", "/etc/*"]])
def test_a_pattern_that_is_none_is_refused(command: Command, words: list[str]) -> None:
    status, text = command(*words)
    assert (status, text.count("\n")) == (2, 1)
    assert "--pattern must be" in text


def test_a_folder_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(tmp_path / "none")]) == 2
    assert "CHECKPOINT_DIR must be a folder, got " in capsys.readouterr().err


# Files that somebody made to harm, or that broke.


class Bomb:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def cyclic() -> list[Any]:
    """Lists in lists: 40 levels of a hundred, each level one object."""
    inner: list[Any] = []
    for _ in range(40):
        inner = [inner] * 100
    inner.append(inner)
    return inner


def compressed(path: Path) -> None:
    """Rewrite an archive so that it is larger in memory than on disk."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def unreadable(command: Command, text: str) -> None:
    """Rank 1's file is one line, and the exit status says that not all was read."""
    status, said = command()
    assert status == 2
    assert "\nrank 1: rank1.pt: " in said
    assert text in said
    assert "UNKNOWN" in said
    assert "weights_only" not in said


@pytest.fixture
def harmless(tmp_path: Path) -> Path:
    """Two ranks' states; gives the second's."""
    save(tmp_path, {f"rank{rank}.pt": scaler_state() for rank in range(2)})
    return tmp_path / "rank1.pt"


def test_a_bomb_does_not_go_off(harmless: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = harmless.parent / "mark"
    torch.save({"scaler": scaler_state(), "x": Bomb(mark)}, harmless)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    unreadable(command, "rank1.pt: holds posix.mkdir, not only tensors and plain values")
    assert not mark.exists()
    torch.load(harmless, weights_only=False)  # it is one
    assert mark.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_bare_pickles_are_not_opened(harmless: Path, command: Command, legacy: bool) -> None:
    mark = harmless.parent / "mark"
    if legacy:
        torch.save(Bomb(mark), harmless, _use_new_zipfile_serialization=False)
    else:
        harmless.write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("random_states_0.pkl", ".metadata", "rank0.pkl", "random_states_rank0.pkl"):
        (harmless.parent / name).write_bytes(pickle.dumps(Bomb(mark)))
    unreadable(command, "not a zip archive")
    assert not mark.exists()


def test_broken_files_are_one_line_each(harmless: Path, command: Command) -> None:
    whole = harmless.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"PK\x05\x06" + bytes(18), os.urandom(1000)):
        harmless.write_bytes(data)
        unreadable(command, "rank1.pt: ")
    harmless.write_bytes(whole[:100] + bytes(100) + whole[200:])
    assert command()[0] in (0, 2)


def test_a_compressed_archive_is_refused(harmless: Path, command: Command) -> None:
    torch.save({"x": torch.zeros(10**6)}, harmless)
    compressed(harmless)
    assert harmless.stat().st_size < 10**5
    unreadable(command, "its archive is compressed")


def test_too_large_a_structure_is_refused(harmless: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from scaler_triton.auditing import saved_states

    monkeypatch.setattr(saved_states, "STRUCTURE_LIMIT", 1000)
    torch.save(["x" * 2000], harmless)
    unreadable(command, "; the limit is 1000")


@pytest.mark.parametrize("field", ["scale", "_growth_tracker"])
@pytest.mark.parametrize("value", ["4", None, True, [4.0], torch.ones(2), b"\x80"])
def test_a_state_is_numbers(harmless: Path, command: Command, field: str, value: Any) -> None:
    torch.save({"scaler": scaler_state() | {field: value}}, harmless)
    unreadable(command, f"rank1.pt: {field} must be a number, got {type(value).__name__}")


def test_a_step_is_a_number(harmless: Path, command: Command) -> None:
    torch.save({"state": {0: {"step": "many"}}, "param_groups": []}, harmless)
    unreadable(command, "step must be a number, got str")


def test_lists_within_themselves_end(harmless: Path, command: Command) -> None:
    torch.save([cyclic(), scaler_state(8.0)], harmless)
    torch.save([[], scaler_state()], harmless.with_name("rank0.pt"))
    assert command()[0] == 1


def test_names_cannot_write_to_the_terminal(tmp_path: Path, command: Command) -> None:
    key = "\x1b[2J" * 100
    save(tmp_path, {f"\x1b[1m_rank{r}.pt": {key: scaler_state(), "b": scaler_state()} for r in range(2)})
    status, text = command()
    assert status == 0
    assert "\x1b" not in text


def test_torchs_advice_to_load_unsafely_is_not_passed_on(harmless: Path, command: Command) -> None:
    torch.save({"x": pytest.raises}, harmless)
    unreadable(command, "holds ")

"""The tuner: when it refuses, what it measures and chooses, what it shows and writes; kernels tiny, times invented."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scaler_triton import cli
from scaler_triton.cli import tune
from scaler_triton.cli.console import NoBar
from scaler_triton.kernels import config, launch, norm, unscale
from scaler_triton.kernels.config import DEFAULT, ITEMSIZES, MODES, LaunchConfig

pytestmark = pytest.mark.native

DEVICE = torch.device("cpu" if launch.INTERPRETED else "cuda:0")
FIRST, SECOND = LaunchConfig(4, 1, 2), LaunchConfig(8, 2, 1)
KEYS = [(mode, size, workload) for size in ITEMSIZES for workload in ("span", "mixed") for mode in MODES]


def tiny(itemsize: int) -> dict[str, list[int]]:
    return {"span": [600], "mixed": [5, 64]}


@pytest.fixture(autouse=True)
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three candidates, and a cache of the test's own."""
    monkeypatch.setattr(config, "CANDIDATES", (FIRST, DEFAULT, SECOND))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config.read.cache_clear()
    yield
    config.read.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A timer by which SECOND is quicker in passes that only read, FIRST a bit in a clip; `timed` is what it timed."""
    made, launch_of = {}, tune.Scratch.launch_of

    def noted(scratch: tune.Scratch, mode: str, shape: LaunchConfig, *args: float) -> Any:
        launch = launch_of(scratch, mode, shape, *args)
        made[launch] = mode, shape
        return launch

    def timer(launch: Any) -> float:
        timer.timed.append(made.get(launch, ("copy", None)))
        return {("check", SECOND): 0.5, ("norm", SECOND): 0.5, ("clip", FIRST): 0.9}.get(timer.timed[-1], 1.0)

    timer.timed = []
    monkeypatch.setattr(tune.Scratch, "launch_of", noted)
    return timer


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a tuner which does nothing says."""
    assert cli.main(["tune", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_what_is_missing_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tune, "missing_packages", lambda names: ["triton"])
        assert "tune needs triton" in refusal(capsys)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert "TRITON_INTERPRET=1" in refusal(capsys)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "tune needs a GPU, and there is none here" in refusal(capsys)
    for name, answer in (("is_available", True), ("current_device", 0), ("get_device_name", "Some GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    (tmp_path / "file").touch()
    assert f"cannot write to {tmp_path / 'file'}" in refusal(capsys, "--out", str(tmp_path / "file"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"cannot write to {tmp_path}: permission denied" in refusal(capsys, "--out", str(tmp_path))
    monkeypatch.setattr(config, "user_file", lambda gpu: None)
    assert "name a folder with --out" in refusal(capsys)


def test_the_whole_run(tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.user_file("Some GPU")
    assert path is not None
    path.parent.mkdir(parents=True)
    assert config.tuned_for("Some GPU", KEYS[0])[1] is None
    assert tune.tune(DEVICE, "Some GPU", path, tiny, quick) == 0

    chosen = {key: DEFAULT if key[0] == "unscale" else SECOND for key in KEYS}  # for norm and clip by their sum
    assert {key: config.tuned_for("Some GPU", key) for key in KEYS} == {key: (chosen[key], path) for key in KEYS}
    each = [(mode, shape) for mode in MODES for shape in (FIRST, DEFAULT, SECOND)]
    assert sorted(map(str, quick.timed)) == sorted(map(str, 6 * tune.ROUNDS * [*each, ("copy", None)]))

    data = json.loads(path.read_text())
    assert {"date", "scaler_triton", "torch", "triton", "cuda", "driver", "python"} <= set(data["provenance"])
    assert len(data["measured"]) == 3 * len(KEYS)
    assert [path.name for path in path.parent.iterdir()] == ["Some_GPU.json"]
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert [line[:3] for line in lines if line and line[0] in MODES] == [list(map(str, key)) for key in KEYS]
    assert f"18 of {len(KEYS)} defaults replaced" in said
    assert said.endswith(f"written: {path}\n")


def figures(shape: LaunchConfig, *ms: float, problem: str = "") -> tune.Figures:
    return tune.Figures(KEYS[0], shape, list(ms), 1.0, 2000.0, problem)


@pytest.mark.parametrize(
    ("rivals", "wanted"),
    [
        ([(1.0, 1.0, 1.0)], DEFAULT),
        ([(0.9, 0.9, 0.9)], FIRST),
        ([(0.5, 0.5, 1.0)], DEFAULT),  # one round as slow as the default's quickest
        ([(0.995, 0.995, 0.995)], DEFAULT),  # by less than 1 %
        ([(0.9, 0.9, 0.9), (0.8, 0.8, 0.8)], SECOND),
        ([(), (0.8, 0.8, 0.8)], SECOND),  # dropped
        ([()], DEFAULT),
    ],
)
def test_the_choice_is_the_quickest_beyond_noise(rivals: list[tuple[float, ...]], wanted: LaunchConfig) -> None:
    found = [figures(DEFAULT, 1.0, 1.1, 1.0)]
    found += [figures(shape, *ms) for shape, ms in zip([FIRST, SECOND], rivals, strict=False)]
    assert tune.choose(found) == {KEYS[0]: wanted}


def test_a_wrong_candidate_is_dropped_and_a_wrong_default_ends_it(
    tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {FIRST}
    for module, name in ((unscale, "launch_unscale"), (unscale, "launch_check"), (norm, "launch_sum_of_squares")):
        right = getattr(module, name)

        def spoiled(grads: Any, *args: Any, right: Any = right, name: str = name, **options: Any) -> None:
            if grads.config not in bad:
                right(grads, *args, **options)
            elif name == "launch_check":
                args[0].fill_(1.0)  # the flag

        monkeypatch.setattr(module, name, spoiled)
    found = list(tune.measure(DEVICE, tiny, quick, NoBar()))
    problems = {(each.key[0], each.problem) for each in found if each.problem}
    wrong = {("unscale", "wrong values"), ("check", "finite values flagged"), ("norm", "a wrong norm")}
    assert problems == wrong
    assert not any(each.ms for each in found if each.problem)

    bad.add(DEFAULT)
    assert tune.tune(DEVICE, "Some GPU", tmp_path / "gpu.json", tiny, quick) == 1
    assert "nothing is written: the default fails in unscale of 2 bytes: wrong values" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.gpu
def test_on_a_gpu_the_whole_command_tunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert set(config.read(path, torch.cuda.get_device_name())) == set(KEYS)

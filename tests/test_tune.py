"""The tuner's command: when it refuses, what it shows, what it writes; kernels tiny and times invented, no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scaler_triton import cli
from scaler_triton.cli import tune
from scaler_triton.kernels import launcher, lookup, tuned_file
from scaler_triton.kernels import sweep as sweep_module
from scaler_triton.kernels.launch_config import DEFAULT, ITEMSIZES, MODES, LaunchConfig
from scaler_triton.kernels.tuned_file import Origin

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.native

DEVICE = torch.device("cpu" if launcher.INTERPRETED else "cuda")
ORIGIN = Origin("Some GPU", "9.0", "3.7.1", "0123456789abcdef")
FASTER = LaunchConfig(8, 2, 1)
CHOSEN = {(mode, size): FASTER if mode == "check" else DEFAULT for mode in MODES for size in ITEMSIZES}


def timer(trial: Any) -> float:
    """One configuration is twice as fast as the others, where nothing is written."""
    return 0.5 if (trial.mode, trial.config) == ("check", FASTER) else 1.0


def tiny(itemsize: int) -> dict[str, list[int]]:
    return {"span": [600], "mixed": [5, 64]}


def run_tune(path: Path) -> int:
    return tune.tune(DEVICE, ORIGIN, path, tiny, timer)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, of which later tests know nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lookup.forget()
    yield
    lookup.forget()


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a tuner which does nothing says."""
    assert cli.main(["tune", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.skipif(not launcher.INTERPRETED, reason="asks for the interpreter")
def test_an_interpreters_time_is_not_a_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert "TRITON_INTERPRET=1" in refusal([], capsys)


def test_without_a_gpu_it_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "scaler_triton", "tune"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "scaler_triton: tune needs a GPU, and there is none here\n"


@pytest.mark.parametrize(
    ("absent", "said"), [("triton", "needs triton"), ("tabulate", "needs tabulate: pip install tabulate")]
)
def test_a_missing_package_is_named(
    absent: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "missing_packages", lambda names: [name for name in names if name == absent])
    assert said in refusal([], capsys)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"tmp|file"):
        tune.output_path(tmp_path / "file", ORIGIN)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="permission denied"):
        tune.output_path(tmp_path, ORIGIN)
    monkeypatch.setattr(lookup, "cache_folder", lambda: None)
    with pytest.raises(FileNotFoundError, match="--out"):
        tune.output_path(None, ORIGIN)


def test_a_folder_may_be_named_at_the_prompt(tmp_path: Path) -> None:
    assert cli.build_parser().parse_args(["tune"]).out is None
    assert cli.build_parser().parse_args(["tune", "--out", str(tmp_path)]).out == tmp_path


def test_the_file_goes_to_the_cache_or_to_the_folder_named(tmp_path: Path) -> None:
    assert tune.output_path(tmp_path / "new", ORIGIN) == tmp_path / "new" / "Some_GPU.json"
    path = tune.output_path(None, ORIGIN)
    assert path == lookup.user_file(ORIGIN)
    assert path.parent == tmp_path / "cache/scaler_triton/tuned"
    assert path.parent.is_dir()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, str, str]:
    """One run: its status, its file, what it printed and its bar."""
    for package in ("tabulate", "tqdm"):
        pytest.importorskip(package)
    path = tmp_path_factory.mktemp("tuned") / "gpu.json"
    with pytest.MonkeyPatch.context() as patch:
        out, err = tmp_path_factory.mktemp("said") / "out", tmp_path_factory.mktemp("said") / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            status = run_tune(path)
    return status, path, out.read_text(), err.read_text()


def test_what_was_chosen_is_written_and_found(tuned: tuple[int, Path, str, str]) -> None:
    status, path, printed, _ = tuned
    assert status == 0
    assert printed.endswith(f"written: {path}\n")
    assert tuned_file.parse(path.read_bytes()) == tuned_file.TunedFile(ORIGIN, CHOSEN)
    user = tune.output_path(None, ORIGIN)
    user.write_bytes(path.read_bytes())
    assert {key: lookup.lookup(ORIGIN, *key).config for key in CHOSEN} == CHOSEN


def test_the_file_says_where_its_figures_come_from(tuned: tuple[int, Path, str, str]) -> None:
    data = json.loads(tuned[1].read_text())
    assert {"date", "scaler_triton", "torch", "cuda", "driver", "python"} <= set(data["provenance"])
    assert data["provenance"]["torch"] == torch.__version__
    assert len(data["measured"]) == 6 * len(sweep_module.CANDIDATES)
    fastest = next(each for each in data["measured"] if (each["mode"], each["config"]) == ("check", [8, 2, 1]))
    assert fastest["ms"] == {"span": 0.5, "mixed": 0.5}
    assert fastest["gbps"]["span"] == pytest.approx(600 * fastest["itemsize"] / 0.5e-3 / 1e9, rel=1e-3)
    assert tuned[1].stat().st_size < tuned_file.SIZE_LIMIT / 4


def test_every_candidate_is_shown(tuned: tuple[int, Path, str, str]) -> None:
    _, _, printed, bar = tuned
    lines = printed.splitlines()
    assert len([line for line in lines if " x " in line and line.startswith(MODES)]) == len(CHOSEN) * len(
        sweep_module.CANDIDATES
    )
    assert len([line for line in lines if line.endswith("default, chosen")]) == 3
    assert len([line for line in lines if line.endswith("  chosen")]) == 3
    assert "3 of 6 defaults replaced: what replaces the default, 8 x 2 x 2, is more than 2% faster" in printed
    assert "tuning Some GPU" in bar
    assert "100%" in bar


def test_the_table_in_full() -> None:
    pytest.importorskip("tabulate")

    def figures(mode: str, config: LaunchConfig, span: float) -> sweep_module.Figures:
        gbps = {"span": span, "mixed": span / 2}
        return sweep_module.Figures(mode, 2, config, "", dict.fromkeys(gbps, 1.0), gbps, 2000.0)

    dropped = sweep_module.Figures("unscale", 2, FASTER, "wrong values (span)", {}, {}, 2000.0)
    both = [figures("check", DEFAULT, 1500.4), figures("check", FASTER, 1800.0), figures("unscale", DEFAULT, 1000.0)]
    table = tune.figures_table([*both, dropped], {("check", 2): FASTER, ("unscale", 2): DEFAULT})
    lines = table.splitlines()
    assert [" ".join(line.split()) for line in lines if not line.startswith("--")][1:] == [
        "check 2 8 x 2 x 2 1500 75% 750 38% default",
        "check 2 8 x 2 x 1 1800 90% 900 45% chosen",
        "unscale 2 8 x 2 x 2 1000 50% 500 25% default, chosen",
        "unscale 2 8 x 2 x 1 dropped: wrong values (span)",
    ]
    assert [line.startswith("--") for line in lines] == [False, True, False, False, True, False, False]


def test_what_was_tuned_counts_from_now_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate")
    figures = [sweep_module.Figures("check", 2, DEFAULT, "", {"span": 1.0}, {"span": 1.0}, 1.0)]
    monkeypatch.setattr(sweep_module, "sweep", lambda *_: figures)
    path = tmp_path / "gpu.json"
    assert tuned_file.read(path) is None
    assert run_tune(path) == 0
    assert tuned_file.read(path) is not None


def test_a_sweep_that_fails_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(sweep_module, "sweep", fail)
    assert run_tune(tmp_path / "gpu.json") == 1
    assert "tune failed, and nothing is written: CUDA out of memory\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tabulate")
    figures = [sweep_module.Figures("check", 2, DEFAULT, "", {"span": 1.0}, {"span": 1.0}, 1.0)]
    monkeypatch.setattr(sweep_module, "sweep", lambda *_: figures)
    assert run_tune(tmp_path / "gone" / "gpu.json") == 1
    said = capsys.readouterr()
    assert "cannot write" in said.err
    assert "8 x 2 x 2" in said.out  # the figures are not lost


@pytest.mark.gpu
def test_on_a_gpu_the_whole_command_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tabulate")
    sweep = sweep_module.sweep
    few = (LaunchConfig(4, 1, 2), DEFAULT)
    monkeypatch.setattr(sweep_module, "sweep", lambda *args: sweep(*args, candidates=few))
    assert cli.main(["tune", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path)
    lookup.forget()
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = tuned_file.parse(path.read_bytes()).chosen
    assert {key: lookup.config_for(device, *key) for key in CHOSEN} == chosen
    with capsys.disabled():
        print(path.read_text())

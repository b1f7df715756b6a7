"""The command line: what it refuses, what it needs, and that it answers at once."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaler_triton import cli
from scaler_triton.demo import command
from scaler_triton.demo.cases import CASES, list_cases


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the parser says to words that it refuses with status 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["demo", "--ddp", "--fsdp1"], ["demo", "--optimizer", "lbfgs"]])
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(words, capsys)


@pytest.mark.parametrize("steps", ["5", "0", "-1", "129", "many"])
def test_too_few_or_too_many_steps_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--steps" in refused(["demo", "--steps", steps], capsys)


def test_an_unknown_case_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tabulate")
    assert cli.main(["demo", "--prove", "no-such"]) == 2
    said = capsys.readouterr().err
    assert "no-such" in said
    assert "fsdp1-fused" in said


def test_prove_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tabulate")
    assert cli.main(["demo", "--prove", "list"]) == 0
    assert "fused-then-plain" in capsys.readouterr().out


def test_the_list_of_cases_breaks_between_words_in_a_terminal() -> None:
    whole, broken = list_cases().splitlines(), list_cases(80).splitlines()
    assert len(whole) == len(CASES) < len(broken)
    assert max(map(len, broken)) <= 80
    assert " ".join(" ".join(broken).split()) == " ".join(" ".join(whole).split())


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--fsdp1"], "--fsdp1"), (["--optimizer", "sgd"], "--optimizer"), (["--steps", "7"], "--steps")],
)
def test_prove_refuses_what_it_would_pass_over(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tabulate")
    assert cli.main(["demo", "--prove", "list", *words]) == 2
    assert capsys.readouterr().err == f"scaler_triton: --prove takes no other option, got {named}\n"


@pytest.mark.parametrize(("words", "absent"), [([], "matplotlib"), (["--prove", "list"], "tabulate")])
def test_a_missing_package_is_one_line_that_says_how_to_get_it(
    words: list[str], absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    assert cli.main(["demo", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert absent in said
    assert f"pip install {absent}" in said


def test_a_plot_that_cannot_be_written_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "tabulate", "tqdm"):
        pytest.importorskip(package)
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "plot.png")]) == 2
    assert "cannot write there" in capsys.readouterr().err
    assert cli.main(["demo", "--out", str(tmp_path / "plot.jpg")]) == 2
    assert "plot.jpg: must be a .png file or a folder" in capsys.readouterr().err
    assert not (tmp_path / "plot.jpg").exists()


def test_the_plot_goes_into_a_folder_or_to_a_file(tmp_path: Path) -> None:
    assert command.picture_path(tmp_path / "new") == tmp_path / "new" / "demo.png"
    assert command.picture_path(tmp_path / "my.png") == tmp_path / "my.png"
    assert list(tmp_path.rglob("*.png")) == []


def test_a_plot_that_is_there_stays_until_there_is_another(tmp_path: Path) -> None:
    (tmp_path / "my.png").write_text("a plot")
    assert command.picture_path(tmp_path / "my.png").read_text() == "a plot"


@pytest.mark.parametrize("word", ["fused-clip", "all"])
def test_prove_runs_what_was_named(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate")
    from scaler_triton.demo import cases, prove

    asked: list[str] = []
    monkeypatch.setattr(prove, "prove", lambda cases: asked.extend(case.name for case in cases) or 1)
    assert cli.main(["demo", "--prove", word]) == 1
    assert asked == (list(cases.CASES) if word == "all" else [word])


@pytest.mark.distributed
@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a group of processes")
@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_an_interrupt_while_ranks_start_ends_them_without_a_word(seconds: float) -> None:
    words = [sys.executable, "-m", "scaler_triton", "demo", "--prove", "fsdp1-fused"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def heed() -> None:  # a job in the background of a script ignores interrupts, and so would its children
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(words, **pipes, text=True, start_new_session=True, preexec_fn=heed) as demo:
        demo.stdout.readline()  # the ranks are started right after it
        time.sleep(seconds)
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=30)
    assert (demo.returncode, errors) == (130, "")

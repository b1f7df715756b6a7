"""The demo's command line: what it refuses, what it needs, what it runs."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from scaler_triton import cli


@pytest.fixture
def no_package(monkeypatch: Any) -> None:
    """Pretend that none of the extra packages is installed."""
    find_spec, extras = importlib.util.find_spec, ("matplotlib", "tabulate", "tqdm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in extras else find_spec(name))
    for name in extras:
        monkeypatch.setitem(sys.modules, name, None)


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wrong_steps = [["--steps", steps] for steps in ("5", "0", "-1", "129", "many")]
    for words in (["--ddp", "--fsdp1"], ["--optimizer", "lbfgs"], *wrong_steps):
        with pytest.raises(SystemExit) as stop:
            cli.main(["demo", *words])
        assert stop.value.code == 2
        assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("word", ["list", "fused-clip", "all"])
def test_prove_runs_what_was_named_and_needs_no_package(
    word: str, no_package: None, monkeypatch: Any, capsys: Any
) -> None:
    from scaler_triton.demo import proofs

    asked: list[str] = []
    monkeypatch.setattr(proofs, "prove", lambda cases: asked.extend(case.name for case in cases) or 1)
    assert cli.main(["demo", "--prove", word]) == (0 if word == "list" else 1)
    assert asked == {"list": [], "all": list(proofs.CASES)}.get(word, [word])
    assert ("fused-then-plain" in capsys.readouterr().out) is (word == "list")


def test_without_matplotlib_the_demo_runs_and_only_a_picture_that_was_asked_for_is_refused(
    no_package: None, monkeypatch: Any, capsys: Any
) -> None:
    from scaler_triton.demo import show

    asked: list[Any] = []
    monkeypatch.setattr(show, "show", lambda *arguments: asked.append(arguments) or 0)
    assert cli.main(["demo", "--steps", "6"]) == 0
    assert asked == [("both", "fsdp1", "adamw-fused", 6, None)]
    assert cli.main(["demo", "--out", "plot.png"]) == 2
    said = capsys.readouterr().err
    assert said == "scaler_triton: --out plot.png: a picture needs matplotlib: pip install matplotlib\n"
    assert len(asked) == 1


def test_options_reach_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    from scaler_triton.demo import show

    asked: list[Any] = []
    monkeypatch.setattr(show, "show", lambda *arguments: asked.append(arguments) or 0)
    words = ["--scaler", "torch", "--fsdp2", "--optimizer", "sgd", "--steps", "12", "--out", str(tmp_path)]
    assert cli.main(["demo", *words]) == 0
    assert asked == [("torch", "fsdp2", "sgd", 12, tmp_path / "demo.png")]


def test_a_plot_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "plot.png")]) == 2
    assert "cannot write there" in capsys.readouterr().err
    assert cli.main(["demo", "--out", str(tmp_path / "plot.jpg")]) == 2
    assert "plot.jpg: must be a .png file or a folder" in capsys.readouterr().err

"""The demo's command line: what it refuses, what it needs, what it runs."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from scaler_triton import cli


@pytest.fixture
def packages() -> None:
    """Skip where the demo's packages are not installed."""
    for package in ("matplotlib", "tabulate", "tqdm"):
        pytest.importorskip(package)


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wrong_steps = [["--steps", steps] for steps in ("5", "0", "-1", "129", "many")]
    for words in (["--ddp", "--fsdp1"], ["--optimizer", "lbfgs"], *wrong_steps):
        with pytest.raises(SystemExit) as stop:
            cli.main(["demo", *words])
        assert stop.value.code == 2
        assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("word", ["list", "fused-clip", "all"])
def test_prove_runs_what_was_named(word: str, packages: None, monkeypatch: Any, capsys: Any) -> None:
    from scaler_triton.demo import proofs

    asked: list[str] = []
    monkeypatch.setattr(proofs, "prove", lambda cases: asked.extend(case.name for case in cases) or 1)
    assert cli.main(["demo", "--prove", word]) == (0 if word == "list" else 1)
    assert asked == {"list": [], "all": list(proofs.CASES)}.get(word, [word])
    assert ("fused-then-plain" in capsys.readouterr().out) is (word == "list")


@pytest.mark.parametrize(("words", "absent"), [([], "matplotlib"), (["--prove", "list"], "tabulate")])
def test_a_missing_package_is_named(words: list[str], absent: str, monkeypatch: Any, capsys: Any) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    assert cli.main(["demo", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"pip install {absent}" in said


def test_a_plot_that_cannot_be_written_is_refused_at_once(packages: None, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "plot.png")]) == 2
    assert "cannot write there" in capsys.readouterr().err
    assert cli.main(["demo", "--out", str(tmp_path / "plot.jpg")]) == 2
    assert "plot.jpg: must be a .png file or a folder" in capsys.readouterr().err

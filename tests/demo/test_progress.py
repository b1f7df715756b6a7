"""The bar, and work that goes on where there is none."""

from __future__ import annotations

import sys

import pytest

from scaler_triton.cli.console import NoBar, new_bar
from scaler_triton.demo.progress import bar_fed_by_file


def test_without_tqdm_there_is_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with new_bar("three steps", 3) as bar:
        assert type(bar) is NoBar
        bar.update()
    with bar_fed_by_file("one step", 1) as feed, open(feed, "a") as file:
        file.write("loss 3\n")
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_what_is_written_into_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    with bar_fed_by_file("one step", 1) as feed, open(feed, "a") as file:
        file.write("loss 3\n")
    said = capsys.readouterr().err
    assert "one step: 100%" in said
    assert "loss 3" in said

"""The demo's picture: what it says in words, and that it is written."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.image import imread
from test_show import CONFIG, OURS, TORCHS

from scaler_triton.demo.plot import Look, draw, save_plot


def test_the_picture_says_whose_ranks_split() -> None:
    figure = draw(CONFIG, {"torch": TORCHS, "ours": OURS}, "title", Look(ground="none"), 6)
    loss, torchs, ours = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "title",
        "torch's scaler: the ranks' scales part after step 2",
        "scaler_triton: both ranks hold the same scale",
    ]
    assert [text.get_text() for text in loss.texts] == ["inf on\nrank 1", "inf on\nrank 0", "inf on\nrank 1"]
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (loss, torchs, ours)]
    assert labels == [["torch's scaler", "scaler_triton"], ["rank 0", "rank 1", "skipped"], ["both ranks", "skipped"]]
    assert [[*point] for point in torchs.lines[2].get_xydata()] == [[2, 8], [5, 8], [4, 8]]
    assert torchs.get_ylim() == ours.get_ylim()
    assert figure.get_facecolor()[-1] == 0


def test_one_run_has_one_scale_and_is_written(tmp_path: Path) -> None:
    figure = draw(CONFIG, {"ours": OURS[:1]}, "title", Look(), 6)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["title", ""]
    save_plot(CONFIG, {"ours": OURS}, "title", tmp_path / "demo.png")
    assert imread(tmp_path / "demo.png").std() > 0.01

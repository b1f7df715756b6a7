"""What an overflow report says of a step that no update has counted yet."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from scaler_triton.overflow_report import BadGradient, OverflowReport

ROOT = Path(__file__).parents[1]

BAD = BadGradient("weight", "NaN", 3, rank=1)


def test_a_step_that_is_not_yet_counted_is_told_without_a_number() -> None:
    assert str(OverflowReport(None, (BAD,), gathered=True, pending=True)).splitlines() == [
        "The last skip: 1 bad gradient on rank 1.",
        "rank  parameter  holds  numel",
        "----  ---------  -----  -----",
        "   1  weight     NaN        3",
    ]


def test_the_pages_show_a_report_as_it_is() -> None:
    report = OverflowReport(39, (BadGradient("positions", "Inf", 2048, rank=1),), gathered=True)
    for page in ("README.md", "docs/why-skipped.md"):
        assert f"\n{report}\n```" in (ROOT / page).read_text()


def test_a_finding_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        OverflowReport(None, (), gathered=True).update = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        BAD.rank = 3  # type: ignore[misc]


def test_without_a_skip_there_is_no_table() -> None:
    assert str(OverflowReport(None, (), gathered=True)) == "No step was skipped."
    failed = OverflowReport(None, (), gathered=True, untold=("rank 0 raised TypeError",))
    assert str(failed) == "No step was skipped.\nNot told: rank 0 raised TypeError."


def test_a_pending_skip_of_which_nothing_is_known_is_told() -> None:
    told = str(OverflowReport(None, (), gathered=False, pending=True))
    assert told == "The last skip: nothing known on this rank; ask with gather=True."


def test_a_name_is_printed_on_one_line() -> None:
    bad = BadGradient("up\x1b[2J\nweight", "NaN", 3, rank=1)
    assert "   1  up?[2J weight  NaN        3" in str(OverflowReport(3, (bad,), gathered=True)).splitlines()

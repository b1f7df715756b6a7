"""What an overflow report says of a step that no update has counted yet."""

from __future__ import annotations

from scaler_triton.overflow_report import BadGradient, OverflowReport

BAD = BadGradient("weight", "NaN", 3, rank=1)


def test_a_step_that_is_not_yet_counted_is_told_without_a_number() -> None:
    assert str(OverflowReport(None, (BAD,), gathered=True)).splitlines() == [
        "The last skip: 1 bad gradient on rank 1.",
        "rank  parameter  holds  numel",
        "----  ---------  -----  -----",
        "   1  weight     NaN        3",
    ]


def test_without_a_skip_there_is_no_table() -> None:
    assert str(OverflowReport(None, (), gathered=True)) == "No step was skipped."

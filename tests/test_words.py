"""How findings are said."""

from __future__ import annotations

from scaler_triton.text import one_line, ranges


def test_ranks_are_written_as_ranges() -> None:
    assert ranges([5, 0, 1, 2, 8, 7]) == "0-2, 5, 7-8"


def test_no_control_character_reaches_the_terminal() -> None:
    assert one_line("a\x1b[31m\n\tb\x07") == "a?[31m b?"
    assert len(one_line("x " * 10**6)) <= 160

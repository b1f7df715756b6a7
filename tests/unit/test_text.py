"""Text for reports."""

from scaler_triton.text import count_of, error_line, one_line, ranges, rank_names, table


def test_ranks_are_written_as_ranges_and_counts_with_their_nouns() -> None:
    assert ranges([5, 0, 1, 2, 8, 7, 7]) == "0-2, 5, 7-8"
    assert (ranges([]), rank_names([3]), rank_names([0, 1, 3])) == ("", "rank 3", "ranks 0-1, 3")
    assert [count_of(count, "shard (of FSDP1)") for count in (0, 1)] == ["0 shards (of FSDP1)", "1 shard (of FSDP1)"]


def test_no_control_character_reaches_the_terminal_and_lines_are_short() -> None:
    assert one_line("a\x1b[31m\n\tb\x07") == "a?[31m b?"
    assert len(one_line("x " * 10**6)) <= 160
    assert error_line(ValueError("one\ntwo")) == "ValueError: one two"


def test_a_table() -> None:
    assert table([["rank", "scale"], ["0", "4"], ["1", "65536"]], "><") == [
        "rank  scale",
        "----  -----",
        "   0  4    ",
        "   1  65536",
    ]

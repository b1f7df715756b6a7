"""Text for reports: ranks and counts, each on one line of bounded length; tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

WIDTH = 160  # characters of an error: a compiler's may be very long


def ranges(ranks: Iterable[int]) -> str:
    """Return numbers as ranges: "0-2, 5"."""
    runs = groupby(enumerate(sorted(set(ranks))), lambda pair: pair[1] - pair[0])  # which is equal within a run
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def one_line(text: object, width: int = WIDTH) -> str:
    """Return one line of bounded length without control characters."""
    visible = "".join(c if c.isprintable() or c.isspace() else "?" for c in str(text)[: 10 * width])
    return textwrap.shorten(visible, width, placeholder=" ...")  # white space becomes single spaces


def error_line(error: BaseException) -> str:
    """Return an error's kind and text on one line of bounded length."""
    return one_line(f"{type(error).__name__}: {error}")


def rank_names(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def count_of(count: int, what: str) -> str:
    """Return a number and a noun, in the plural unless it is 1; a part in brackets stays behind."""
    head, separator, tail = what.partition(" (")
    return f"{count} {head}{'s' if count != 1 else ''}{separator}{tail}"


def table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return a table's lines.

    Args:
        rows: the first one is the head.
        sides: "<" or ">" for each column: how its cells are aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return ["  ".join(map(format, row, forms)) for row in rows]

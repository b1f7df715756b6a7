"""How an audit says what it found: ranks, counts, lists of names, each on one line of bounded length."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

NAMES = 6  # parameters that are named, of those that differ
WIDTH = 160  # characters of an error: a compiler's has no end


def ranges(ranks: Iterable[int]) -> str:
    """Numbers as people write them: "0-2, 5".

    Args:
        ranks: in any order.
    """
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def one_line(text: object) -> str:
    """One line of bounded length that a terminal can only print: no control characters.

    Args:
        text: what is said, as `str` gives it.
    """
    line = " ".join(str(text)[: 10 * WIDTH].split())
    return textwrap.shorten("".join(c if c.isprintable() else "?" for c in line), WIDTH, placeholder=" ...")


def on(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


def count_of(count: int, what: str) -> str:
    """A number of things; what is in brackets stays behind the plural."""
    head, separator, tail = what.partition(" (")
    return f"{count} {head}{'s' if count != 1 else ''}{separator}{tail}"

"""OverflowReport: which gradients made a step be skipped, printed as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scaler_triton.overflow_marks import INF, NAN
from scaler_triton.text import count_of, one_line, rank_names, table

WORDS = {NAN: "NaN", INF: "Inf", NAN | INF: "NaN and Inf"}


@dataclass(frozen=True)
class BadGradient:
    """A gradient, or a rank's shard of one, that was not finite.

    Args:
        name: the parameter's, fully qualified if a model was passed.
        kinds: "NaN", "Inf" or "NaN and Inf".
        numel: elements that this rank holds.
        rank: the one that held it, counted from 0.
    """

    name: str
    kinds: str
    numel: int
    rank: int


@dataclass(frozen=True)
class OverflowReport:
    """What `overflow_report` found of the last skip.

    Args:
        update: the number of that update, counted from 1; None: none was skipped, or its update is still to come.
        bad: the gradients, by rank, each rank's in the order of its parameters.
        gathered: whether this is of all ranks, or only of this one of several.
        untold: what has no record, in words.
        pending: whether it is a skip whose update is still to come.
    """

    update: int | None
    bad: tuple[BadGradient, ...]
    gathered: bool
    untold: tuple[str, ...] = ()
    pending: bool = False

    def __str__(self) -> str:
        when = "The last skip" if self.update is None else f"The last skip, at update {self.update}"
        none = self.update is None and not self.pending
        lines = ["No step was skipped."] if none else [f"{when}: {self._summary()}", *_table(self.bad)]
        return "\n".join([*lines, *(f"Not told: {text}." for text in self.untold)])

    def _summary(self) -> str:
        ranks = sorted({each.rank for each in self.bad})
        if not self.bad:
            return f"nothing known on {'any rank.' if self.gathered else 'this rank; ask with gather=True.'}"
        where = rank_names(ranks) if self.gathered else f"{rank_names(ranks)}, the only one asked"
        return f"{count_of(len(self.bad), 'bad gradient')} on {where}."


def to_bytes(bad: Sequence[BadGradient], untold: Sequence[str]) -> bytes:
    """Return the findings of a rank, serialised."""
    return json.dumps([[asdict(each) for each in bad], list(untold)]).encode()


def from_bytes(data: bytes) -> tuple[list[BadGradient], list[str]]:
    """Return what `to_bytes` serialised."""
    bad, untold = json.loads(data)
    return [BadGradient(**each) for each in bad], untold


def _table(bad: Sequence[BadGradient]) -> list[str]:
    rows = [(str(each.rank), one_line(each.name), each.kinds, str(each.numel)) for each in bad]
    return table([("rank", "parameter", "holds", "numel"), *rows], "><<>") if bad else []

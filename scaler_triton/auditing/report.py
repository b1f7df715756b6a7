"""What an audit found: a row for each rank, what differs between them, and what that means."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

NOTHING = "-"
UNKNOWN = "?"  # nothing says which ranks' copies of a parameter are meant to be equal
ROWS = 16  # with more ranks, those that hold the same share a row
TABLE = 120  # characters of columns: with more, as of several checkpoints, each of them gets a line
NAMES = 6  # parameters that are named, of those that differ
WIDTH = 160  # characters of an error: a compiler's has no end

PERHAPS = "Nothing says that they are replicas; if they are, pass the DDP model, or replicated=True."
VERDICTS = {
    "split": "SPLIT: the ranks no longer train one model. This does not heal; go back to a state in which they agree.",
    "unknown": "UNKNOWN: not every rank could be read. Nothing differs among the others.",
    "nothing": "NOTHING TO COMPARE: no two ranks hold a value of the same kind.",
    "agree": "AGREE: every rank holds the same",
}

Holders = dict[str, list[int]]  # ranks by what they hold


class Reading(NamedTuple):
    """A value of one rank, as people read it and as it is compared; None: not compared."""

    shown: str
    compared: str | None


class Copy(NamedTuple):
    """One rank's copy of a parameter; `among` names the ranks whose copies are meant to be equal."""

    name: str
    among: str
    digest: str


@dataclass(frozen=True)
class RankState:
    """What one rank holds.

    Args:
        rank: its global number.
        readings: by column; all columns of a report are compared on their own.
        copies: parameters, hashed.
        left_out: how many parameters were not compared, by the reason.
        error: why the rank could not be read, on one line; empty if it could.
        subject: what was audited.
    """

    rank: int
    readings: Mapping[str, Reading] = field(default_factory=dict)
    copies: Sequence[Copy] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    subject: str = ""

    def to_bytes(self) -> bytes:
        """The state as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> RankState:
        """The state that `to_bytes` wrote.

        Args:
            data: JSON.
        """
        fields = json.loads(data)
        fields["readings"] = {name: Reading(*pair) for name, pair in fields["readings"].items()}
        fields["copies"] = [Copy(*entry) for entry in fields["copies"]]
        return RankState(**fields)


@dataclass(frozen=True, repr=False)
class AuditReport:
    """What the ranks hold and what differs; `str()` is the table.

    Args:
        ranks: the states, in order of rank.
        differences: a line for each thing that must be equal and is not; none: the ranks have not been seen to split.
        compared: a line for each thing that was compared and is equal.
        notes: a line for each thing that was not compared, and why.
        subject: what was audited.
    """

    ranks: Sequence[RankState]
    differences: Sequence[str]
    compared: Sequence[str]
    notes: Sequence[str]
    subject: str = ""

    @property
    def split(self) -> bool:
        """True if the ranks differ in what must be equal."""
        return bool(self.differences)

    @property
    def verdict(self) -> str:
        """One of "split", "agree", "unknown" (a rank could not be read) and "nothing" (to compare)."""
        if self.differences:
            return "split"
        if any(state.error for state in self.ranks):
            return "unknown"
        return "agree" if self.compared else "nothing"

    def __repr__(self) -> str:
        return f"<AuditReport: {self.verdict}, {_count(len(self.ranks), 'rank')}>"  # `audit` has printed the rest

    def __str__(self) -> str:
        title = f"{self.subject or 'audit'}; {_count(len(self.ranks), 'rank')}"
        errors: Holders = {}
        for state in self.ranks:
            if state.error:
                errors.setdefault(state.error, []).append(state.rank)
        said = VERDICTS[self.verdict] + (f" {', '.join(self.compared)}." if self.verdict == "agree" else "")
        lines = [f"  {line}" for line in self.differences]
        failed = [f"{_on(ranks)}: {error}" for error, ranks in errors.items()]
        table = [*_table(self.ranks), ""] if self.ranks else []
        return "\n".join([title, "", *table, *failed, said, *lines, *self.notes])


def judge(states: Sequence[RankState], notes: Iterable[str] = (), subject: str = "") -> AuditReport:
    """Compares what the ranks hold.

    Args:
        states: of every rank.
        notes: what else is to be said.
        subject: what was audited; default: what the states say.
    """
    differences, equal = _compare_readings(states)
    parameters = _compare_copies(_groups(states))
    differences += parameters.differences
    equal += parameters.equal
    said = [*_not_compared(states), *parameters.notes, *notes]
    subject = subject or next((state.subject for state in states if state.subject), "")
    return AuditReport(tuple(states), tuple(differences), tuple(equal), tuple(said), subject)


def number(value: float) -> str:
    """A number without a needless fraction, with all its digits.

    Args:
        value: any float.
    """
    return repr(float(value)).removesuffix(".0")


def scaler_readings(scale: float, tracker: int, *, used: bool = True) -> dict[str, Reading]:
    """The columns of a scaler.

    Args:
        scale: the loss scale; compared to the bit, a NaN equals a NaN.
        tracker: good steps since it last changed.
        used: False if it has never scaled a loss.
    """
    shown = number(scale) + ("" if used else " (unused)")
    return {"scale": Reading(shown, float(scale).hex()), "tracker": Reading(str(tracker), str(tracker))}


def steps_reading(steps: Sequence[float]) -> Reading:
    """The column of an optimizer: from the fewest to the most steps of a parameter, of which the most are compared.

    A parameter without a gradient takes no step, on one rank and not on another; the optimizer as a whole does.

    Args:
        steps: of every parameter that has a state.
    """
    if not steps:
        return Reading(NOTHING, None)
    least, most = number(min(steps)), number(max(steps))
    return Reading(most if least == most else f"{least}..{most}", most)


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


def _compare_readings(states: Sequence[RankState]) -> tuple[list[str], list[str]]:
    """What differs and what is equal, of the columns that several ranks have."""
    differences, equal = [], []
    for column in _columns(states):
        holders = _holders(states, column)
        if len(holders) > 1:
            differences.append(_told(states, column))
        elif _several(holders):
            (ranks,) = holders.values()
            equal.append(column if len(ranks) == len(states) else f"{column} (on {_on(ranks)})")
    return differences, equal


def _holders(states: Sequence[RankState], column: str) -> Holders:
    """Which ranks hold which value of a column."""
    holders: Holders = {}
    for state in states:
        reading = state.readings.get(column)
        if reading and reading.compared is not None:
            holders.setdefault(reading.compared, []).append(state.rank)
    return holders


def _told(states: Sequence[RankState], column: str) -> str:
    readings = [state.readings[column] for state in states if column in state.readings]
    shown = {reading.compared: reading.shown for reading in reversed(readings)}
    values = [f"{shown[value]} on {_on(ranks)}" for value, ranks in _holders(states, column).items()]
    return f"{column}: {'; '.join(values) or NOTHING}"


Groups = Mapping[tuple[str, str], Holders]  # by a parameter's name and the ranks that share it


class _Compared(NamedTuple):
    differences: list[str]
    equal: list[str]
    notes: list[str]


def _compare_copies(groups: Groups) -> _Compared:
    """What differs and what is equal, of the parameters that several ranks hold."""
    known, plain = _named(groups, known=True), _named(groups, known=False)
    split = {name: different for name, holders in known.items() if (different := [h for h in holders if len(h) > 1])}
    apart = [name for name, holders in plain.items() if any(len(each) > 1 for each in holders)]
    found = _Compared([], [], [])
    if split:
        found.differences.append(f"replicated parameters: {len(split)} of {len(known)} differ: {_some(list(split))}")
        found.differences.extend(f"  {name}: {_parts(split[name])}" for name in list(split)[:NAMES])
    elif known:
        found.equal.append(_count(len(known), "replicated parameter"))
    if apart:
        found.notes.append(f"Plain parameters: {len(apart)} of {len(plain)} differ: {_some(apart)}. {PERHAPS}")
    elif plain:
        found.notes.append(f"Plain parameters: {len(plain)} of {len(plain)} are equal, though nothing says they must.")
    return found


def _named(groups: Groups, *, known: bool) -> dict[str, list[Holders]]:
    """The copies of each parameter that have others beside them: one entry for each set of replicas."""
    named: dict[str, list[Holders]] = {}
    for (name, among), holders in groups.items():
        if _several(holders) and (among != UNKNOWN) is known:
            named.setdefault(name, []).append(holders)
    return named


def _groups(states: Sequence[RankState]) -> Groups:
    """Which ranks hold which version of each parameter."""
    groups: dict[tuple[str, str], Holders] = {}
    for state in states:
        for name, among, digest in state.copies:
            groups.setdefault((name, among), {}).setdefault(digest, []).append(state.rank)
    return groups


def _not_compared(states: Sequence[RankState]) -> Iterator[str]:
    reasons = dict.fromkeys(reason for state in states for reason in state.left_out)
    for reason in reasons:
        yield f"Not compared: {_count(max(state.left_out.get(reason, 0) for state in states), reason)}."


def _columns(states: Sequence[RankState]) -> list[str]:
    return list(dict.fromkeys(column for state in states for column in state.readings))


def _table(states: Sequence[RankState]) -> list[str]:
    columns, groups = _columns(states) or ["state"], _groups(states)
    with_replicas = bool(_named(groups, known=True))
    rows: dict[object, tuple[list[int], list[str]]] = {}
    for state in states:
        cells = _cells(state, columns) + ([_replicas_of(state, groups)] if with_replicas else [])
        key = tuple(cells) if len(states) > ROWS else state.rank
        rows.setdefault(key, ([], cells))[0].append(state.rank)
    if sum(map(len, columns)) > TABLE:
        return [_told(states, column) for column in columns]
    head = ["rank", *columns, *(["replicated parameters"] if with_replicas else [])]
    return _aligned([head, *([ranges(ranks), *cells] for ranks, cells in rows.values())])


def _cells(state: RankState, columns: Sequence[str]) -> list[str]:
    cells = [state.readings.get(column, Reading(NOTHING, None)).shown for column in columns]
    return ["error", *cells[1:]] if state.error and not state.readings else cells


def _replicas_of(state: RankState, groups: Groups) -> str:
    """How many of a rank's copies have others beside them, and how many of those differ."""
    known = [groups[copy.name, copy.among] for copy in state.copies if copy.among != UNKNOWN]
    compared = [holders for holders in known if _several(holders)]
    differ = sum(len(holders) > 1 for holders in compared)
    return f"{differ} of {len(compared)} differ" if differ else f"{len(compared)} equal" if compared else NOTHING


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _parts(sets: Iterable[Holders]) -> str:
    return one_line("; ".join(" | ".join(_on(ranks) for ranks in holders.values()) for holders in sets))


def _several(holders: Holders) -> bool:
    return sum(map(len, holders.values())) > 1


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


def _count(count: int, what: str) -> str:
    """A number of things; what is in brackets stays behind the plural."""
    head, separator, tail = what.partition(" (")
    return f"{count} {head}{'s' if count != 1 else ''}{separator}{tail}"

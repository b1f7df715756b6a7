"""What an audit reads on each rank, how the ranks are compared, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scaler_triton.text import count_of, one_line, ranges, rank_names, table

NAMES = 6  # at most, in a list of names
ROWS = 16  # with more ranks, those that hold the same share a row
TABLE = 120  # characters of column names; beyond that, as with several checkpoints, each column gets a line
NOTHING = "-"
UNKNOWN = "?"  # it is not known which ranks' copies of a parameter should be equal
PERHAPS = "Nothing says that they are replicas; if they are, pass the DDP model, or replicated=True."
VERDICTS = {
    "split": "SPLIT: the ranks no longer train one model. This does not heal; go back to a state in which they agree.",
    "unknown": "UNKNOWN: not every rank could be read. Nothing differs among those that could.",
    "nothing": "NOTHING TO COMPARE: no two ranks hold a value of the same kind.",
    "agree": "AGREE: every rank holds the same",
}

Holders = dict[str, list[int]]  # ranks by the value that they hold
Copies = dict[tuple[str, str], Holders]  # by a parameter's name and the ranks that share it


class Reading(NamedTuple):
    """A value of one rank: the text to show, and the text to compare; None is not compared."""

    shown: str
    compared: str | None


class Copy(NamedTuple):
    """One rank's copy of a parameter, as a hash; `among` names the ranks whose copies should be equal."""

    name: str
    among: str
    digest: str


@dataclass(frozen=True)
class RankState:
    """The values of one rank."""

    rank: int  # its global number
    readings: Mapping[str, Reading] = field(default_factory=dict)  # by column; each is compared on its own
    copies: Sequence[Copy] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)  # how many parameters were not compared, by the reason
    error: str = ""  # why the rank could not be read, on one line
    subject: str = ""  # what was audited

    def to_json(self) -> str:
        """Return it as JSON, in which ranks exchange it: no rank unpickles what another sends."""
        return json.dumps({**vars(self), "copies": list(self.copies)})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        """Return what `to_json` wrote."""
        fields = json.loads(text)
        readings = {name: Reading(*each) for name, each in fields["readings"].items()}
        return cls(**{**fields, "readings": readings, "copies": [Copy(*each) for each in fields["copies"]]})


def number(value: float) -> str:
    """Return a number with all its digits, without a trailing ".0"."""
    return repr(float(value)).removesuffix(".0")


def scaler_readings(scale: float, tracker: int, *, used: bool = True) -> dict[str, Reading]:
    """Return a scaler's columns; scales are compared bit by bit, NaN equals NaN. `used`: it has scaled a loss."""
    shown = number(scale) + ("" if used else " (unused)")
    return {"scale": Reading(shown, float(scale).hex()), "tracker": Reading(str(tracker), str(tracker))}


def steps_reading(steps: Sequence[float]) -> Reading:
    """Return an optimizer's column: the fewest to the most steps of a parameter, of which the most are compared.

    A parameter without a gradient takes no step. That may differ between ranks; the steps of the optimizer may not.
    """
    if not steps:
        return Reading(NOTHING, None)
    least, most = number(min(steps)), number(max(steps))
    return Reading(most if least == most else f"{least}..{most}", most)


@dataclass(frozen=True, repr=False)
class AuditReport:
    """What the ranks hold and what differs; `str()` is the table.

    Args:
        ranks: the states, in order of rank.
        differences: a line for each thing that must be equal and is not; empty if no split was found.
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
        # Short, as `audit` has printed the table and a prompt would print it again.
        return f"<AuditReport: {self.verdict}, {count_of(len(self.ranks), 'rank')}>"

    def __str__(self) -> str:
        errors: Holders = {}
        for state in self.ranks:
            if state.error:
                errors.setdefault(state.error, []).append(state.rank)
        said = VERDICTS[self.verdict] + (f" {', '.join(self.compared)}." if self.verdict == "agree" else "")
        if self.verdict == "nothing" and len(self.ranks) < 2:
            said = f"NOTHING TO COMPARE: {'this is the only rank' if self.ranks else 'no rank was found'}."
        lines = [f"{self.subject or 'audit'}; {count_of(len(self.ranks), 'rank')}", ""]
        lines += [*_rows(self.ranks), ""] if self.ranks else []
        lines += [f"{rank_names(ranks)}: {error}" for error, ranks in errors.items()]
        return "\n".join([*lines, said, *(f"  {line}" for line in self.differences), *self.notes])


def judge(states: Sequence[RankState], notes: Iterable[str] = (), subject: str = "") -> AuditReport:
    """Compare what the ranks hold; without a `subject` the report names that of the states."""
    differences, equal = [], []
    for column in _columns(states):
        holders = _holders(states, column)
        if len(holders) > 1:
            differences.append(_described(states, column))
        elif _several(holders):
            (ranks,) = holders.values()
            equal.append(column if len(ranks) == len(states) else f"{column} (on {rank_names(ranks)})")
    replicas, plain = _copies(states)
    split: dict[str, list[str]] = {}
    for (name, _), holders in replicas.items():
        if len(holders) > 1:
            split.setdefault(name, []).append(" | ".join(map(rank_names, holders.values())))
    count = len({name for name, _ in replicas})
    if split:
        differences.append(f"replicated parameters: {len(split)} of {count} differ: {_first_few([*split])}")
        differences += [f"  {name}: {one_line('; '.join(split[name]))}" for name in list(split)[:NAMES]]
    elif replicas:
        equal.append(count_of(count, "replicated parameter"))
    left_out = dict.fromkeys(reason for state in states for reason in state.left_out)
    most = {reason: max(state.left_out.get(reason, 0) for state in states) for reason in left_out}
    said = [f"Not compared: {count_of(number, reason)}." for reason, number in most.items()]
    if apart := [name for (name, _), holders in plain.items() if len(holders) > 1]:
        said.append(f"Plain parameters: {len(apart)} of {len(plain)} differ: {_first_few(apart)}. {PERHAPS}")
    elif plain:
        said.append(f"Plain parameters: {len(plain)} of {len(plain)} are equal, though nothing says they must.")
    subject = subject or next((state.subject for state in states if state.subject), "")
    return AuditReport(tuple(states), tuple(differences), tuple(equal), (*said, *notes), subject)


def _columns(states: Sequence[RankState]) -> list[str]:
    return list(dict.fromkeys(column for state in states for column in state.readings))


def _holders(states: Sequence[RankState], column: str) -> Holders:
    holders: Holders = {}
    for state in states:
        reading = state.readings.get(column)
        if reading and reading.compared is not None:
            holders.setdefault(reading.compared, []).append(state.rank)
    return holders


def _several(holders: Holders) -> bool:
    return sum(map(len, holders.values())) > 1


def _copies(states: Sequence[RankState]) -> tuple[Copies, Copies]:
    """Return the parameters of which several ranks hold a copy: those known to be replicas, and the others."""
    found: Copies = {}
    for state in states:
        for name, among, digest in state.copies:
            found.setdefault((name, among), {}).setdefault(digest, []).append(state.rank)
    shared = {key: holders for key, holders in found.items() if _several(holders)}
    plain = {key: holders for key, holders in shared.items() if key[1] == UNKNOWN}
    return {key: holders for key, holders in shared.items() if key not in plain}, plain


def _described(states: Sequence[RankState], column: str) -> str:
    """Return a column as one line: each value, and the ranks that hold it."""
    readings = [state.readings[column] for state in states if column in state.readings]
    shown = {reading.compared: reading.shown for reading in reversed(readings)}
    values = [f"{shown[value]} on {rank_names(ranks)}" for value, ranks in _holders(states, column).items()]
    return f"{column}: {'; '.join(values) or NOTHING}"


def _first_few(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


def _rows(states: Sequence[RankState]) -> list[str]:
    """Return the table's lines: a row for each rank, or for the ranks that hold the same."""
    columns = _columns(states) or ["state"]
    if sum(map(len, columns)) > TABLE:
        return [_described(states, column) for column in columns]
    replicas, _ = _copies(states)
    rows: dict[object, tuple[list[int], list[str]]] = {}
    for state in states:
        cells = [state.readings.get(column, Reading(NOTHING, None)).shown for column in columns]
        if state.error and not state.readings:
            cells[0] = "error"
        if replicas:
            mine = [replicas[copy[:2]] for copy in state.copies if copy[:2] in replicas]
            differ = sum(len(holders) > 1 for holders in mine)
            equal = f"{len(mine)} equal" if mine else NOTHING
            cells.append(f"{differ} of {len(mine)} differ" if differ else equal)
        rows.setdefault(tuple(cells) if len(states) > ROWS else state.rank, ([], cells))[0].append(state.rank)
    head = ["rank", *columns, *(["replicated parameters"] if replicas else [])]
    return table([head, *([ranges(ranks), *cells] for ranks, cells in rows.values())], ">" * len(head))

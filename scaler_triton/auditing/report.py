"""An audit's report: a row for each rank, what differs between them, and what that means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scaler_triton.auditing import comparison
from scaler_triton.auditing.comparison import Groups, Holders
from scaler_triton.auditing.state import NOTHING, UNKNOWN, RankState, Reading
from scaler_triton.text import count_of, ranges, rank_names, table

ROWS = 16  # with more ranks, those that hold the same share a row
TABLE = 120  # characters of columns: with more, as of several checkpoints, each of them gets a line

VERDICTS = {
    "split": "SPLIT: the ranks no longer train one model. This does not heal; go back to a state in which they agree.",
    "unknown": "UNKNOWN: not every rank could be read. Nothing differs among those that could.",
    "nothing": "NOTHING TO COMPARE: no two ranks hold a value of the same kind.",
    "agree": "AGREE: every rank holds the same",
}


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
        return f"<AuditReport: {self.verdict}, {count_of(len(self.ranks), 'rank')}>"  # `audit` has printed the rest

    def __str__(self) -> str:
        title = f"{self.subject or 'audit'}; {count_of(len(self.ranks), 'rank')}"
        errors: Holders = {}
        for state in self.ranks:
            if state.error:
                errors.setdefault(state.error, []).append(state.rank)
        said = VERDICTS[self.verdict] + (f" {', '.join(self.compared)}." if self.verdict == "agree" else "")
        if self.verdict == "nothing" and len(self.ranks) < 2:
            said = f"NOTHING TO COMPARE: {'this is the only rank' if self.ranks else 'no rank was found'}."
        lines = [f"  {line}" for line in self.differences]
        failed = [f"{rank_names(ranks)}: {error}" for error, ranks in errors.items()]
        held = [*_held(self.ranks), ""] if self.ranks else []
        return "\n".join([title, "", *held, *failed, said, *lines, *self.notes])


def judge(states: Sequence[RankState], notes: Iterable[str] = (), subject: str = "") -> AuditReport:
    """Compare what the ranks hold.

    Args:
        states: of every rank.
        notes: what else is to be said.
        subject: what was audited; default: what the states say.
    """
    differences, equal = comparison.compare_readings(states)
    parameters = comparison.compare_copies(comparison.groups(states))
    differences += parameters.differences
    equal += parameters.equal
    said = [*comparison.not_compared(states), *parameters.notes, *notes]
    subject = subject or next((state.subject for state in states if state.subject), "")
    return AuditReport(tuple(states), tuple(differences), tuple(equal), tuple(said), subject)


def _held(states: Sequence[RankState]) -> list[str]:
    columns, groups = comparison.columns(states) or ["state"], comparison.groups(states)
    if sum(map(len, columns)) > TABLE:
        return [comparison.described(states, column) for column in columns]
    with_replicas = bool(comparison.named(groups, known=True))
    rows: dict[object, tuple[list[int], list[str]]] = {}
    for state in states:
        cells = _cells(state, columns) + ([_replicas_of(state, groups)] if with_replicas else [])
        key = tuple(cells) if len(states) > ROWS else state.rank
        rows.setdefault(key, ([], cells))[0].append(state.rank)
    head = ["rank", *columns, *(["replicated parameters"] if with_replicas else [])]
    return table([head, *([ranges(ranks), *cells] for ranks, cells in rows.values())], ">" * len(head))


def _cells(state: RankState, columns: Sequence[str]) -> list[str]:
    cells = [state.readings.get(column, Reading(NOTHING, None)).shown for column in columns]
    return ["error", *cells[1:]] if state.error and not state.readings else cells


def _replicas_of(state: RankState, groups: Groups) -> str:
    """Return how many of a rank's copies have others beside them, and how many of those differ."""
    known = [groups[copy.name, copy.among] for copy in state.copies if copy.among != UNKNOWN]
    compared = [holders for holders in known if comparison.several(holders)]
    differ = sum(len(holders) > 1 for holders in compared)
    return f"{differ} of {len(compared)} differ" if differ else f"{len(compared)} equal" if compared else NOTHING

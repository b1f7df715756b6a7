"""Compares the ranks of an audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scaler_triton.auditing.state import NOTHING, UNKNOWN, RankState
from scaler_triton.text import NAMES, count_of, first_few, one_line, rank_names

PERHAPS = "Nothing says that they are replicas; if they are, pass the DDP model, or replicated=True."

Holders = dict[str, list[int]]  # ranks by the value that they hold
Groups = Mapping[tuple[str, str], Holders]  # by a parameter's name and the ranks that share it


class Compared(NamedTuple):
    """Lines on what differs, what is equal, and what is uncertain."""

    differences: list[str]
    equal: list[str]
    notes: list[str]


def compare_readings(states: Sequence[RankState]) -> tuple[list[str], list[str]]:
    """Compare the columns that several ranks have; return lines on what differs and what is equal."""
    differences, equal = [], []
    for column in columns(states):
        holders = _holders(states, column)
        if len(holders) > 1:
            differences.append(described(states, column))
        elif several(holders):
            (ranks,) = holders.values()
            equal.append(column if len(ranks) == len(states) else f"{column} (on {rank_names(ranks)})")
    return differences, equal


def compare_copies(groups: Groups) -> Compared:
    """Compare the parameters that several ranks hold."""
    known, plain = named(groups, known=True), named(groups, known=False)
    split = {name: different for name, holders in known.items() if (different := [h for h in holders if len(h) > 1])}
    apart = [name for name, holders in plain.items() if any(len(each) > 1 for each in holders)]
    found = Compared([], [], [])
    if split:
        found.differences.append(f"replicated parameters: {len(split)} of {len(known)} differ: {first_few([*split])}")
        found.differences.extend(f"  {name}: {_parts(split[name])}" for name in list(split)[:NAMES])
    elif known:
        found.equal.append(count_of(len(known), "replicated parameter"))
    if apart:
        found.notes.append(f"Plain parameters: {len(apart)} of {len(plain)} differ: {first_few(apart)}. {PERHAPS}")
    elif plain:
        found.notes.append(f"Plain parameters: {len(plain)} of {len(plain)} are equal, though nothing says they must.")
    return found


def described(states: Sequence[RankState], column: str) -> str:
    """Return a column as one line: each value, and the ranks that hold it."""
    readings = [state.readings[column] for state in states if column in state.readings]
    shown = {reading.compared: reading.shown for reading in reversed(readings)}
    values = [f"{shown[value]} on {rank_names(ranks)}" for value, ranks in _holders(states, column).items()]
    return f"{column}: {'; '.join(values) or NOTHING}"


def not_compared(states: Sequence[RankState]) -> Iterator[str]:
    """Yield a line for each reason why parameters were left out, with the largest number on any rank."""
    reasons = dict.fromkeys(reason for state in states for reason in state.left_out)
    for reason in reasons:
        yield f"Not compared: {count_of(max(state.left_out.get(reason, 0) for state in states), reason)}."


def columns(states: Sequence[RankState]) -> list[str]:
    """Return all ranks' columns, in order of appearance."""
    return list(dict.fromkeys(column for state in states for column in state.readings))


def groups(states: Sequence[RankState]) -> Groups:
    """Return which ranks hold which version of each parameter."""
    found: dict[tuple[str, str], Holders] = {}
    for state in states:
        for name, among, digest in state.copies:
            found.setdefault((name, among), {}).setdefault(digest, []).append(state.rank)
    return found


def named(groups: Groups, *, known: bool) -> dict[str, list[Holders]]:
    """Return the parameters that several ranks hold: for each an entry per set of replicas."""
    found: dict[str, list[Holders]] = {}
    for (name, among), holders in groups.items():
        if several(holders) and (among != UNKNOWN) is known:
            found.setdefault(name, []).append(holders)
    return found


def several(holders: Holders) -> bool:
    """Tell whether more than one rank holds a value."""
    return sum(map(len, holders.values())) > 1


def _holders(states: Sequence[RankState], column: str) -> Holders:
    """Return which ranks hold which value of a column."""
    holders: Holders = {}
    for state in states:
        reading = state.readings.get(column)
        if reading and reading.compared is not None:
            holders.setdefault(reading.compared, []).append(state.rank)
    return holders


def _parts(sets: Iterable[Holders]) -> str:
    return one_line("; ".join(" | ".join(rank_names(ranks) for ranks in holders.values()) for holders in sets))

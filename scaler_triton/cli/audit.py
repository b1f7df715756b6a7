"""`python -m scaler_triton audit`: had the ranks split when each of them saved its state?"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scaler_triton.auditing.report import AuditReport, RankState, judge
from scaler_triton.cli.console import complain, fitted
from scaler_triton.text import one_line, ranges

HELP = "tell from the states that each rank saved whether their scales, trackers and step counters have split"
PATTERN = "**/*"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pt.tar", ".pth.tar")  # of torch.save; never a bare pickle
RANK = re.compile(r"(?<![A-Za-z])rank[-_.]?(?P<rank>\d{1,6})", re.IGNORECASE)
NUMBERED = re.compile(r"(?:^|/)(?:grad_?scaler|scaler|optimizer|optim)[-_.]?(?P<rank>\d{1,6})(?:\.\w+){1,2}$")
STATUS = {"agree": 0, "split": 1, "unknown": 2, "nothing": 2}
ONE_FOR_ALL = (
    "A state that one rank saves for all (such as scaler.pt) says nothing of the others: "
    "call scaler_triton.audit(optimizer, scaler, model) in the running job, on every rank."
)
NO_NUMBERS = (
    "A rank is recognised by the word rank in a file's name; if its number stands elsewhere, mark it with {rank}, "
    "as in --pattern 'model-{rank}-of-4.pt'."
)
ONE_VALUE = (
    "The .distcp files are of torch.distributed.checkpoint, which keeps one value of each number that all ranks hold, "
    "perhaps the scale of one rank and the tracker of another: a split does not show there."
)

Files = dict[str, dict[int, Path]]  # by name with * for the rank, then by rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder and which files in it count."""
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT_DIR", help="where the ranks' states were saved")
    parser.add_argument(
        "--pattern",
        default=PATTERN,
        metavar="GLOB",
        help=f"only these files (default: {PATTERN}). Where a rank's number stands, write {{rank}}; without it, the "
        "number is the one after the word rank, or the one that counts files named scaler or optimizer from 0 on",
    )
    parser.add_argument(
        "--replicated",
        action="store_true",
        help="the ranks saved copies, as under DDP: compare all floating-point tensors outside of optimizers, too, but "
        "for BatchNorm's running statistics",
    )
    parser.epilog = "exit status: 0 the ranks agree, 1 they have split, 2 nothing to compare or a file not readable"


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return the exit status."""
    folder, pattern = arguments.folder, arguments.pattern
    try:
        os.scandir(folder).close()
    except OSError as error:
        return complain(one_line(f"CHECKPOINT_DIR must be a folder, got {folder}: {error.strerror}"))
    try:
        files = find_files(folder, pattern)
    except (ValueError, NotImplementedError, IndexError) as error:
        return complain(one_line(f"--pattern must be a relative pattern of files, got {pattern!r}: {error}"))
    report = audit_files(folder, files, pattern, replicated=arguments.replicated)
    print(fitted(str(report), sys.stdout))
    return STATUS[report.verdict]


def find_files(folder: Path, pattern: str) -> Files:
    """Return the files whose names contain a rank."""
    # A star in place of {rank}, unless there is one beside it already: two would mean folders.
    paths = sorted(folder.glob(re.sub(r"(?<!\*)\*?\{rank\}(?:\*(?!\*))?", "*", pattern)))
    found = [path for path in paths if path.is_file() and path.name.lower().endswith(SUFFIXES)]
    names = {path.relative_to(folder).as_posix(): path for path in found}
    if "{rank}" in pattern:
        return _by_rank(names, _rank_in(pattern))
    files = _by_rank(names, RANK.search)
    numbered = _by_rank({name: path for name, path in names.items() if not RANK.search(name)}, NUMBERED.search)
    for name, by_rank in numbered.items():
        # Numbers are ranks only if they run from 0 and no file is without one, otherwise they count something else.
        if set(by_rank) == set(range(len(by_rank))) and re.sub(r"[-_.]?\*", "", name) not in names:
            files[name] = by_rank
    return files


def _by_rank(names: dict[str, Path], search: Callable[[str], re.Match[str] | None]) -> Files:
    """Group the files in which `search` finds a rank."""
    files: Files = {}
    for name, path in names.items():
        if found := search(name):
            start, end = found.span("rank")
            files.setdefault(f"{name[:start]}*{name[end:]}", {})[int(found["rank"])] = path
    return files


def _rank_in(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Return a search for the rank in a path, where {rank} is in the pattern."""
    parts = Path(pattern).parts
    index = next(-k for k in range(1, len(parts) + 1) if "{rank}" in parts[-k])
    whole = r"(?<!\d)" if "*{rank}" in parts[index] else ""  # or the star would take some of its digits
    part = parts[index].replace("{rank}", "RANKNUMBER", 1).replace("{rank}", "*")
    form = re.compile(fnmatch.translate(part).replace("RANKNUMBER", whole + r"(?P<rank>\d{1,6})"))

    def search(name: str) -> re.Match[str] | None:
        end = len(name) if index == -1 else len("/".join(name.split("/")[: index + 1]))
        return form.match(name, name.rfind("/", 0, end) + 1, end)

    return search


def audit_files(folder: Path, files: Files, pattern: str, *, replicated: bool) -> AuditReport:
    """Read and compare what the ranks saved; with `replicated` also their tensors."""
    from scaler_triton.auditing.saved import read_state

    states: dict[int, RankState] = {}
    speaking = []
    for label, by_rank in files.items():
        found = [
            read_state(rank, one_line(label), path, str(path.relative_to(folder)), replicated=replicated)
            for rank, path in by_rank.items()
        ]
        if any(state.readings or state.copies or state.left_out or state.error for state in found):
            speaking.append(label)
            states.update({state.rank: _joined(states.get(state.rank), state) for state in found})
    missing = set(range(max(states, default=0))) - set(states)
    notes = [f"There is no state of rank {ranges(missing)}."] if missing else []
    if len(states) < 2:
        notes = [ONE_FOR_ALL] if files else [_why_no_files(folder, pattern), ONE_FOR_ALL]
    subject = f"{one_line(', '.join(speaking) or 'no states of ranks')} in {one_line(folder)}"
    return judge(_simply_named([states[rank] for rank in sorted(states)]), notes, subject)


def _joined(state: RankState | None, more: RankState) -> RankState:
    """Return what two files of a rank say."""
    if state is None:
        return more
    error = one_line("; ".join(error for error in (state.error, more.error) if error))
    left_out = Counter(state.left_out) + Counter(more.left_out)
    return RankState(state.rank, {**state.readings, **more.readings}, [*state.copies, *more.copies], left_out, error)


def _simply_named(states: Sequence[RankState]) -> list[RankState]:
    """Call a column just "scale" if only one file has a scale, and only one."""
    columns = dict.fromkeys(column for state in states for column in state.readings)
    kinds = [column.split()[-1] for column in columns]
    short = {name: kind if kinds.count(kind) == 1 else name for name, kind in zip(columns, kinds, strict=True)}
    return [replace(s, readings={short[c]: r for c, r in s.readings.items()}) for s in states]


def _why_no_files(folder: Path, pattern: str) -> str:
    if any(folder.rglob("*.distcp")):
        return ONE_VALUE
    kinds = ", ".join(SUFFIXES)
    if pattern == PATTERN and any(path.name.endswith(SUFFIXES) for path in folder.rglob("*")):
        return NO_NUMBERS
    where = "is in it" if pattern == PATTERN else f"matches {one_line(pattern)}"
    return f"No file of torch.save ({kinds}) {where}."

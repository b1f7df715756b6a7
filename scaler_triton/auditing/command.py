"""`python -m scaler_triton audit`: had the ranks split when each of them saved its state?"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scaler_triton.auditing.report import AuditReport, judge
from scaler_triton.auditing.state import Copy, RankState
from scaler_triton.console import complain, fitted
from scaler_triton.text import one_line, ranges

HELP = "tell from the states that each rank saved whether their scales, trackers and step counters have split"
PATTERN = "**/*"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pt.tar", ".pth.tar")  # of torch.save; never a bare pickle
RANK = re.compile(r"(?<![A-Za-z])rank[-_.]?(?P<rank>\d{1,6})", re.IGNORECASE)
NUMBERED = re.compile(r"(?:^|/)(?:grad_?scaler|scaler|optimizer|optim)[-_.]?(?P<rank>\d{1,6})(?:\.\w+){1,2}$")
EVERYBODY = "all"  # the ranks whose copies should be equal
STATUS = {"agree": 0, "split": 1, "unknown": 2, "nothing": 2}
ONE_FOR_ALL = (
    "A state that one rank saves for all (such as scaler.pt) says nothing of the others: "
    "call scaler_triton.audit(optimizer, scaler, model) in the running job, on every rank."
)
NO_NUMBERS = (
    "Ranks are told by the word rank in the files' names; where else their numbers stand, say with {rank}, "
    "as in --pattern 'model-{rank}-of-4.pt'."
)
ONE_COPY = (
    "The .distcp files are of torch.distributed.checkpoint, which keeps one copy of what all ranks hold alike: "
    "a split does not show there."
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
    try:
        os.scandir(arguments.folder).close()
    except OSError as error:
        return complain(one_line(f"CHECKPOINT_DIR must be a folder, got {arguments.folder}: {error.strerror}"))
    try:
        files = find_files(arguments.folder, arguments.pattern)
    except (ValueError, NotImplementedError, IndexError) as error:
        return complain(one_line(f"--pattern must be a relative pattern of files, got {arguments.pattern!r}: {error}"))
    report = audit_files(arguments.folder, files, arguments.pattern, replicated=arguments.replicated)
    print(fitted(str(report), sys.stdout))
    return STATUS[report.verdict]


def find_files(folder: Path, pattern: str) -> Files:
    """Return the files whose names tell a rank."""
    paths = [path for path in sorted(folder.glob(_glob(pattern))) if path.is_file()]
    names = {path: path.relative_to(folder).as_posix() for path in paths if path.name.lower().endswith(SUFFIXES)}
    if "{rank}" in pattern:
        return _placed(names, pattern)
    by_word = {path: RANK.search(name) for path, name in names.items()}
    files = _collected((path, names[path], found) for path, found in by_word.items() if found)
    return files | _numbered({path: name for path, name in names.items() if not by_word[path]})


def audit_files(folder: Path, files: Files, pattern: str, *, replicated: bool) -> AuditReport:
    """Read and compare what the ranks saved; with `replicated` also their tensors."""
    states: dict[int, RankState] = {}
    speaking = []
    for name, by_rank in files.items():
        found = {rank: _state(rank, name, path, folder, replicated) for rank, path in by_rank.items()}
        if any(state.readings or state.copies or state.left_out or state.error for state in found.values()):
            speaking.append(name)
            states.update({rank: _joined(states.get(rank), state) for rank, state in found.items()})
    subject = f"{one_line(', '.join(speaking) or 'no states of ranks')} in {one_line(folder)}"
    notes = _notes(states) if files else [_why_no_files(folder, pattern), ONE_FOR_ALL]
    return judge(_simply_named([states[rank] for rank in sorted(states)]), notes, subject)


def _why_no_files(folder: Path, pattern: str) -> str:
    if any(folder.rglob("*.distcp")):
        return ONE_COPY
    kinds = ", ".join(SUFFIXES)
    return f"No file of torch.save ({kinds}) matches {one_line(pattern)}." if "{rank}" in pattern else NO_NUMBERS


def _glob(pattern: str) -> str:
    """Put a star where {rank} is; one that stands beside it already does for both: `**` means folders."""
    return re.sub(r"(?<!\*)\*?\{rank\}(?:\*(?!\*))?", "*", pattern)


def _placed(names: Mapping[Path, str], pattern: str) -> Files:
    """Take the rank from where {rank} is in the pattern."""
    parts = Path(pattern).parts
    index = next(-k for k in range(1, len(parts) + 1) if "{rank}" in parts[-k])
    expression = fnmatch.translate(parts[index].replace("{rank}", "RANKNUMBER", 1).replace("{rank}", "*"))
    whole = r"(?<!\d)" if "*{rank}" in parts[index] else ""  # the star leaves no digit of it out
    form = re.compile(expression.replace("RANKNUMBER", whole + r"(?P<rank>\d{1,6})"))
    files: Files = {}
    for path, name in names.items():
        here = name.split("/")
        if found := form.match(here[index]):
            here[index] = _starred(here[index], found)
            files.setdefault("/".join(here), {})[int(found["rank"])] = path
    return files


def _numbered(names: Mapping[Path, str]) -> Files:
    """Take bare numbers for ranks if they run from 0 and no file is without: else they count something else."""
    found = ((path, name, NUMBERED.search(name)) for path, name in names.items())
    files = _collected((path, name, match) for path, name, match in found if match)
    return {
        name: by_rank
        for name, by_rank in files.items()
        if set(by_rank) == set(range(len(by_rank))) and re.sub(r"[-_.]?\*", "", name) not in names.values()
    }


def _collected(found: Iterable[tuple[Path, str, re.Match[str]]]) -> Files:
    files: Files = {}
    for path, name, match in found:
        files.setdefault(_starred(name, match), {})[int(match["rank"])] = path
    return files


def _starred(text: str, match: re.Match[str]) -> str:
    return f"{text[: match.start('rank')]}*{text[match.end('rank') :]}"


def _state(rank: int, name: str, path: Path, folder: Path, replicated: bool) -> RankState:
    from scaler_triton.auditing.saved_states import Unreadable, read_file

    try:
        readings, hashes, left_out = read_file(path, replicated=replicated)
    except Unreadable as error:
        return RankState(rank, error=one_line(f"{path.relative_to(folder)}: {error}"))
    name = one_line(name)
    copies = [Copy(f"{name} {place}", EVERYBODY, digest) for place, digest in hashes.items()]
    return RankState(rank, {f"{name} {what}": reading for what, reading in readings.items()}, copies, left_out)


def _joined(state: RankState | None, more: RankState) -> RankState:
    if state is None:
        return more
    error = one_line("; ".join(error for error in (state.error, more.error) if error))
    left_out = Counter(state.left_out) + Counter(more.left_out)
    return RankState(state.rank, {**state.readings, **more.readings}, [*state.copies, *more.copies], left_out, error)


def _simply_named(states: Sequence[RankState]) -> list[RankState]:
    """Call a column "scale" where only one file has a scale, once."""
    columns = dict.fromkeys(column for state in states for column in state.readings)
    kinds = [column.split()[-1] for column in columns]
    short = {name: kind if kinds.count(kind) == 1 else name for name, kind in zip(columns, kinds, strict=True)}
    return [replace(s, readings={short[c]: r for c, r in s.readings.items()}) for s in states]


def _notes(states: Mapping[int, RankState]) -> list[str]:
    if len(states) < 2:
        return [ONE_FOR_ALL]
    missing = set(range(max(states))) - set(states)
    return [f"There is no state of rank {ranges(missing)}."] if missing else []

"""What the commands share: missing packages, error messages, progress bars."""

import importlib.util
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from scaler_triton.text import table

FEWEST_COLUMNS = 20  # of a column that is wrapped
REFRESH = 0.1  # seconds, on a terminal
REFRESH_IN_LOG = 5.0
# tqdm's default without the rate, which would leave no room for the bar in 80 columns.
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return those of the top-level modules that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def complain(message: str, status: int = 2) -> int:
    """Print an error message and return the exit status: 2 for wrong usage, 1 for a failure."""
    print(fitted(f"scaler_triton: {message}", sys.stderr), file=sys.stderr)
    return status


def requested_backend() -> str | None:
    """Return the backend that the environment asks for; None after a complaint about an unknown one."""
    from scaler_triton.core.dispatch import check_backend

    try:
        return check_backend(None)
    except ValueError as error:
        complain(str(error))
        return None


def fitted(text: str, stream: TextIO) -> str:
    """Return the text wrapped between words if the stream is a terminal, else unchanged."""
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) if len(line) > columns else line for line in text.split("\n"))


def coloured(text: str, good: bool, stream: TextIO) -> str:
    """Return the `fitted` text; on a terminal with colours its first word is green if it is `good`, else red."""
    text = fitted(text, stream)
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return re.sub(r"\w+", rf"\033[{32 if good else 31}m\g<0>\033[0m", text, count=1)


def fitted_table(rows: Sequence[Sequence[str]], sides: str, stream: TextIO) -> str:
    """Return a table (see `text.table`); where the stream is a terminal, its widest column is wrapped to fit."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widest = widths.index(max(widths))
    room = shutil.get_terminal_size().columns - sum(widths) - 2 * len(widths[1:]) + widths[widest]
    if stream.isatty() and room < widths[widest]:
        whole, rows = rows, []
        for row in whole:
            parts = textwrap.wrap(row[widest], max(room, FEWEST_COLUMNS)) or [""]
            others = [*row[:widest]], [*row[widest + 1 :]]
            rows += [[*others[0], parts[0], *others[1]]]
            rows += [[*("" for _ in others[0]), part, *("" for _ in others[1])] for part in parts[1:]]
    return "\n".join(line.rstrip() for line in table(rows, sides))


def driver_version() -> str:
    """Return the version of the GPU's kernel driver, or "unknown"."""
    for module in ("nvidia", "amdgpu"):
        try:
            return Path(f"/sys/module/{module}/version").read_text().strip()
        except OSError:
            continue
    return "unknown"


class NoBar:
    """A progress bar that shows nothing."""

    def __enter__(self) -> "NoBar":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def close(self) -> None:
        """Do nothing."""

    def update(self) -> None:
        """Do nothing."""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        """Do nothing."""


def new_bar(title: str, total: int) -> Any:
    """Return tqdm's progress bar, or one that shows nothing if tqdm is not installed.

    Args:
        title: text before the bar.
        total: steps.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar()
    interval = REFRESH if sys.stderr.isatty() else REFRESH_IN_LOG
    return tqdm(total=total, desc=title, mininterval=interval, dynamic_ncols=True, bar_format=BAR)

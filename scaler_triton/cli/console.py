"""What the commands share: missing packages, error messages, progress bars."""

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

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
    from scaler_triton.dispatch import check_backend

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

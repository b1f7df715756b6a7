"""A live bar for what a rank does: the rank has no terminal, so it writes lines and this process shows them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

REFRESH = 0.1  # seconds, on a terminal
REFRESH_IN_LOG = 5.0


class NoBar:
    """Stands where a bar would be: work goes on without one."""

    def __enter__(self) -> "NoBar":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def update(self) -> None:
        """Show nothing."""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        """Show nothing."""


def new_bar(title: str, total: int) -> Any:
    """Return a bar that counts steps, where tqdm is installed.

    Args:
        title: what stands before the bar.
        total: steps.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return NoBar()
    interval = REFRESH if sys.stderr.isatty() else REFRESH_IN_LOG
    return tqdm(total=total, desc=title, unit="step", mininterval=interval, dynamic_ncols=True)


@contextmanager
def bar_fed_by_file(title: str, total: int) -> Iterator[str]:
    """Show a bar while the block runs, and yield the path of its file: one line a step, shown beside the bar.

    Args:
        title: what stands before the bar.
        total: steps.
    """
    with TemporaryDirectory(prefix="progress-") as folder, new_bar(title, total) as bar:
        feed = Path(folder) / "steps"
        feed.touch()
        done = Event()
        follower = Thread(target=_follow, args=(feed, bar, done))
        follower.start()
        try:
            yield str(feed)
        finally:
            done.set()
            follower.join()


def _follow(feed: Path, bar: Any, done: Event) -> None:
    with feed.open() as lines:
        finished = False
        while not finished:
            finished = done.wait(REFRESH)
            for line in lines:
                bar.set_postfix_str(line.strip(), refresh=False)
                bar.update()

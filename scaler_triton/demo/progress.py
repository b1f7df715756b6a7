"""A live bar for what a rank does: the rank has no terminal, so it writes lines and this process shows them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from scaler_triton.cli.console import REFRESH, new_bar


@contextmanager
def bar_fed_by_file(title: str, total: int) -> Iterator[str]:
    """Show a bar while the block runs, and yield the path of its file: one line a step, shown beside the bar."""
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

"""Ranks that meet over a store: all of them or none, in any order, after any call that failed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from scaler_triton.core import meeting

STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 3),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    return dist.PrefixStore("audit/", STORES[request.param](tmp_path))


def met(store: dist.Store, size: int) -> str:
    try:
        meeting.meet(store, size, "audit")
    except TimeoutError as error:
        return str(error)
    return "met"


def alone(store: dist.Store, size: int) -> str:
    """What a rank is told that waits in vain."""
    with mock.patch.object(meeting, "PATIENCE", 0.01):
        return met(store, size)


def all_met(store: dist.Store, size: int) -> bool:
    """Whether ranks that come at different times meet."""
    with ThreadPoolExecutor(size) as pool:
        waiting = [pool.submit(met, store, size)]
        time.sleep(0.02)
        waiting += [pool.submit(met, store, size) for _ in range(size - 1)]
        return [each.result() for each in waiting] == ["met"] * size


def told(size: int, came: int, seconds: float = 0.01) -> str:
    text = f"audit must be called on all {size} ranks of its process group within {seconds:g} s, got {came} of them; "
    return text + "nothing was gathered, and training can go on"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_meet_whoever_came_alone_before(store: dist.Store, size: int) -> None:
    """A rank that was never here meets one that came alone twice."""
    for times in (0, 2, 1, 0):
        if size > 1:
            assert [alone(store, size) for _ in range(times)] == [told(size, 1)] * times
        assert all_met(store, size)


def test_who_waits_is_told_at_once_when_another_leaves() -> None:
    """The second one would wait for longer than a minute, half of its store's timeout."""
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    clients = [dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=each)) for each in (3, 150)]
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(met, clients, [3, 3]))
    assert texts == [told(3, 2, 1.5), told(3, 2, 75)]
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConnectionError])
def test_who_was_interrupted_has_not_come(store: dist.Store, error: type[BaseException]) -> None:
    with mock.patch.object(time, "sleep", side_effect=error), pytest.raises(error):
        meeting.meet(store, 2, "audit")
    assert alone(store, 2) == told(2, 1)
    assert all_met(store, 2)


def test_the_first_word_on_a_round_is_final(store: dist.Store) -> None:
    """One leaves just after the other looked, and comes too late to change that."""
    store.add("came to 1", 1)
    store.set("1", "1")
    with mock.patch.object(dist.PrefixStore, "check", return_value=False):
        assert met(store, 2) == told(2, 1, 150)
    assert all_met(store, 2)


def test_a_store_does_not_grow() -> None:
    store = dist.HashStore()
    for _ in range(3):
        alone(store, 2)
        assert all_met(store, 2)
        assert store.num_keys() == 3  # the last round's two, and its number


def test_a_store_may_be_unable_to_delete(store: dist.Store) -> None:
    with mock.patch.object(dist.PrefixStore, "delete_key", side_effect=NotImplementedError):
        assert all_met(store, 2)
        assert all_met(store, 2)


def test_it_waits_for_five_minutes_or_half_of_the_stores_timeout(monkeypatch: Any) -> None:
    store, waited = dist.HashStore(), 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        assert seconds <= 0.1
        waited += seconds

    monkeypatch.setattr(meeting.time, "sleep", sleep)
    monkeypatch.setattr(meeting.time, "monotonic", lambda: waited)
    for timeout, seconds in ((1800, 300), (300, 150)):
        waited = 0.0
        store.set_timeout(timedelta(seconds=timeout))
        assert met(store, 2) == told(2, 1, seconds)
        assert seconds <= waited <= seconds + 0.1

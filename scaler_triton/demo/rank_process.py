"""What runs in one rank of a pool: it joins the group and answers calls until its parent is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT = 120.0  # Importing torch on a busy machine takes its time.
SEED = 1234


@dataclass(frozen=True)
class RankResult:
    """What one rank made of a call: a value, or an error as "Type: text"."""

    rank: int
    value: Any = None
    error: str | None = None
    traceback: str | None = None

    @property
    def ok(self) -> bool:
        """True when the rank returned."""
        return self.error is None


@dataclass(frozen=True)
class Group:
    """What a rank needs to join the group."""

    rank: int
    world_size: int
    backend: str
    timeout: float
    store: str

    def join(self) -> None:
        """Make this process a member of the default group."""
        dist.init_process_group(
            self.backend,
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=START_TIMEOUT),  # The others may still be importing torch.
        )
        limit_collectives(self.timeout)


def limit_collectives(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Lower a group's limit, the default one's for None; a torch that offers no way to keeps the longer one."""
    lower = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if lower is not None:
        lower(timedelta(seconds=seconds), group)


def serve(group: Group, log: str, connection: Connection) -> None:
    """Join the group, then answer calls until the parent is gone: the main function of a rank."""
    _end_with_parent()
    _redirect_output(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    connection.send_bytes(_answer(group.rank, lambda _: group.join(), ()))
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_answer(group.rank, *_load(connection.recv_bytes())))
    os._exit(0)  # The group's threads would wait for ranks that are gone.


def _load(message: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and arguments of a call; what cannot be loaded becomes a function that says so."""
    try:
        fn, args = pickle.loads(message)
    except Exception as error:
        return _raise, (error,)
    return fn, args


def _raise(_rank: int, error: Exception) -> None:
    raise error


def _answer(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Call `fn` from a fresh seed and pickle what it returned or raised."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        return pickle.dumps(RankResult(rank, value=fn(rank, *args)))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return pickle.dumps(RankResult(rank, error=text, traceback=traceback.format_exc()))
    finally:
        gc.collect()  # A model that a case left in a cycle would keep its memory, and its hooks.
        gc.freeze()  # What survives is modules and caches: looking through them every time costs 0.1 s.


def barrier(_rank: int) -> None:
    """Wait for all ranks of the default group."""
    dist.barrier()


def _end_with_parent() -> None:
    """Leave when the parent is gone, even from within a collective that never ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def leave() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()


def _redirect_output(log: str) -> None:
    """Send this process's output to a file, and the stacks of its threads too when the parent asks."""
    stream = open(log, "w", buffering=1)  # noqa: SIM115 (it lives as long as the process)
    for fd in (1, 2):
        os.dup2(stream.fileno(), fd)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)

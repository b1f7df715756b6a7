"""A pool of ranks: processes that share a process group, started once and reused from call to call.

RANKS_OVER=nccl has them meet over NCCL where tensors are on a GPU, even if all of them share one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Seconds.
START_TIMEOUT = 120.0  # importing torch on a busy machine takes its time
BARRIER_TIMEOUT = 30.0  # among idle ranks it takes under a millisecond, but NCCL may set itself up in it
CLOSE_TIMEOUT = 5.0  # an idle rank leaves within milliseconds
STACK_WAIT = 0.5  # for a hung rank to write down where it hangs
LOG_TAIL = 4000  # characters
SEED = 1234
BACKEND = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}[os.environ.get("RANKS_OVER", "gloo")]


@dataclass(frozen=True)
class RankResult:
    """What one rank made of a call: a value, or an error as "Type: text"."""

    rank: int
    value: Any = None
    error: str | None = None
    traceback: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the rank returned."""
        return self.error is None


def limit_collectives(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Set how long a collective of a group may take, of the default one for None; some torch cannot do that."""
    set_timeout = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timedelta(seconds=seconds), group)


@dataclass(frozen=True)
class _Rank:
    """The parent's view of one rank."""

    index: int
    process: BaseProcess
    connection: Connection
    log: Path

    def log_tail(self) -> str:
        """Return the end of what the rank printed."""
        return self.log.read_text(errors="replace")[-LOG_TAIL:] if self.log.exists() else ""


class RankPool:
    """`world_size` spawned processes with a process group.

    The ranks start on the first `run`, talk over loopback only, end with their parent, and are replaced when a case
    leaves them in a state that the next case could feel.
    """

    def __init__(self, world_size: int, *, backend: str = BACKEND, group_timeout: float = 20.0) -> None:
        self.world_size, self.backend, self.group_timeout = world_size, backend, group_timeout
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[RankResult]:
        """Call `function(rank, *args)` on every rank and return what each made of it, in order of rank.

        The ranks import the function's module by its name, with this process's sys.path. If a rank has not answered
        after `timeout` seconds all are killed. After an error the ranks are replaced.
        """
        message = pickle.dumps((function, args))
        if len(self._ranks) < self.world_size or not all(rank.process.is_alive() for rank in self._ranks):
            self.close()
            self._start()
        results = self._ask(message, timeout)
        if all(result.ok for result in results):
            results = self._check_in_step(results)
        if not all(result.ok for result in results):
            self.close()
        return results

    def close(self) -> None:
        """End the ranks, a busy one by force; a later `run` starts new ones."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for rank in self._ranks:
            rank.connection.close()  # an idle rank leaves at this end of file
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            rank.process.kill()
            rank.process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        """Spawn the ranks and wait until all of them are in the group."""
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        for index in range(self.world_size):  # one by one: an interrupt between them must find those that run
            self._ranks.append(self._spawn(index, Path(self._folder.name)))
        failed = [result for result in self._collect(START_TIMEOUT) if not result.ok]
        if failed:
            self.close()
            raise RuntimeError(f"rank {failed[0].rank} did not start: {failed[0].error}\n{failed[0].traceback}")

    def _spawn(self, index: int, folder: Path) -> _Rank:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log, method = folder / f"rank{index}.log", f"file://{folder / 'store'}"
        group = {"backend": self.backend, "init_method": method, "rank": index, "world_size": self.world_size}
        args = (index, group, self.group_timeout, str(log), theirs)
        process = context.Process(target=_serve, args=args, daemon=True)
        process.start()
        theirs.close()  # so that the death of the rank is an end of file here
        return _Rank(index, process, ours, log)

    def _ask(self, message: bytes, timeout: float) -> list[RankResult]:
        """Send one message to every rank and collect the answers."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a rank that just died: `_collect` meets its end of file
                rank.connection.send_bytes(message)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[RankResult]:
        """Return one answer from every rank."""
        deadline = time.monotonic() + timeout
        waiting = {rank.connection: rank for rank in self._ranks}
        results: dict[int, RankResult] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = _kill([*waiting.values()])
                return sorted([*results.values(), *hung], key=lambda result: result.rank)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                results[rank.index] = _receive(rank)
                if not results[rank.index].ok:  # its peers may wait for it: they get the group's own limit
                    deadline = min(deadline, time.monotonic() + self.group_timeout)
        return [results[rank.index] for rank in self._ranks]

    def _check_in_step(self, results: list[RankResult]) -> list[RankResult]:
        """Meet in a barrier: a collective that one rank left open would hit the next case."""
        checks = self._ask(pickle.dumps((_barrier, ())), BARRIER_TIMEOUT)
        if all(check.ok for check in checks):
            return results
        text = "OutOfStep: the case returned, but the ranks no longer meet in a barrier"
        return [replace(check, error=f"{text} ({check.error})") for check in checks]


def _kill(hung: list[_Rank]) -> list[RankResult]:
    """End ranks that do not answer; their results say where they were."""
    for rank in hung:
        os.kill(rank.process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
    time.sleep(STACK_WAIT)
    for rank in hung:
        rank.process.kill()
    error = "RankTimeout: no answer in time"
    return [RankResult(rank.index, error=error, traceback=rank.log_tail()) for rank in hung]


def _receive(rank: _Rank) -> RankResult:
    """Return the rank's answer, or how it died."""
    try:
        result = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, OSError):
        rank.process.join(1.0)
        return RankResult(rank.index, error=f"RankDied: exit code {rank.process.exitcode}", traceback=rank.log_tail())
    assert isinstance(result, RankResult)
    return result


# What runs in a rank.


def _serve(rank: int, group: dict[str, Any], timeout: float, log: str, connection: Connection) -> None:
    """Join the group, then answer calls until the parent is gone: the main function of a rank."""
    _end_with_parent()
    _redirect_output(log)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # Accelerate warns where it has to choose
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    if "nccl" in group["backend"]:
        # NCCL takes one rank a GPU and host, so each says that it is a host of its own; they share no memory then.
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_CUMEM_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
        torch.cuda.set_device(rank % torch.cuda.device_count())

    def join(rank: int) -> None:
        # The others may still be importing torch.
        dist.init_process_group(**group, timeout=timedelta(seconds=START_TIMEOUT))
        limit_collectives(timeout)

    connection.send_bytes(_answer(rank, lambda: (join, ())))
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = connection.recv_bytes()
            connection.send_bytes(_answer(rank, lambda: pickle.loads(message)))  # noqa: B023
    os._exit(0)  # the group's threads would wait for ranks that are gone


def _answer(rank: int, load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> bytes:
    """Load a function and its arguments, call it from a fresh seed, and pickle what it returned or raised."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        function, args = load()
        return pickle.dumps(RankResult(rank, value=function(rank, *args)))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return pickle.dumps(RankResult(rank, error=text, traceback=traceback.format_exc()))
    finally:
        gc.collect()  # a model that a case left in a cycle would keep its memory, and its hooks
        gc.freeze()  # what survives is modules and caches: looking through them every time costs 0.1 s


def _barrier(rank: int) -> None:
    dist.barrier()


def _end_with_parent() -> None:
    """Leave when the parent is gone, even from within a collective that never ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def _redirect_output(log: str) -> None:
    """Send this process's output to a file, and the stacks of its threads too when the parent asks."""
    stream = open(log, "w", buffering=1)  # noqa: SIM115 (it lives as long as the process)
    for fd in (1, 2):
        os.dup2(stream.fileno(), fd)
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)

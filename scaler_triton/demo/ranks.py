"""A pool of ranks: processes that share a process group, started once and reused from call to call."""

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
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT = 120.0  # Importing torch on a busy machine takes its time.
CHECK_TIMEOUT = 10.0  # A barrier among idle ranks takes well under a millisecond.
CLOSE_TIMEOUT = 5.0  # An idle rank leaves within milliseconds.
STACK_DUMP_WAIT = 0.5  # What a hung rank gets to write down where it hangs.
LOG_TAIL = 4000  # Characters.
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


class RankTimeout(RuntimeError):
    """Some rank did not answer in time; `results` says for every rank what is known of it."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


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
    """`world_size` spawned processes with a process group, reused from call to call.

    The ranks start on the first `run`. They talk over loopback only, end with their parent, and are replaced
    when a case leaves them in a state that the next case could feel.
    """

    def __init__(self, world_size: int, *, backend: str = "gloo", group_timeout: float = 20.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.backend = backend
        self.group_timeout = group_timeout
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is KeyboardInterrupt:
            for rank in self._ranks:
                rank.process.kill()  # one that is still importing would not notice the end for seconds
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[RankResult]:
        """Call `fn(rank, *args)` on every rank and return what each made of it, in order of rank.

        `fn` is a top-level function of an importable module, not of `__main__`. When a rank has not answered
        after `timeout` seconds all are killed and `RankTimeout` is raised. After an error the ranks are replaced.
        """
        message = pickle.dumps((fn, args))
        if not self._all_alive():
            self.close()
            self._start()
        results = self._ask(message, timeout)
        if all(result.ok for result in results):
            return self._check_in_step(results)
        self.close()
        return results

    def close(self) -> None:
        """End the ranks, a busy one by force; a later `run` starts new ones."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for rank in self._ranks:
            rank.connection.close()  # The end of file at which an idle rank leaves.
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            rank.process.kill()
            rank.process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _all_alive(self) -> bool:
        return bool(self._ranks) and all(rank.process.is_alive() for rank in self._ranks)

    def _start(self) -> None:
        """Spawn the ranks and wait until all of them are in the group."""
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        with _environment(_rank_environment()), _without_main(), _interrupts_ignored():
            self._ranks = [self._spawn(index, folder) for index in range(self.world_size)]
        failed = [result for result in self._collect(START_TIMEOUT) if not result.ok]
        if failed:
            self.close()
            raise RuntimeError(f"rank {failed[0].rank} did not start: {failed[0].error}\n{failed[0].traceback}")

    def _spawn(self, index: int, folder: Path) -> _Rank:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log = folder / f"rank{index}.log"
        group = _Group(index, self.world_size, self.backend, self.group_timeout, str(folder / "store"))
        process = context.Process(target=_serve, args=(group, str(log), theirs), daemon=True)
        process.start()
        theirs.close()  # So that the death of the rank is an end of file here.
        return _Rank(index, process, ours, log)

    def _ask(self, message: bytes, timeout: float) -> list[RankResult]:
        """Send one message to every rank and collect the answers."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # A rank that just died: seen as its end of file below.
                rank.connection.send_bytes(message)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[RankResult]:
        """Return one answer from every rank, or end all of them."""
        start = time.monotonic()
        deadline = start + timeout
        waiting = {rank.connection: rank for rank in self._ranks}
        results: dict[int, RankResult] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._give_up(list(waiting.values()), results, time.monotonic() - start)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                results[rank.index] = _receive(rank)
                if not results[rank.index].ok:  # Its peers may wait for it: they get the group's own limit.
                    deadline = min(deadline, time.monotonic() + self.group_timeout)
        return [results[rank.index] for rank in self._ranks]

    def _give_up(self, hung: list[_Rank], results: dict[int, RankResult], waited: float) -> RankTimeout:
        """End the ranks; the exception says where the hung ones were."""
        stacks = _dump_stacks(hung)
        for rank in hung:
            rank.process.kill()
            error = f"RankTimeout: no answer within {waited:.1f} s"
            results[rank.index] = RankResult(rank.index, error=error, traceback=stacks[rank.index])
        self.close()
        ordered = [results[index] for index in sorted(results)]
        lines = [f"rank {result.rank}: {result.error or 'returned'}" for result in ordered]
        lines += [f"\n--- rank {rank.index} ---\n{stacks[rank.index]}" for rank in hung]
        return RankTimeout("\n".join(["a case ran past its limit", *lines]), ordered)

    def _check_in_step(self, results: list[RankResult]) -> list[RankResult]:
        """Meet in a barrier: a collective that one rank left open would hit the next case."""
        try:
            checks = self._ask(pickle.dumps((_barrier, ())), CHECK_TIMEOUT)
        except RankTimeout as late:
            checks = late.results
        if all(check.ok for check in checks):
            return results
        self.close()
        return [_out_of_step(*pair) for pair in zip(results, checks, strict=True)]


# What follows runs in the ranks.


@dataclass(frozen=True)
class _Group:
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


def _serve(group: _Group, log: str, connection: Connection) -> None:
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


def _barrier(_rank: int) -> None:
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


# What follows runs in the parent.


def _receive(rank: _Rank) -> RankResult:
    """Return the rank's answer, or its death."""
    try:
        result = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, OSError):
        rank.process.join(1.0)
        error = f"RankDied: exit code {rank.process.exitcode}"
        return RankResult(rank.index, error=error, traceback=rank.log_tail())
    assert isinstance(result, RankResult)
    return result


def _dump_stacks(hung: list[_Rank]) -> dict[int, str]:
    """Return what each hung rank says about where it is."""
    for rank in hung:
        if hasattr(signal, "SIGUSR1") and rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(STACK_DUMP_WAIT)
    return {rank.index: rank.log_tail() for rank in hung}


def _out_of_step(result: RankResult, check: RankResult) -> RankResult:
    error = f"OutOfStep: the case returned, but the ranks no longer meet in a barrier ({check.error})"
    return RankResult(result.rank, value=result.value, error=error, traceback=check.traceback)


def _rank_environment() -> dict[str, str]:
    """Return the variables that leave a rank one thread, and no network but loopback."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    variables = {"OMP_NUM_THREADS": "1"}
    return variables | ({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that are started inside ignore Ctrl-C: each would print where in its imports it was."""
    if threading.current_thread() is not threading.main_thread():  # the only one that may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the running script: a spawned process would run it again on its way up."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

"""A pool of ranks: processes that share a process group, started once and reused from call to call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from scaler_triton.demo.rank_process import START_TIMEOUT, Group, RankResult, barrier, serve
from scaler_triton.demo.spawning import quiet_start

CHECK_TIMEOUT = 30.0  # A barrier among idle ranks takes under a millisecond, but NCCL may set itself up in it.
CLOSE_TIMEOUT = 5.0  # An idle rank leaves within milliseconds.
STACK_DUMP_WAIT = 0.5  # What a hung rank gets to write down where it hangs.
LOG_TAIL = 4000  # Characters.


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
        return len(self._ranks) == self.world_size and all(rank.process.is_alive() for rank in self._ranks)

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
        log = folder / f"rank{index}.log"
        group = Group(index, self.world_size, self.backend, self.group_timeout, str(folder / "store"))
        process = context.Process(target=serve, args=(group, str(log), theirs), daemon=True)
        with quiet_start(log):
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
            checks = self._ask(pickle.dumps((barrier, ())), CHECK_TIMEOUT)
        except RankTimeout as late:
            checks = late.results
        if all(check.ok for check in checks):
            return results
        self.close()
        return [_out_of_step(*pair) for pair in zip(results, checks, strict=True)]


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

"""Start ranks: processes of this machine that share a process group, and that never outlive a deadline."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

LAG = 10.0  # seconds: once a rank has ended, the others must end within this time
LEAVING = 1.0  # seconds; it takes milliseconds

_to_parent: Connection | None = None  # set in a rank


class Answer(NamedTuple):
    """What one rank made of its call: a value, or an error as "Type: text"."""

    rank: int
    value: Any = None
    error: str = ""


def run_ranks(
    fn: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = 120.0, heard: Callable[[str], object] = print
) -> list[Answer]:
    """Call `fn(rank, *args)`, a top-level function, in every rank of a new process group; return the answers in order.

    A rank that runs for more than `seconds`, or LAG seconds longer than another one, is killed, and its answer is an
    error. What ranks `tell` goes to `heard`.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload([fn.__module__])  # where ranks are forked, torch is imported once for all of them
    processes: dict[Connection, Any] = {}
    with TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        group = {"init_method": f"file://{folder}/store", "world_size": ranks}
        try:
            with _interrupts_postponed():
                for rank in range(ranks):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_serve, args=(rank, theirs, group, fn, args), daemon=True)
                    process.start()
                    processes[ours] = process
                    theirs.close()  # so that the death of the rank is an end of file here
            answers = _collect(processes, seconds, heard)
            for pipe, process in processes.items():
                pipe.close()  # the end of file at which a rank leaves
                process.join(LEAVING)
            return answers
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def tell(text: str) -> None:
    """Send a text from a rank to whoever started it; elsewhere do nothing."""
    if _to_parent is not None:
        _to_parent.send(text)


def _collect(processes: dict[Connection, Any], seconds: float, heard: Callable[[str], object]) -> list[Answer]:
    """Return the answer of every rank; for one that dies or is late, an error."""
    start = time.monotonic()
    deadline = start + seconds
    waiting = {pipe: rank for rank, pipe in enumerate(processes)}
    answers: list[Answer] = []
    while waiting:
        ready: Any = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            error = f"RankTimeout: no answer within {time.monotonic() - start:.0f} s"
            answers += [Answer(rank, error=error) for rank in waiting.values()]
            break
        for pipe in ready:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                processes[pipe].join(LEAVING)
                message = Answer(waiting[pipe], error=f"RankDied: exit code {processes[pipe].exitcode}")
            if isinstance(message, str):
                heard(message)
                continue
            answers.append(message)
            del waiting[pipe]
            deadline = min(deadline, time.monotonic() + LAG)
    return sorted(answers, key=lambda answer: answer.rank)


@contextmanager
def _interrupts_postponed() -> Iterator[None]:
    """Hold Ctrl-C back until the processes run, and block it in them: only the parent reacts to it, and kills them."""
    resource_tracker.ensure_running()  # on Python 3.11 and 3.12 its own start would unblock Ctrl-C
    late: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _: late.append(number))  # it may reach threads of NumPy's
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in late[:1]:
            signal.raise_signal(number)


def _serve(rank: int, to_parent: Connection, group: dict[str, Any], fn: Callable[..., Any], args: tuple[Any]) -> None:
    """Be one rank: join the group, make the call, answer, and stay until the parent has heard all ranks."""
    global _to_parent
    _to_parent = to_parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    if (on_gpu := torch.cuda.is_available()) and torch.cuda.device_count() < group["world_size"]:
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_CUMEM_ENABLE="0")  # else NCCL refuses to share a GPU
    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", **group, rank=rank)
        answer = Answer(rank, fn(rank, *args))
    except Exception as error:
        answer = Answer(rank, error=f"{type(error).__name__}: {error}")
    to_parent.send(answer)
    with suppress(EOFError, OSError):
        to_parent.recv()  # to leave now could break the last collective of a slower rank
    os._exit(0)  # the group's threads would wait for ranks that are gone


def _end_with_parent() -> None:
    """Leave when the parent is gone, even from within a collective that never ends."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)

"""What is set aside while a rank is spawned: threads, networks, the running script, stderr."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def quiet_start(log: Path) -> Iterator[None]:
    """Have a process that is started inside use one thread and loopback, leave the script alone and write to `log`."""
    with _environment(_rank_environment()), _without_main(), _stderr_in(log):
        yield


def _rank_environment() -> dict[str, str]:
    """Return the variables that leave a rank one thread, and no network but loopback."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is None:
        return one_thread
    return {**one_thread, "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


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
def _stderr_in(log: Path) -> Iterator[None]:
    """Send the stderr of processes that are started inside to a file: Ctrl-C has each print where in its imports it is.

    To ignore Ctrl-C meanwhile would lose one that comes now.
    """
    before = os.dup(2)
    try:
        with log.open("wb") as stream:
            os.dup2(stream.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the running script: a spawned process would run it again on its way up."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

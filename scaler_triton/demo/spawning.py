"""What is set aside while ranks are spawned: threads, networks, the running script, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Have processes that are started inside use one thread and loopback, and leave the script and Ctrl-C alone."""
    with _environment(_rank_environment()), _without_main(), _interrupts_ignored():
        yield


def _rank_environment() -> dict[str, str]:
    """Return the variables that leave a rank one thread, and no network but loopback."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ()
    return {"OMP_NUM_THREADS": "1", **dict.fromkeys(interfaces, loopback[0])}


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

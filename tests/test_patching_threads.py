"""`patch_torch` in several threads: one call at a time, and torch's classes are back after the last."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch_scalers import OURS, TorchPlain, scaler_names

from scaler_triton import patch_torch, unpatch_torch
from scaler_triton.patching import patch

pytestmark = pytest.mark.filterwarnings("ignore:torch's gradient scalers were taken")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Nothing of a patch outlives its test."""
    yield
    unpatch_torch()
    assert torch.amp.GradScaler is TorchPlain


CALLS: dict[str, Callable[[AbstractContextManager[None]], Any]] = {
    "patch": lambda held: patch_torch(),
    "end": lambda held: held.__exit__(None, None, None),
    "unpatch": lambda held: unpatch_torch(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_until_that_of_another_thread_has_ended(name: str, monkeypatch: Any) -> None:
    held, settle, waited = patch_torch(), patch._settle, []
    other = threading.Thread(target=CALLS[name], args=(held,))

    def meanwhile() -> None:
        settle()
        if not waited:
            waited.append(True)  # first: the other thread comes here, too
            other.start()
            other.join(0.3)
            waited.append(other.is_alive())

    monkeypatch.setattr(patch, "_settle", meanwhile)
    patch_torch()
    other.join(10)
    assert waited == [True, True]
    assert not other.is_alive()


def test_threads_share_it() -> None:
    wrong: list[object] = []
    switching = sys.getswitchinterval()
    inside = threading.Barrier(8)

    def work() -> None:
        inside.wait()
        for _ in range(20):
            with patch_torch():
                if set(scaler_names().values()) & set(OURS):
                    wrong.append(scaler_names())

    threads = [threading.Thread(target=work) for _ in range(8)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    assert wrong == []
    assert torch.amp.GradScaler is TorchPlain

"""Forked children and threads: a scaler is as good there as where it was made."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_all_same
from torch import Tensor

from scaler_triton import GradScaler
from scaler_triton.core import dispatch
from scaler_triton.kernels import trial

ROOT = Path(__file__).parents[3]

# A thread of the parent's is trying out a GPU when the parent forks; the child meets a device of its own.
FORK_IN_A_TRIAL = """
import os, signal, threading, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import torch
from scaler_triton.core import dispatch
from scaler_triton.kernels import trial

trying, over = threading.Event(), threading.Event()
trial.unscaling = lambda device, dtype: (trying.set(), over.wait(60))
place = torch.device("cuda", 0), torch.float32, "auto"
thread = threading.Thread(target=dispatch.choose, args=place)
thread.start()
assert trying.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(10)  # ends a child that waits for ever
    trial.unscaling = lambda device, dtype: None
    print(dispatch.choose(torch.device("cpu"), torch.float32, "triton"), flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
over.set()
thread.join()
print(os.waitstatus_to_exitcode(status), dispatch.choose(*place))
"""


def test_fork_while_another_thread_tries_a_device() -> None:
    """The child waits for nobody: the thread that held the lock is not in it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SCALER_TRITON")}
    # On a GPU machine, too, the interpreted kernels serve the CPU.
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", FORK_IN_A_TRIAL]
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.split()) == (0, ["triton", "0", "triton"]), run.stderr


def train(seed: int, steps: int, device: str) -> list[Tensor]:
    """Train with a scaler of one's own; every scale and the last parameters."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    optimizer, scales = torch.optim.AdamW(params, lr=0.1, fused=bool(seed % 2)), []
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=3)
    for _ in range(steps):
        factor = scaler.scale(torch.ones((), device=device))
        bad = torch.rand((), generator=generator).item() < 0.2
        for param in params:
            param.grad = torch.randn(5, generator=generator).to(device) * factor * (torch.inf if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler._scale.clone())
    return [*scales, *(param.detach() for param in params)]


def in_threads(work: Callable[[int], object], count: int = 4) -> list[Any]:
    """Return what `work` returns of each number, in threads that begin together."""
    meet = threading.Barrier(count)

    def meet_and_work(number: int) -> object:
        meet.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(meet_and_work, range(count)))


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scalers_in_threads(device: str) -> None:
    """They end with the same bits as one after another."""
    interval, steps = sys.getswitchinterval(), 60
    sys.setswitchinterval(1e-6)
    try:
        results = in_threads(lambda seed: train(seed, steps, device))
    finally:
        sys.setswitchinterval(interval)
    for seed, result in enumerate(results):
        assert_all_same(result, train(seed, steps, device))
    assert len({result[steps - 1].item() for result in results}) > 1


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("outcome", ["triton", "torch"])
def test_threads_that_meet_a_new_device_try_it_once(outcome: str, monkeypatch: Any) -> None:
    calls, gpu = [], torch.device("cuda", 0)

    def try_out(device: torch.device, dtype: torch.dtype) -> None:
        calls.append(device)
        threading.Event().wait(0.05)  # the others arrive
        if outcome == "torch":
            raise OSError("no room")

    monkeypatch.setattr(dispatch, "_warned", {gpu})
    monkeypatch.setattr(trial, "unscaling", try_out)
    assert in_threads(lambda _: dispatch.choose(gpu, torch.float32, "auto")) == [outcome] * 4
    assert len(calls) == 1

"""Takes steps through the real trial of the kernels on the stub driver, with trouble in the way; prints JSON.

Run in a process of its own, started with the stub driver's environment; waits to be told to go. Arguments: the trouble,
and the backends of the steps during it; a last step, with "triton", comes after it. The stub computes nothing: a trial
whose kernels were compiled and launched finds a wrong result.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from perf import stub_driver
from scaler_triton import GradScaler, dispatch
from scaler_triton.kernels import probe

REAL_PROBE = probe.probe


def no_compiler() -> AbstractContextManager[Any]:
    """Triton has its driver built by a C compiler."""
    return mock.patch.dict(os.environ, PATH="/nowhere")


def file_for_a_cache() -> AbstractContextManager[Any]:
    stub_driver.activate()
    return mock.patch.dict(os.environ, TRITON_CACHE_DIR=__file__)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond a block, so that some of what is compiled is kept."""
    stub_driver.activate()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


TROUBLES = {each.__name__: each for each in (nullcontext, no_compiler, file_for_a_cache, full_disk)}


def step(backend: str) -> dict[str, Any]:
    """Take a step: what it raised and warned, and what gradients and parameters are then."""
    parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 8.0)
    scaler, error = GradScaler("cpu", init_scale=4.0, backend=backend), ""
    scaler.scale(torch.ones(()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            scaler.step(torch.optim.SGD(parameters, lr=1.0))
        except RuntimeError as raised:
            error = str(raised)
    return {
        "error": error,
        "warned": [str(warning.message) for warning in caught],
        "gradients": sorted({number for parameter in parameters for number in parameter.grad.tolist()}),
        "parameters": sorted({number for parameter in parameters for number in parameter.tolist()}),
    }


def main() -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    with (
        stub_driver.as_gpu(),
        mock.patch.object(probe, "probe", REAL_PROBE),
        mock.patch.object(probe, "check_device", side_effect=lambda device: stub_driver.activate()),
        mock.patch.object(dispatch, "_without_trial", return_value=""),  # as for a GPU
    ):
        with TROUBLES[sys.argv[1]]():
            steps = [step(backend) for backend in sys.argv[2:]]
        json.dump([*steps, step("triton")], sys.stdout)


if __name__ == "__main__":
    main()

"""What does the scaler cost the host, for few and many gradients that stay, move, or come and go?"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from perf.context import Context, Section, Turn
from perf.host_cases import COUNTS, Case, cases, measure, split
from perf.machine import ROOT
from perf.measure import Effort
from perf.rows import Row
from perf.solo import one_rank

Measure = Callable[[Case, DeviceMesh | None, Effort], Iterator[Row]]


def sections(context: Context) -> list[Section]:
    """Return the CPU's path, and the GPU's: on the GPU, or over the stub driver where there is none."""
    found = [Section("host, cpu path", lambda: measure_path(context, "cpu"), Turn.ON_CPU)]
    if context.gpu:
        return [Section("host, cuda path", lambda: measure_path(context, "cuda"), Turn.EXPLAINS), *found]
    return [*found, Section("host, gpu path over the stub driver", lambda: measure_stub(context, "perf.host_stub"))]


def counts(quick: bool) -> tuple[int, ...]:
    """Return how many gradients to try."""
    return COUNTS[:1] if quick else COUNTS


def effort(context: Context) -> Effort:
    """Return how long to measure one case."""
    return context.effort(0.15, 15)


def measure_path(context: Context, path: str, measure: Measure = measure) -> Iterator[Row]:
    """Measure every case of a path in this process."""
    plain, distributed = split(cases(path, counts(context.quick)))
    for case in plain:
        yield from measure(case, None, effort(context))
    with one_rank(path) as mesh:
        for case in distributed:
            yield from measure(case, mesh, effort(context))


def measure_stub(context: Context, module: str) -> Iterator[Row]:
    """Measure the GPU's path in a process whose CUDA driver computes nothing: run there, `module` prints its rows."""
    from perf import stub_driver

    command = [sys.executable, "-m", module, *(["--quick"] if context.quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **stub_driver.environment(Path(folder))}
        run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{module} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    for line in run.stdout.splitlines():
        yield Row(**json.loads(line))

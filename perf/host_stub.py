"""The host's part of the GPU's path without a GPU, in a process that has the stub driver. Prints rows as JSON.

Of torch's scaler its Python is timed: its op on the gradients returns at once. Under FSDP2, where DTensor's dispatch is
inside of that op, the op stays, on tiny CPU tensors, but norms and products of the shards are left out: the CPU would
run one for each tensor. All else runs on the CPU, on both sides; the driver's own time, and the GPU's, are not in here.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from perf import stub_driver
from perf.measure import Context, Subject, require
from perf.rows import ROOT, Row

PART = "GPU path over a driver that computes nothing"


def measure(context: Context, question: str = "host") -> Iterator[Row]:
    """Yield what a process with the stub driver measures for a question."""
    if not shutil.which("gcc") or sys.platform != "linux":
        print(f"left out: {question}, {PART}: needs Linux and gcc", flush=True)
        return
    command = [sys.executable, "-m", "perf.host_stub", question, *["--quick"] * context.quick]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **stub_driver.environment(Path(folder)), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    yield from (Row(*json.loads(line)) for line in run.stdout.splitlines())


def require_launches(case: str, subjects: Mapping[str, Subject]) -> None:
    """Raise WrongResult unless ours launches kernels, and torch's none: nothing is computed that could be compared."""
    for name, subject in subjects.items():
        before = stub_driver.launches()
        subject.before()
        subject.run()
        launched = stub_driver.launches() - before
        subject.after()
        require(bool(launched) == (name == "ours"), f"{case}: {name} launched {launched} kernels")


def host_rows(context: Context) -> Iterator[Row]:
    """Time steps, and 500 parameters under FSDP2."""
    from perf import bench_host  # which imports this module

    op = "_amp_foreach_non_finite_check_and_unscale_"
    with mock.patch.object(torch, op, lambda grads, flag, inverse: None):  # noqa: PT008 (a mock takes longer)
        for kind in bench_host.KINDS:
            yield from bench_host.alone(context, kind, PART, "triton", (1, 10, 100))
    with without_norms_of_shards():
        yield from bench_host.fsdp2(context, PART, "triton")


@contextmanager
def without_norms_of_shards() -> Iterator[None]:
    """Replace what the CPU does to take the norms of a list of plain tensors and to multiply them."""
    one, library = torch.ones(()), torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # yes, it replaces a kernel
        library.impl("_foreach_norm.Scalar", lambda grads, order=2.0, dtype=None: [one] * len(grads), "CPU")
        library.impl("_foreach_mul_.Tensor", lambda grads, factor: None, "CPU")
    try:
        yield
    finally:
        library._destroy()


def main() -> None:
    """Print the rows of the question that the command line names."""
    from perf import bench_launches, bench_memory

    context = Context("cpu", quick="--quick" in sys.argv)
    gc.disable()
    stub_driver.activate()
    with stub_driver.as_gpu():
        questions = {"launches": bench_launches.by_kernels, "memory": bench_memory.by_tensors}
        for row in host_rows(context) if sys.argv[1] == "host" else questions[sys.argv[1]]():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

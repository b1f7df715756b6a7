"""The host part of the GPU's path without a GPU: `bench_host` runs this under the stub driver. Prints rows as JSON.

torch's op is left out of its time for plain gradients, so that its Python alone stands against our Python and
our launch. For DTensors the op stays, on tiny CPU tensors: DTensor's own dispatch is inside of it. Neither side's
copy of the flag to the host, and none of the driver's time, is in here.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from perf import stub_driver
from perf.bench_host import counts, effort
from perf.check import require
from perf.context import Context
from perf.host_cases import CALLS, Bench, Case, cases, measure, split
from perf.rows import Row
from perf.solo import one_rank


def check(case: Case, mesh: DeviceMesh | None) -> None:
    """Raise WrongResult unless our kernels are launched, and only ours: nothing is computed that could be compared."""
    for metric in CALLS:
        bench = Bench(case, mesh)
        for name, subject in bench.subjects(metric).items():
            before = stub_driver.launches()
            subject.before()
            subject.run()
            launched = stub_driver.launches() - before
            subject.after()
            require(bool(launched) == (name == "ours"), f"{case.name}, {metric}: {name} launched {launched} kernels")


@contextmanager
def without_torchs_op() -> Iterator[None]:
    """Leave only torch's Python of what unscales."""
    with mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", _nothing):
        yield


def _nothing(gradients: object, found_inf: object, inv_scale: object) -> None:
    """Stand for torch's op; a mock would take longer than it."""


def measured(quick: bool) -> Iterator[Row]:
    """Measure every case."""
    how = effort(Context(quick=quick, gpu=False))
    plain, distributed = split(cases("stub", counts(quick)))
    with without_torchs_op():
        for case in plain:
            yield from measure(case, None, how, check)
    with one_rank("cpu") as mesh:
        for case in distributed:
            yield from measure(case, mesh, how, check)


def main() -> None:
    """Print the rows."""
    stub_driver.activate()
    with stub_driver.as_gpu():
        for row in measured("--quick" in sys.argv):
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()

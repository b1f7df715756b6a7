"""The host part of the GPU's path without a GPU: `bench_host` runs this under the stub driver. Prints rows as JSON.

torch's op is left out of its time for plain gradients, so that its Python alone stands against our Python and
our launch. For DTensors the op stays, on tiny CPU tensors: DTensor's own dispatch is inside of it. Neither side's
copy of the flag to the host, and none of the driver's time, is in here.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
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
from perf.measure import Subject
from perf.rows import Row
from perf.solo import one_rank


def require_launches(case: str, subjects: Mapping[str, Subject]) -> None:
    """Raise WrongResult unless our kernels are launched, and only ours: nothing is computed that could be compared."""
    for name, subject in subjects.items():
        before = stub_driver.launches()
        subject.before()
        subject.run()
        launched = stub_driver.launches() - before
        subject.after()
        require(bool(launched) == (name == "ours"), f"{case}: {name} launched {launched} kernels")


def check(case: Case, mesh: DeviceMesh | None) -> None:
    """As `require_launches`, of every call."""
    for metric in CALLS:
        require_launches(f"{case.name}, {metric}", Bench(case, mesh).subjects(metric))


@contextmanager
def without_torchs_op() -> Iterator[None]:
    """Leave only torch's Python of what unscales."""
    with mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", _nothing):
        yield


def _nothing(gradients: object, found_inf: object, inv_scale: object) -> None:
    """Stand for torch's op; a mock would take longer than it."""


def stub_rows(context: Context) -> Iterator[Row]:
    """Measure every case of the GPU's path over the stub driver, which this process has."""
    plain, distributed = split(cases("stub", counts(context.quick)))
    with without_torchs_op():
        for case in plain:
            yield from measure(case, None, effort(context), check)
    with one_rank("cpu") as mesh:
        for case in distributed:
            yield from measure(case, mesh, effort(context), check)


def print_rows(measure: Callable[[Context], Iterator[Row]]) -> None:
    """Print what is measured, in a process that has the stub driver."""
    stub_driver.activate()
    with stub_driver.as_gpu():
        for row in measure(Context(quick="--quick" in sys.argv, gpu=False)):
            print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    print_rows(stub_rows)

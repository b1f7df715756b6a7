"""The host part of the GPU's path without a GPU: `bench_host` runs this under the stub driver. Prints rows as JSON.

torch's op is left out of its time for plain gradients, so that its Python alone stands against our Python and
our launch. For DTensors the op stays, on tiny CPU tensors: DTensor's own dispatch is inside of it. Neither side's
copy of the flag to the host, and none of the driver's time, is in here.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from perf import stub_driver
from perf.bench_host import counts, effort
from perf.check import require
from perf.context import Context
from perf.host_cases import CALLS, NUMEL, Bench, Case, cases, measure, split
from perf.measure import Subject, interleaved
from perf.rows import Row, time_rows
from perf.solo import one_rank

ONE_LAUNCH = "one launch, stub"
UNSCALE_PARAMS = 8  # of `_unscale_kernel`, constexprs left out


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


def launch_subjects() -> dict[str, Subject]:
    """Return one launch of one kernel: by Triton's own dispatch, to which ours fall back, and as ours are made."""
    from scaler_triton.kernels.table import GradTable
    from scaler_triton.kernels.unscale import _unscale_kernel

    table = GradTable([NUMEL], torch.float32, torch.device("cpu"))
    arguments = torch.zeros(()), torch.ones(()), table.generation
    table.launch(_unscale_kernel, *arguments, INVERSE=False)  # compiles
    (direct,) = table._launches.values()
    dispatched = copy.copy(direct)
    dispatched._compiled = ()
    return {name: Subject(partial(way, 1, *arguments)) for name, way in (("dispatch", dispatched), ("ours", direct))}


def require_one_launch(subjects: Mapping[str, Subject]) -> None:
    """Raise WrongResult unless all subjects ask the driver for the same launch, once."""
    seen = []
    stub_driver.note_params(UNSCALE_PARAMS)
    for name, subject in subjects.items():
        before = stub_driver.launches()
        subject.run()
        require(stub_driver.launches() == before + 1, f"{ONE_LAUNCH}: {name} launched not once")
        seen.append(stub_driver.launch(-1))
    stub_driver.note_params(0)  # other kernels have fewer
    require(len(set(seen)) == 1, f"{ONE_LAUNCH}: {seen}")


def launch_rows(context: Context) -> Iterator[Row]:
    """Time one launch both ways."""
    subjects = launch_subjects()
    require_one_launch(subjects)
    yield from time_rows("host", ONE_LAUNCH, "launch", interleaved(subjects, effort(context), warmup=5))


def stub_rows(context: Context) -> Iterator[Row]:
    """Measure every case of the GPU's path over the stub driver, which this process has."""
    yield from launch_rows(context)
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

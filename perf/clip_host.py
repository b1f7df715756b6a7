"""What unscaling and clipping cost the host, of DTensors also with a fused step behind them.

Run as a script under the stub driver it prints rows as JSON.

There torch's passes over plain gradients are left out of its time, and it gets their norms for nothing: its Python
and its small ops stand against our Python, small ops and launches. For DTensors unscaling stays as it is in
`host_stub`, on tiny CPU tensors; norm and product of the shards are replaced below DTensor's dispatch, since on the
CPU each tensor's norm is an op of its own, which no GPU would wait for.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from perf.bench_host import counts, effort
from perf.clipping import CLIP, METRICS, Clipping, Counted, require_right
from perf.context import Context
from perf.host_cases import Bench, Case, cases, split
from perf.host_stub import print_rows, require_launches, without_torchs_op
from perf.measure import Effort, interleaved, one_thread
from perf.rows import Row, time_rows
from perf.solo import one_rank

STEPPED = 500  # DTensors at most: of a fused step DTensor's own dispatch takes some 25 us for each
Verify = Callable[[Case, DeviceMesh | None, str], None]


def clipping_of(case: Case, mesh: DeviceMesh | None, metric: str = CLIP, share: float = 0.5) -> Clipping:
    """Return both scalers' turn at a host case."""
    bench = Bench(case, mesh)
    optimizer = Counted(bench.optimizers[0].param_groups[0]["params"]) if metric == CLIP else None
    return Clipping(bench.gradients, metric, optimizer=optimizer, pair=bench.scalers, before=bench.prepare, share=share)


def check(case: Case, mesh: DeviceMesh | None, metric: str) -> None:
    """Raise WrongResult unless both scalers clip as they must."""
    require_right(case.name, lambda share: clipping_of(case, mesh, metric, share))


def check_launches(case: Case, mesh: DeviceMesh | None, metric: str) -> None:
    """As `require_launches`."""
    require_launches(f"{case.name}, {metric}", clipping_of(case, mesh, metric).subjects())


def metrics_of(case: Case) -> Sequence[str]:
    """Return what is measured: of plain gradients no step, which `bench_clip` times by lists."""
    return METRICS if case.kind == "DTensor" and case.count <= STEPPED else (CLIP,)


def measure(case: Case, mesh: DeviceMesh | None, effort: Effort, verify: Verify = check) -> Iterator[Row]:
    """Check a case, then time it; a GAN's two networks are not clipped by one norm."""
    if case.second:
        return
    for metric in metrics_of(case):
        with one_thread():
            verify(case, mesh, metric)
            times = interleaved(clipping_of(case, mesh, metric).subjects(), effort, warmup=5)
        yield from time_rows("clip", case.name, metric, times)


def stub_rows(context: Context) -> Iterator[Row]:
    """Measure every case of the GPU's path over the stub driver, which this process has."""
    plain, distributed = split(cases("stub", counts(context.quick)))
    with without_torchs_op(), without_torchs_clipping():
        for case in plain:
            yield from measure(case, None, effort(context), check_launches)
    with one_rank("cpu") as mesh, without_norms_of_shards():
        for case in distributed:
            yield from measure(case, mesh, effort(context), check_launches)


@contextmanager
def without_torchs_clipping() -> Iterator[None]:
    """Leave only torch's Python, and its ops on the norms, of what clips."""
    with mock.patch.object(torch, "_foreach_norm", _norms), mock.patch.object(torch, "_foreach_mul_", _unchanged):
        yield


@contextmanager
def without_norms_of_shards() -> Iterator[None]:
    """Replace what the CPU does to take the norms of a list of plain tensors and to multiply them."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # yes, it replaces a kernel
        library.impl("_foreach_norm.Scalar", _norms, "CPU")
        library.impl("_foreach_mul_.Tensor", _unchanged, "CPU")
    try:
        yield
    finally:
        library._destroy()


_ONE = torch.ones(())


def _norms(gradients: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [_ONE] * len(gradients)


def _unchanged(gradients: Sequence[Tensor], factor: Tensor) -> None:
    pass


if __name__ == "__main__":
    print_rows(stub_rows)

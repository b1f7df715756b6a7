"""Random programs on our GradScaler and on the specification: after every call both worlds are equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("hypothesis")

import torch
import torch.distributed as dist
from extras import FullShardedSpecification
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test
from programs import Programs
from specification import departures

from scaler_triton import ShardedGradScaler

pytestmark = pytest.mark.slow
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the CPU has Triton's interpreter without a GPU"
)


class ShardedPrograms(Programs):
    """The same with ShardedGradScaler, in a group of one rank."""

    ours_class = ShardedGradScaler
    theirs_class = FullShardedSpecification
    half = torch.float16


class InterpretedPrograms(Programs):
    """The same through the kernels, under Triton's interpreter."""

    backend = "triton"


class InterpretedShardedPrograms(ShardedPrograms):
    backend = "triton"


class GpuPrograms(Programs):
    """The same on a GPU, beside torch's class there."""

    backend, device = "triton", "cuda"  # no falling back, which nothing would show


class GpuShardedPrograms(ShardedPrograms):
    backend, device = "triton", "cuda"


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group that this process has for itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(machine: type[Programs], chunk: Chunk, steps: int) -> None:
    """Run a chunk of programs; the differences from torch they met are printed with `-s`."""
    departures.clear()
    fresh = seed(chunk.seed)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(fresh, settings=settings_for(chunk.programs, steps))
    print(f"{chunk}: departures from torch by number {dict(departures)}")


@pytest.mark.parametrize("chunk", chunks(in_ci=250), ids=str)
def test_programs_on_torch_ops(chunk: Chunk) -> None:
    run(Programs, chunk, steps=25)


@pytest.mark.parametrize("chunk", chunks(in_ci=150, share=0.5), ids=str)
def test_sharded_programs_on_torch_ops(chunk: Chunk, group_of_one: None) -> None:
    run(ShardedPrograms, chunk, steps=25)


@interpreted
@pytest.mark.parametrize("chunk", chunks(in_ci=15, share=0.02), ids=str)
def test_programs_through_the_interpreter(chunk: Chunk) -> None:
    run(InterpretedPrograms, chunk, steps=20)


@interpreted
@pytest.mark.parametrize("chunk", chunks(in_ci=8, share=0.01), ids=str)
def test_sharded_programs_through_the_interpreter(chunk: Chunk, group_of_one: None) -> None:
    run(InterpretedShardedPrograms, chunk, steps=20)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", chunks(in_ci=30, share=0.05), ids=str)
def test_programs_on_a_gpu(chunk: Chunk) -> None:
    with torch.device("cuda"):
        run(GpuPrograms, chunk, steps=20)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", chunks(in_ci=20, share=0.05), ids=str)
def test_sharded_programs_on_a_gpu(chunk: Chunk, group_of_one: None) -> None:
    with torch.device("cuda"):
        run(GpuShardedPrograms, chunk, steps=20)

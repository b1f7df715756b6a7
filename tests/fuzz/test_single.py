"""Random programs on our GradScaler and on the specification: after every call both worlds are equal to the bit."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz_profile import Chunk, cases, settings_for
from helpers import sgd, started
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test
from programs import Programs
from specification import ShardedSpecification

from scaler_triton import GradScaler, ShardedGradScaler

pytestmark = pytest.mark.slow
WAYS = [  # backend, device, which class; how many programs by default, and which part of those asked for
    ("torch", "cpu", "grad", 250, 1.0),
    ("torch", "cpu", "sharded", 150, 0.5),
    ("triton", "cpu", "grad", 15, 0.02),
    ("triton", "cpu", "sharded", 8, 0.01),
    ("triton", "cuda", "grad", 30, 0.05),  # no falling back, which nothing would show
    ("triton", "cuda", "sharded", 20, 0.05),
]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group that this process has for itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "device", "kind", "chunk"), cases(WAYS))
def test_programs(backend: str, device: str, kind: str, chunk: Chunk, request: pytest.FixtureRequest) -> None:
    options: dict[str, Any] = {"backend": backend, "device": device}
    if kind == "sharded":
        request.getfixturevalue("group_of_one")
        options |= {"ours_class": ShardedGradScaler, "theirs_class": ShardedSpecification, "half": torch.float16}
    machine = seed(chunk.seed)(type("Programs", (Programs,), options))
    with torch.device(device):
        run_state_machine_as_test(machine, settings=settings_for(chunk.programs, 25 if backend == "torch" else 20))


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_no_pickle_after_a_look_at_gradients_that_an_update_came_before(cls: type) -> None:
    """The programs found this."""
    scaler, optimizer = started(cls, "cpu"), sgd([torch.ones(3)])
    scaler.unscale_(optimizer)
    scaler.update()
    pickle.dumps(scaler)
    scaler._check_inf_per_device(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)

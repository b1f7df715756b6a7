"""The same with inductor, torch.compile's default, whose code reorders and reuses memory around the ops."""

import math
import os
import shutil
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compile_cases import OPTIMIZERS, fresh_compiler, fresh_net, nothing_new, ours, run, theirs, whole_step
from helpers import PLACES, Place, assert_all_same
from torch import Tensor

from scaler_triton import ops

pytestmark = [
    # Torch's compiler meets deprecated parts of torch while it is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    # After a graph break Dynamo asks every tensor it meets for `.grad`, the scaled loss, too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Inductor's graphs begin with one of nothing, and what it does to silence torch leaves an error one.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    # Inductor advises less exact products where a GPU has them.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication:UserWarning"),
]
# As inductor looks for it.
COMPILER = os.environ.get("CXX", "g++").split()[0]
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"inductor needs a C++ compiler for CPUs, and there is no {COMPILER}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What inductor compiles lands in this test's folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))  # else inductor sets it, for all tests that follow


@NEEDS_COMPILER
@PLACES
def test_ops_between_computations(place: Place) -> None:
    """The ops write what the graph computed, a view of it and an argument, and later parts of the graph see it."""

    def finish(grad: Tensor, scale: Tensor, tracker: Tensor) -> tuple[Tensor, ...]:
        found_inf = torch.zeros((), device=grad.device)
        made = grad * 3
        ops.unscale_([grad, made[0], made[1].half()], scale.reciprocal(), found_inf, backend=place.backend)
        norm = ops.grad_norm([grad, made], inv_scale=scale, backend=place.backend)
        ops.check_nonfinite([made + grad], found_inf, backend=place.backend)
        ops.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2, backend=place.backend)
        return made, norm, torch.where(found_inf != 0, 0.0, grad)

    with fresh_compiler():
        compiled = torch.compile(finish, fullgraph=True)
        outcomes: list[list[Tensor]] = [[], []]
        for value in (1.0, math.inf, 2.0, 3.0):
            for function, outcome in zip((compiled, finish), outcomes, strict=True):
                grad = torch.linspace(-1, 1, 6, device=place.device).reshape(2, 3)
                grad[0, 0] = value
                scale = torch.tensor(4.0, device=place.device)
                tracker = torch.ones((), dtype=torch.int32, device=place.device)
                outcome += [*function(grad, scale, tracker), grad, scale, tracker.float()]
    assert_all_same(*outcomes)


@NEEDS_COMPILER
@PLACES
def test_a_whole_step_compiled(place: Place) -> None:
    results = []
    for new_scaler in (ours, theirs):
        net, scaler = fresh_net(place.device), new_scaler(place)
        optimizer = OPTIMIZERS["adamw-fused"](net.parameters())
        with fresh_compiler():
            results.append(run(torch.compile(whole_step(net, optimizer, scaler)), net, scaler))
    assert_all_same(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_ops_beside_inductors_cuda_graphs(mode: str) -> None:
    """Gradients move from call to call, which a replayed graph would not see: inductor captures around the ops."""

    def unscale(made: Tensor, found_inf: Tensor) -> Tensor:
        grad = made * 2
        ops.unscale_([grad], torch.full((), 0.25, device="cuda"), found_inf, backend="triton")
        return grad + 1

    with fresh_compiler():
        compiled = torch.compile(unscale, mode=mode, fullgraph=True)
        for number in range(6):
            made, found_inf = torch.full((64,), float(number), device="cuda"), torch.zeros((), device="cuda")
            made[0] = math.inf if number % 2 else 0.0
            with nullcontext() if number < 3 else nothing_new():
                result = compiled(made, found_inf).clone()
            assert found_inf.item() == number % 2
            assert result[1].item() == number / 2 + 1

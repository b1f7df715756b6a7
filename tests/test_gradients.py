"""Every kind of gradient that torch accepts, bitwise; every kind it refuses, before anything is written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Place, assert_same, flags, on_device, parameters, places, sgd, started
from torch import Tensor

from scaler_triton import GradScaler, ops
from scaler_triton.sharded import ShardedGradScaler

SCALE = 3.0
EXPANDED = "more than one element of the written-to tensor refers to a single memory location"


class Lone(ShardedGradScaler):
    """ShardedGradScaler in a process without ranks: what it does with gradients, not with groups."""

    _is_sharded = False


def dense(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(37, 5).to(dtype)


def sparse(dtype: torch.dtype, *, coalesced: bool) -> Tensor:
    indices = torch.tensor([[0, 2, 2, 5]])
    values = torch.tensor([1.5, 2.0, 7.0, -3.0]).to(dtype)
    with torch.sparse.check_sparse_tensor_invariants(False):
        made = torch.sparse_coo_tensor(indices, values, (8,))
    return made.coalesce() if coalesced else made


KINDS: dict[str, Callable[[], list[Tensor | None]]] = {
    "fp32": lambda: [dense()],
    "bf16": lambda: [dense(torch.bfloat16)],
    "fp64": lambda: [dense(torch.float64)],
    "mixed": lambda: [dense(), dense(torch.float64), dense(torch.bfloat16), dense()],
    "none": lambda: [None, dense(), None],
    "scalar": lambda: [torch.tensor(5.0)],
    "empty": lambda: [torch.zeros(0), dense(), torch.zeros(3, 0), torch.zeros(0, 1).expand(0, 9)],
    "transposed": lambda: [dense().t()],
    "channels_last": lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "strided": lambda: [torch.randn(40)[::3], torch.randn(6, 8)[:, 1:5]],
    "stride-0": lambda: [torch.randn(5).as_strided((1, 5), (0, 1)), torch.randn(1).as_strided((1,), (0,))],
    "misaligned": lambda: [torch.randn(70)[1:], torch.randn(70)[3:66]],
    "sparse": lambda: [sparse(torch.float32, coalesced=True), dense()],
    "sparse-uncoalesced": lambda: [sparse(torch.float32, coalesced=False)],
    "adjacent": lambda: list(torch.randn(90).split([30, 40, 20])),
    "nan": lambda: [dense(), torch.tensor([1.0, math.nan])],
    "inf": lambda: [torch.tensor([1.0, -math.inf]), dense()],
    "subnormal": lambda: [torch.tensor([1e-40, -1e-45, 3e38, -0.0])],
}


def values(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad._values() if grad.is_sparse else grad


def unscaled_by_torch(cls: type, make: Callable[[], list[Tensor | None]]) -> tuple[Any, Any]:
    """Return torch's scaler and an optimizer it unscaled, on the CPU, whose op takes every dtype."""
    optimizer = torch.optim.SGD(parameters(make(), "cpu"), lr=0.5)
    scaler = started(cls, "cpu", init_scale=SCALE)
    scaler.unscale_(optimizer)
    return scaler, optimizer


def assert_same_outcome(ours: Any, mine: Any, theirs: Any, other: Any) -> None:
    assert max(flags(ours, mine), default=0.0) == max(flags(theirs, other), default=0.0)
    for a, b in zip(mine.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_same(values(a.grad), values(b.grad))
            assert a.grad.is_sparse == b.grad.is_sparse


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", places(), ids=str)
def test_every_kind_is_unscaled_as_torch_does(place: Place, kind: str) -> None:
    torch.manual_seed(2)
    theirs, other = unscaled_by_torch(torch.amp.GradScaler, seeded(KINDS[kind]))
    optimizer = sgd(seeded(KINDS[kind])(), place.device)
    ours = started(GradScaler, place.device, init_scale=SCALE, backend=place.backend)
    ours.unscale_(optimizer)
    assert_same_outcome(ours, optimizer, theirs, other)


@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "uncoalesced"])
@pytest.mark.parametrize("place", places(), ids=str)
def test_sharded_takes_fp16_dense_and_sparse(place: Place, coalesced: bool) -> None:
    optimizer = sgd([dense(torch.float16), sparse(torch.float16, coalesced=coalesced)], place.device)
    scaler = started(Lone, place.device, init_scale=SCALE, backend=place.backend)
    scaler.unscale_(optimizer)
    expected = torch.zeros(())
    for parameter, grad in zip(
        optimizer.param_groups[0]["params"],
        [dense(torch.float16), sparse(torch.float16, coalesced=True)],
        strict=True,
    ):
        reference = values(grad).clone()
        torch._amp_foreach_non_finite_check_and_unscale_([reference], expected, torch.tensor(1 / SCALE))
        assert_same(values(parameter.grad), reference)
    assert flags(scaler, optimizer) == [0.0]


def test_sparse_fp16_duplicates_are_summed_in_fp32() -> None:
    """Difference 16: torch's own GradScaler loses the small ones."""
    with torch.sparse.check_sparse_tensor_invariants(False):
        small = [1.0, 2.0**-11, 2.0**-11, 2.0**-11]
        grad = torch.sparse_coo_tensor(torch.zeros(1, 4, dtype=torch.int64), torch.tensor(small).half(), (3,))
    sums = []
    for cls in (GradScaler, torch.amp.GradScaler):
        optimizer = sgd([grad])
        started(cls, "cpu")._check_inf_per_device(optimizer)
        sums.append(optimizer.param_groups[0]["params"][0].grad._values().item())
    assert sums == [torch.tensor(1 + 3 * 2.0**-11).half().item(), 1.0]


def test_a_coalesced_fp16_gradient_stays_the_same_object() -> None:
    """Another one would pass for new, and a postponed step would unscale it again."""
    early, late = sgd([dense()]), sgd([sparse(torch.float16, coalesced=True)])
    scaler = started(Lone, "cpu", init_scale=SCALE)
    (parameter,) = late.param_groups[0]["params"]
    gradient, expected = parameter.grad, values(parameter.grad) / SCALE
    scaler.unscale_(late)
    scaler.step(early)
    scaler.update()
    scaler._check_inf_per_device(late)
    scaler.step(late)
    assert parameter.grad is gradient
    assert_same(values(gradient), expected)


@pytest.mark.parametrize("place", places(), ids=str)
def test_sum_of_sparse_fp16_duplicates_that_overflows_is_found(place: Place) -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([6e4, 6e4]).half(), (3,))
    optimizer = sgd([grad], place.device)
    scaler = started(Lone, place.device, backend=place.backend)
    scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", places(), ids=str)
def test_check_finds_what_torch_finds_and_writes_nothing(place: Place, kind: str) -> None:
    theirs, other = unscaled_by_torch(torch.amp.GradScaler, seeded(KINDS[kind]))
    optimizer = sgd(seeded(KINDS[kind])(), place.device)
    params = optimizer.param_groups[0]["params"]
    versions = [None if p.grad is None else values(p.grad)._version for p in params]
    scaler = started(GradScaler, place.device, backend=place.backend)
    found = scaler._check_inf_per_device(optimizer)
    assert [flag.item() for flag in found.values()] == flags(theirs, other)
    for parameter, before in zip(params, seeded(KINDS[kind])(), strict=True):
        if before is not None:
            assert_same(values(parameter.grad), values(before))
    if place.backend != "torch" or place.device == "cpu":  # torch's op on a GPU writes back what it read
        assert versions == [None if p.grad is None else values(p.grad)._version for p in params]


def seeded(make: Callable[[], list[Tensor | None]]) -> Callable[[], list[Tensor | None]]:
    def again() -> list[Tensor | None]:
        torch.manual_seed(3)
        return make()

    return again


REFUSED: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "fp16": (lambda: dense(torch.float16), ValueError, r"^Attempting to unscale FP16 gradients\.$"),
    "expanded": (lambda: torch.ones(1).expand(9), RuntimeError, EXPANDED),
    "complex": (
        lambda: torch.ones(3, dtype=torch.complex64),
        NotImplementedError,
        "parameter 1 has dtype torch.complex64",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), ValueError, "parameter 1 is on device meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("place", places(), ids=str)
def test_refused_gradients_raise_before_anything_is_written(place: Place, kind: str) -> None:
    make, error, text = REFUSED[kind]
    good = on_device(dense(), place.device)
    first = torch.nn.Parameter(torch.zeros_like(good))
    first.grad = good.clone()
    bad = make() if kind == "meta" else on_device(make(), place.device)
    second = torch.nn.Parameter(torch.zeros(bad.shape, dtype=bad.dtype, device=bad.device))
    second.grad = bad
    optimizer = torch.optim.SGD([first, second], lr=0.5)
    scaler = started(GradScaler, place.device, backend=place.backend)
    for _ in range(2):  # a second try meets the same stage
        with pytest.raises(error, match=text):
            scaler.unscale_(optimizer)
        assert_same(first.grad, good)
    second.grad = None
    scaler.unscale_(optimizer)
    assert_same(first.grad, good / 65536)


def test_torch_itself_divides_the_first_gradient_before_it_raises() -> None:
    """What the test above guards against is real."""
    first = torch.nn.Parameter(torch.zeros(2))
    first.grad = torch.ones(2)
    second = torch.nn.Parameter(torch.zeros(9))
    second.grad = torch.ones(1).expand(9)
    scaler = started(torch.amp.GradScaler, "cpu")
    with pytest.raises(RuntimeError, match=EXPANDED):
        scaler.unscale_(torch.optim.SGD([first, second], lr=0.5))
    assert first.grad.tolist() != [1.0, 1.0]


def test_an_int_gradient_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    parameter.grad = torch.ones(3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="parameter 0 has dtype torch.int64; only float16, bfloat16, float32"):
        started(GradScaler, "cpu").unscale_(torch.optim.SGD([parameter], lr=1.0))


def test_a_nested_gradient_is_refused() -> None:
    """One of the strided layout has no strides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        parameter = torch.nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    (2 * parameter).to_padded_tensor(0.0).sum().backward()
    with pytest.raises(NotImplementedError, match="parameter 0 is a nested tensor; only strided and sparse COO"):
        started(GradScaler, "cpu").unscale_(torch.optim.SGD([parameter], lr=1.0))


def test_sparse_gradients_with_expanded_values_are_refused_before_anything_is_written() -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        bad = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(1).expand(2), (5,))
    first, second = parameters([torch.tensor([4.0])], "cpu")[0], torch.nn.Parameter(torch.zeros(5))
    second.grad = bad
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    with pytest.raises(RuntimeError, match=EXPANDED):
        scaler.unscale_(torch.optim.SGD([first, second], lr=0.5))
    assert first.grad.item() == 4.0
    for dtype in (torch.float32, torch.float16):
        with torch.sparse.check_sparse_tensor_invariants(False):
            values = torch.ones(1, dtype=dtype).expand(2)
            expanded = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (5,))
        with pytest.raises(RuntimeError, match=EXPANDED):
            ops.unscale_([first.grad, expanded], torch.tensor(0.5), torch.zeros(()))
        assert first.grad.item() == 4.0


def test_a_coalesced_fp16_gradient_with_expanded_values_is_copied_as_by_torch() -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        values = torch.ones(1, dtype=torch.float16).expand(2)
        expanded = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (5,), is_coalesced=True)
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float16))
    parameter.grad = expanded
    started(Lone, "cpu", init_scale=4.0).unscale_(torch.optim.SGD([parameter], lr=0.5))
    assert parameter.grad.to_dense().tolist() == [0.25, 0.25, 0.0, 0.0, 0.0]


def test_fp16_parameters_may_become_fp32() -> None:
    (parameter,) = parameters([torch.tensor([4.0]).half()], "cpu")
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        scaler.unscale_(optimizer)
    parameter.data = parameter.data.float()
    parameter.grad = torch.tensor([4.0])
    scaler.unscale_(optimizer)
    assert parameter.grad.item() == 1.0


def test_fp32_parameters_that_become_fp16_are_refused_from_then_on() -> None:
    (parameter,) = parameters([torch.tensor([4.0])], "cpu")
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = started(GradScaler, "cpu", init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    parameter.data = parameter.data.half()
    parameter.grad = torch.tensor([4.0]).half()
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        scaler.unscale_(optimizer)
    assert parameter.grad.item() == 4.0


def test_fp16_is_refused_before_other_faults_are_named() -> None:
    for cls in (GradScaler, torch.amp.GradScaler):
        made = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
        for parameter in made:
            parameter.grad = torch.ones(1, dtype=parameter.dtype).expand(3)
        with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
            started(cls, "cpu").unscale_(torch.optim.SGD(made, lr=0.5))


@pytest.mark.parametrize("place", places(), ids=str)
def test_fp64_beyond_fp32_is_finite(place: Place) -> None:
    optimizer = sgd([torch.tensor([1e300], dtype=torch.float64)], place.device)
    scaler = started(GradScaler, place.device, init_scale=2.0, backend=place.backend)
    scaler.unscale_(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.item() == 5e299
    assert flags(scaler, optimizer) == [0.0]


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("leaf", [False, True])
def test_no_graph_records_the_division_of_gradients_that_are_part_of_one(leaf: bool, place: Place) -> None:
    optimizer = sgd([torch.tensor([3.0]), torch.tensor([5.0, 7.0])], place.device)
    made = optimizer.param_groups[0]["params"]
    scaler = started(GradScaler, place.device, init_scale=2.0, backend=place.backend)
    for in_graph in (False, True, False, True, True):
        for parameter in made:
            (grad,) = torch.autograd.grad((parameter - 1.0).square().sum(), parameter, create_graph=in_graph)
            # A leaf must not be written under grad; one with gaps is copied to and fro.
            parameter.grad = with_gaps(grad).detach().requires_grad_(in_graph) if leaf else grad
        before = [parameter.grad for parameter in made]
        nodes, wanted = [grad.grad_fn for grad in before], [grad.detach() / 2.0 for grad in before]
        scaler.unscale_(optimizer)
        assert [grad.grad_fn for grad in before] == nodes
        for parameter, grad, half in zip(made, before, wanted, strict=True):
            assert parameter.grad is grad
            assert_same(grad.detach(), half)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.gpu
def test_devices_mix_in_one_optimizer() -> None:
    cpu, gpu = parameters([torch.tensor([2.0, math.inf])], "cpu") + parameters([torch.tensor([4.0])], "cuda")
    optimizer = torch.optim.SGD([cpu, gpu], lr=1.0)
    scaler = started(GradScaler, "cuda", init_scale=2.0)
    scaler.unscale_(optimizer)
    assert gpu.grad.item() == 2.0
    assert flags(scaler, optimizer) == [1.0, 1.0]
    scaler.step(optimizer)
    assert gpu.item() == 0.0


@pytest.mark.gpu
def test_lists_of_tensors_may_mix_devices() -> None:
    for bad in ("cpu", "cuda", None):
        grads = [torch.full((3,), math.inf if device == bad else 6.0, device=device) for device in ("cpu", "cuda")]
        for home in ("cpu", "cuda"):
            found_inf = torch.zeros((), device=home)
            ops.check_nonfinite(grads, found_inf)
            assert found_inf.item() == float(bad is not None)


def test_lists_of_tensors_go_through_the_same_ops() -> None:
    grads = [torch.tensor([6.0, 9.0]), torch.tensor([3.0], dtype=torch.float64), torch.tensor(1.5).bfloat16()]
    found_inf = torch.zeros(1)
    ops.unscale_(grads, torch.tensor(1 / 3.0), found_inf)
    inverse = torch.tensor(1 / 3.0)
    assert [g.flatten()[0].item() for g in grads] == [2.0, 3.0 * inverse.double().item(), 0.5]
    assert found_inf.item() == 0.0
    ops.check_nonfinite([*grads, torch.tensor([math.nan])], found_inf)
    assert found_inf.item() == 1.0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.unscale_([3.0], torch.ones(()), torch.zeros(())), TypeError, r"grads\[0\] must be a Tensor"),
        (lambda: ops.unscale_([torch.ones(2).int()], torch.ones(()), torch.zeros(())), NotImplementedError, "int32"),
        (lambda: ops.unscale_([], torch.ones(2), torch.zeros(())), ValueError, "inv_scale must be one"),
        (lambda: ops.unscale_([], torch.ones(()), torch.zeros(()).double()), ValueError, "found_inf must be one"),
        (
            lambda: ops.check_nonfinite([torch.eye(2).to_sparse_csr()], torch.zeros(())),
            NotImplementedError,
            "has layout torch.sparse_csr",
        ),
        (lambda: ops.check_nonfinite([], torch.zeros(2)), ValueError, "found_inf must be one"),
        (
            lambda: ops.unscale_([], torch.ones(()), torch.zeros(()), backend="cuda"),
            ValueError,
            "backend must be one of",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_ops_name_the_wrong_argument(call: Callable[[], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()

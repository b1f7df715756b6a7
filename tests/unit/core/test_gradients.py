"""What a gradient may be: every kind that torch takes, to the bit; every kind that is refused, before any write."""

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import PLACES, Place, assert_same, flags, parameters, params_of, sgd, started
from tensor_pair import Pair
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.core import gradients

SCALE = 3.0
ONE = torch.ones(1)
EXPANDED = "more than one element of the written-to tensor refers to a single memory location"


def dense(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(37, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def coo(values: Tensor, *indices: int, **options: Any) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.tensor([indices], device=values.device), values, (8,), **options)


def sparse(dtype: torch.dtype = torch.float32) -> Tensor:
    """One with duplicates."""
    return coo(torch.tensor([1.5, 2.0, 7.0, -3.0]).to(dtype), 0, 2, 2, 5)


KINDS: dict[str, Callable[[], list[Tensor | None]]] = {
    "bf16": lambda: [dense(torch.bfloat16)],
    "fp64": lambda: [dense(torch.float64), torch.tensor([1e300], dtype=torch.float64)],
    "mixed": lambda: [dense(), dense(torch.float64), dense(torch.bfloat16), dense()],
    "none": lambda: [None, dense(), None],
    "scalar": lambda: [torch.tensor(5.0)],
    "empty": lambda: [torch.zeros(0), dense(), torch.zeros(3, 0), torch.zeros(0, 1).expand(0, 9)],
    "transposed": lambda: [dense().t()],
    "channels_last": lambda: [dense()[:24].reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    "gaps": lambda: [dense().view(-1)[::3], dense()[:, 1:4]],
    "stride-0": lambda: [dense()[0].as_strided((1, 5), (0, 1)), dense()[0, 0].as_strided((1,), (0,))],
    "misaligned": lambda: [dense().view(-1)[1:], dense().view(-1)[3:66]],
    "sparse": lambda: [sparse().coalesce(), dense()],
    "sparse-uncoalesced": lambda: [sparse()],
    "adjacent": lambda: list(dense().view(-1).split([30, 40, 115])),
    "nan": lambda: [dense(), torch.tensor([1.0, math.nan])],
    "inf": lambda: [torch.tensor([1.0, -math.inf]), dense()],
    "subnormal": lambda: [torch.tensor([1e-40, -1e-45, 3e38, -0.0])],
}


def values(grad: Any) -> Tensor:
    return grad._values() if grad.is_sparse else grad


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_unscaled_and_checked_as_by_torch(place: Place, kind: str) -> None:
    theirs, other = started(torch.amp.GradScaler, "cpu", init_scale=SCALE), sgd(KINDS[kind]())
    theirs.unscale_(other)
    for method in ("_check_inf_per_device", "unscale_"):
        mine, ours = sgd(KINDS[kind](), place.device), started(GradScaler, place.device, init_scale=SCALE)
        ours._ours.checks.requested = place.backend
        before = [None if p.grad is None else values(p.grad)._version for p in params_of(mine)]
        getattr(ours, method)(mine)
        assert max(flags(ours, mine), default=0.0) == max(flags(theirs, other), default=0.0)
        wanted = [p.grad for p in params_of(other)] if method == "unscale_" else KINDS[kind]()
        for parameter, want in zip(params_of(mine), wanted, strict=True):
            assert (parameter.grad is None) == (want is None)
            if want is not None:
                assert parameter.grad.is_sparse == want.is_sparse
                assert_same(values(parameter.grad), values(want))
        if method != "unscale_" and place != Place("cuda", "torch"):  # torch's op on a GPU writes back what it read
            assert before == [None if p.grad is None else values(p.grad)._version for p in params_of(mine)]


FP16 = r"^Attempting to unscale FP16 gradients\.\n\[ST08\] "  # torch's text, and a note
REFUSED: dict[str, tuple[Callable[[str], Tensor], type[Exception], str]] = {
    "fp16": (
        lambda device: dense(torch.float16).to(device),
        ValueError,
        r"^Attempting to unscale FP16 gradients\.\n\[ST08\] ",
    ),
    "expanded": (lambda device: torch.ones(1, device=device).expand(9), RuntimeError, EXPANDED),
    "expanded values": (lambda device: coo(ONE.to(device).expand(2), 0, 1, is_coalesced=True), RuntimeError, EXPANDED),
    "complex": (lambda device: torch.ones(3, device=device) * 1j, NotImplementedError, "1 has dtype torch.complex64;"),
    "meta": (lambda device: torch.ones(3, device="meta"), ValueError, "1 is on device meta, where there is nothing"),
}


@PLACES
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("method", ["unscale_", "clip_grad_norm_", "step"])
def test_what_is_refused_raises_before_anything_is_written(place: Place, kind: str, method: str) -> None:
    make, error, text = REFUSED[kind]
    bad = make(place.device)
    (first,), second = parameters([dense()], place.device), torch.nn.Parameter(bad.detach().to_dense().clone())
    second.grad = bad
    optimizer = torch.optim.SGD([first, second], lr=0.5)
    scaler = started(GradScaler, place.device, backend=place.backend)
    arguments = [1.0] if method == "clip_grad_norm_" else []
    for _ in range(2):  # a second try meets the same stage
        with pytest.raises(error, match=text):
            getattr(scaler, method)(optimizer, *arguments)
        assert_same(first.grad, dense())
    second.grad = None
    scaler.unscale_(optimizer)
    assert_same(first.grad, dense() / 65536)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: torch.ones(3, dtype=torch.int64), NotImplementedError, "only float16, bfloat16, float32, float64 can"),
        (lambda: torch.eye(2).to_sparse_csr(), NotImplementedError, "x has layout torch.sparse_csr; only strided and"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), NotImplementedError, "x is a nested tensor; only"),
        (lambda: torch.ones(3, 1).expand(3, 2), RuntimeError, EXPANDED),
        (lambda: coo(torch.ones(1).expand(2).half(), 0, 1), None, ""),  # it is going to be replaced
    ],
)
def test_one_gradient(make: Callable[[], Tensor], error: Any, text: str) -> None:
    with pytest.raises(error, match=text) if error else nullcontext():
        gradients.check_gradient(make(), "x")


@PLACES
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("gradient", "want", "flag"),
    [
        (lambda: sparse(torch.float16), [0.5, 3.0, -1.0], 0.0),
        (lambda: sparse(torch.float16).coalesce(), [0.5, 3.0, -1.0], 0.0),
        (lambda: coo(torch.tensor([6e4, 6e4]).half(), 1, 1), [math.inf], 1.0),
        (lambda: coo(torch.tensor([3.0]).half().expand(2), 0, 1, is_coalesced=True), [1.0, 1.0], 0.0),
    ],
    ids=["duplicates", "coalesced", "a sum that overflows", "expanded values"],
)
def test_a_sharded_scaler_takes_sparse_fp16(place: Place, gradient: Any, want: list[float], flag: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16, device=place.device))
    parameter.grad = gradient().to(place.device)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = started(ShardedGradScaler, place.device, init_scale=SCALE, backend=place.backend)
    scaler.unscale_(optimizer)
    assert values(parameter.grad).tolist() == want
    assert flags(scaler, optimizer) == [flag]


@PLACES
@pytest.mark.parametrize("leaf", [False, True])
def test_no_graph_records_the_division(leaf: bool, place: Place) -> None:
    optimizer = sgd([torch.tensor([3.0]), torch.tensor([5.0, 7.0])], place.device)
    scaler = started(GradScaler, place.device, init_scale=2.0, backend=place.backend)
    for in_graph in (False, True, True):
        for parameter in params_of(optimizer):
            (grad,) = torch.autograd.grad((parameter - 1.0).square().sum(), parameter, create_graph=in_graph)
            # A leaf must not be written under grad; one with gaps is copied to and fro.
            gaps = torch.stack([grad, grad], -1)[..., 0]
            parameter.grad = gaps.detach().requires_grad_(in_graph) if leaf else grad
        before = [parameter.grad for parameter in params_of(optimizer)]
        nodes, wanted = [grad.grad_fn for grad in before], [grad.detach() / 2.0 for grad in before]
        scaler.unscale_(optimizer)
        assert [grad.grad_fn for grad in before] == nodes
        for parameter, grad, want in zip(params_of(optimizer), before, wanted, strict=True):
            assert parameter.grad is grad
            assert_same(grad.detach(), want)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("tensor", "is_dense"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(24).as_strided((4, 1, 6), (1, 77, 4)), True),
        (torch.ones(()), True),
        (torch.ones(0, 3).t(), True),
        (torch.ones(4, 6)[:, ::2], False),
        (torch.ones(3).expand(2, 3), False),
        (torch.ones(9).as_strided((3, 3), (2, 1)), False),
    ],
)
def test_dense_means_one_span_without_gaps_or_overlap(tensor: Tensor, is_dense: bool) -> None:
    assert gradients.is_dense(tensor) is is_dense


# What ranks share


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("placements", "shards", "terms"),
    [
        ([Replicate(), Replicate()], 1, 1),
        ([Shard(0), Replicate()], 2, 1),
        ([Replicate(), Shard(0)], 1, 1),
        ([Partial(), Replicate()], 2, 2),
    ],
    ids=str,
)
def test_shards_and_terms_are_counted_by_placements(placements: list[Any], shards: int, terms: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    tensor = DTensor.from_local(torch.ones(3), mesh, placements, run_check=False)
    assert (gradients.num_shards(tensor), gradients.partial_terms(tensor)) == (shards, terms)
    assert gradients.is_dtensor(tensor)
    assert gradients.is_distributed(tensor)
    assert gradients.dtensor_spec(tensor) is tensor
    assert gradients.local_tensor(tensor).tolist() == [1.0] * 3
    whole: Any = gradients.reduced(tensor)
    assert (whole is tensor) is (terms == 1)
    assert terms == 1 or whole.placements == (Replicate(), Replicate())


@pytest.mark.usefixtures("two_ranks")
def test_a_shard_whose_collective_is_in_flight_is_waited_for() -> None:
    mesh = init_device_mesh("cpu", (2,))
    pending = functional.all_reduce(torch.ones(3), "sum", mesh.get_group())
    tensor = DTensor.from_local(pending, mesh, [Replicate()], run_check=False)
    assert type(gradients.local_tensor(tensor)) is Tensor


@pytest.mark.parametrize("mark", ["", "_fsdp_flattened", "_st_info"])
def test_marks_of_fsdp1_and_of_ddp_over_tensor_parallel(mark: str) -> None:
    parameter: Any = torch.nn.Parameter(torch.ones(3))
    if mark:
        setattr(parameter, mark, SimpleNamespace())
    assert gradients.local_tensor(parameter) is parameter
    assert gradients.is_distributed(parameter) is bool(mark)
    assert gradients.reduced(parameter) is parameter
    assert gradients.is_fsdp1(parameter) is (mark == "_fsdp_flattened")
    assert gradients.dtensor_spec(parameter) is (parameter._st_info if mark == "_st_info" else None)


def test_dtensor_is_not_imported_to_find_out_that_a_tensor_is_none(monkeypatch: Any) -> None:
    """Its import takes a second."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    assert not gradients.is_dtensor(torch.ones(1))
    assert "torch.distributed.tensor" not in sys.modules


# What is remembered of gradients, and known of parameters


def another(given: list[Any]) -> None:
    given.append(torch.nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda given: None, True),
        (lambda given: given[0].grad.mul_(1.0), False),
        (lambda given: setattr(given[0], "grad", torch.ones(2)), False),
        (lambda given: setattr(given[1], "grad", torch.ones(3)), False),
        (another, False),
    ],
    ids=["nothing", "written", "replaced", "made", "another parameter"],
)
def test_it_is_known_whether_somebody_has_written_a_gradient(change: Any, is_same: bool) -> None:
    given: list[Any] = [*parameters([torch.ones(2), None], "cpu")]
    state, before = gradients.state_of(given), [each.grad for each in given]
    change(given)
    assert gradients.is_unwritten(given, state) is is_same
    assert len(before) == 2


@pytest.mark.usefixtures("two_ranks")
def test_of_a_dtensor_it_is_the_shard_that_is_written() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter: Any = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False))
    parameter.grad = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
    state = gradients.state_of([parameter])
    assert gradients.is_unwritten([parameter], state)
    gradients.local_tensor(parameter.grad).mul_(2.0)
    assert not gradients.is_unwritten([parameter], state)


def test_what_is_remembered_of_a_gradient_does_not_keep_it() -> None:
    (parameter,) = parameters([torch.ones(2)], "cpu")
    state, gradient = gradients.state_of([parameter]), weakref.ref(parameter.grad)  # type: ignore[arg-type]
    parameter.grad = None
    assert gradient() is None
    assert len(state) == 1


@pytest.mark.usefixtures("two_ranks")
def test_the_largest_value_of_each_parameter_that_has_one_by_device_and_dtype() -> None:
    shard = DTensor.from_local(torch.tensor([-7.0, 1.0]), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    given: list[Any] = [
        torch.nn.Parameter(torch.tensor([1.0, -3.0])),
        torch.zeros(0),
        torch.tensor([2.0, math.nan]),
        torch.tensor([[5.0]], dtype=torch.float64),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to_sparse(),
        Pair(torch.ones(2), torch.ones(2)),
        torch.nn.Parameter(shard),
        torch.tensor(-math.inf),
    ]
    found = gradients.largest_by_kind(dict(enumerate(given, 10)))
    assert not any(largest.requires_grad for _, largest in found.values())
    assert {kind: (keys, str(largest.tolist())) for kind, (keys, largest) in found.items()} == {
        (torch.device("cpu"), torch.float32): ([10, 12, 19, 20], "[3.0, nan, 7.0, inf]"),
        (torch.device("cpu"), torch.float64): ([13], "[5.0]"),
    }

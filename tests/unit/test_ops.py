"""The public functions on lists of tensors: torch's results, any mix of dtypes, errors that name what is wrong."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compile_cases import fresh_compiler
from helpers import DTYPES, PLACES, Place, assert_all_same, on_device, randn, sum_of_squares
from torch import Tensor

from scaler_triton import ops

# A kernel sums rows of 512 squares in fp32: their random roundings stay far below this.
TOLERANCE = 1e-6
EXPANDED = "more than one element of the written-to tensor refers to a single memory location"


def number(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, device=device)


def sparse(tensor: Tensor, **options: Any) -> Tensor:
    """Return a sparse tensor with these values, all at index 1."""
    indices = torch.ones(1, len(tensor), dtype=torch.int64, device=tensor.device)
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, tensor, (5,), **options)


def some() -> list[Tensor]:
    """Of every dtype and layout."""
    made = [randn(9, dtype, seed) for seed, dtype in enumerate(DTYPES)]
    return [*made, randn(12).view(3, 4).t(), randn(9, seed=1)[::2], randn(0), torch.tensor(3.0), randn(5, seed=2)]


def there(tensors: Sequence[Tensor], place: Place) -> list[Tensor]:
    return [on_device(tensor, place.device) for tensor in tensors]


# Unscale and check


@PLACES
def test_sparse_values_are_taken_as_they_are(place: Place) -> None:
    """Duplicates are not summed."""
    values, flag = torch.tensor([6e4, 6e4]).half().to(place.device), number(0.0, place.device)
    gradient = sparse(values)
    ops.unscale_([gradient], number(0.5, place.device), flag, backend=place.backend)
    assert (gradient._values().tolist(), flag.item()) == ([3e4, 3e4], 0.0)
    assert ops.grad_norm([sparse(torch.tensor([3.0, 4.0]).to(place.device))], backend=place.backend).item() == 5.0


@pytest.mark.usefixtures("two_ranks")
def test_dtensors_are_taken_as_their_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.tensor([6.0, 8.0]), mesh, [Shard(0)], run_check=False)
    assert ops.grad_norm([tensor]).item() == 10.0
    ops.unscale_([tensor], number(0.5), number(0.0))
    assert tensor.to_local().tolist() == [3.0, 4.0]


@pytest.mark.gpu
@pytest.mark.parametrize("bad", ["cpu", "cuda", None])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_devices_may_mix(home: str, bad: str | None) -> None:
    grads = [torch.full((3,), math.inf if device == bad else 6.0, device=device) for device in ("cpu", "cuda")]
    flag = number(0.0, home)
    ops.unscale_(grads, number(0.5, home), flag)
    assert [grad[0].item() for grad in grads] == [math.inf if grad.device.type == bad else 3.0 for grad in grads]
    assert flag.item() == float(bad is not None)
    norm = ops.grad_norm(grads, number(0.0, home))
    assert norm.device.type == "cpu"
    assert norm.item() == pytest.approx(math.inf if bad else math.sqrt(54), rel=TOLERANCE)


# Norms


@PLACES
def test_the_2_norm_of_any_dtypes_together(place: Place) -> None:
    grads = [*some(), *(randn(numel, seed=numel) for numel in (511, 512, 513, 3000))]
    ours = there(grads, place)
    for before in (0.0, 1.0):  # a flag that is set stays so
        flag = number(before, place.device)
        got = ops.grad_norm(ours, flag, inv_scale=number(0.25, place.device), backend=place.backend)
        assert (got.dtype, got.shape, got.device.type, flag.item()) == (torch.float64, (), place.device, before)
        assert got.item() == pytest.approx(math.sqrt(sum_of_squares(grads)) / 4, rel=TOLERANCE)
        assert_all_same(ours, grads)


def test_nothing_has_the_norm_0_and_gradients_may_come_one_by_one() -> None:
    for grads in ([], [torch.zeros(0)], (torch.zeros(1) for _ in range(3))):
        assert ops.grad_norm(grads).item() == 0.0  # type: ignore[arg-type]


@PLACES
def test_one_update(place: Place) -> None:
    for scale, tracker, found, want in (
        (8.0, 5, 0.0, (16.0, 0)),  # torch compares with ==
        (8.0, 1, math.nan, (4.0, 0)),
        (2.0**-126, 0, 1.0, (2.0**-126, 0)),
    ):
        state = number(scale, place.device), torch.tensor(tracker, dtype=torch.int32, device=place.device)
        ops.update_scale_(*state, number(found, place.device), 2.0, 0.5, 2, backend=place.backend)
        assert tuple(each.item() for each in state) == want


ON_META = torch.zeros((), device="meta")
GOOD = {
    ops.unscale_: {"grads": [torch.ones(2)], "inv_scale": number(0.5), "found_inf": number(0.0)},
    ops.check_nonfinite: {"grads": [torch.ones(2)], "found_inf": number(0.0)},
    ops.grad_norm: {"grads": [torch.ones(2)]},
    ops.update_scale_: {
        "scale": number(8.0),
        "growth_tracker": torch.zeros((), dtype=torch.int32),
        "found_inf": number(0.0),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
    },
}
IN_EACH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"found_inf": number(0.0).double()}, ValueError, "^found_inf must be one torch.float32 element, got shape"),
    ({"found_inf": torch.zeros(2)}, ValueError, r"^found_inf must be one torch.float32 element, got shape \(2,\), "),
    ({"found_inf": 1.0}, TypeError, "^found_inf must be a Tensor, got float$"),
    ({"backend": "cuda"}, ValueError, "^backend must be one of auto, triton, torch, got 'cuda'$"),
]
OF_GRADS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"grads": [torch.ones(2), 3.0]}, TypeError, r"^grads\[1\] must be a Tensor, got float$"),
    ({"grads": [torch.ones(2), torch.ones(2).int()]}, NotImplementedError, r"^grads\[1\] has dtype torch.int32; only"),
    ({"grads": [torch.ones(2), torch.ones(2, device="meta")]}, ValueError, r"^grads\[1\] is on device meta, where "),
    ({"grads": [torch.ones(2), torch.ones(1).expand(2)]}, RuntimeError, EXPANDED),
    ({"grads": [torch.ones(2), sparse(torch.ones(1).half().expand(2))]}, RuntimeError, EXPANDED),
    ({"found_inf": ON_META}, ValueError, "^found_inf is on device meta, where it cannot be set$"),
]
CASES = [
    *((op, *case) for op in GOOD for case in IN_EACH),
    *((op, *case) for op in GOOD if op is not ops.update_scale_ for case in OF_GRADS),
    (ops.unscale_, {"inv_scale": torch.ones(2)}, ValueError, "^inv_scale must be one torch.float32 element"),
    (ops.grad_norm, {"inv_scale": torch.ones(2)}, ValueError, "^inv_scale must be one torch.float32 element"),
    (ops.update_scale_, {"scale": number(8.0).half()}, ValueError, "^scale must be one torch.float32 element"),
    (ops.update_scale_, {"growth_tracker": number(0.0)}, ValueError, "^growth_tracker must be one torch.int32 element"),
    (ops.update_scale_, {"growth_factor": 0.5}, ValueError, "^growth_factor .* got 0.5$"),
    (ops.update_scale_, {"backoff_factor": None}, TypeError, "^backoff_factor .* got None$"),
    (ops.update_scale_, {"growth_interval": 0}, ValueError, "^growth_interval .* got 0$"),
    (ops.update_scale_, {"found_inf": ON_META}, ValueError, "^found_inf must be on the scale's device, cpu, got meta$"),
]


@pytest.mark.parametrize(("op", "wrong", "error", "text"), CASES)
def test_a_wrong_argument_is_named_and_nothing_is_written(op: Any, wrong: Any, error: Any, text: str) -> None:
    arguments = copy.deepcopy(GOOD[op]) | wrong
    with pytest.raises(error, match=text):
        op(**arguments)
    for name in GOOD[op].keys() - wrong.keys() - {"grads"}:
        assert arguments[name] == GOOD[op][name]
    assert all(torch.equal(each, torch.ones(2)) for each in arguments.get("grads", [])[:1])


# Compiled callers


def use_all(grads: list[Tensor], found_inf: Tensor, scale: Tensor, tracker: Tensor) -> tuple[Tensor, ...]:
    """Half a step, without a host wait: every op on what the graph computed, and more on what the ops return."""
    doubled = [grad * 2 for grad in grads]
    ops.check_nonfinite(doubled, found_inf)
    ops.unscale_(grads, scale.reciprocal(), found_inf)
    norms = ops.grad_norm(grads, inv_scale=scale), ops.grad_norm(doubled, found_inf)
    ops.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2)
    return (*norms, ops.grad_norm([]) + 1, torch.where(found_inf != 0, 0.0, grads[0] + 1), scale * 3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_compiled_callers_get_what_others_get_in_one_graph() -> None:
    compiled = torch.compile(use_all, backend="aot_eager", fullgraph=True)
    results: list[list[Tensor]] = [[], []]
    with fresh_compiler():
        for special in (1.0, math.inf, math.nan):
            for function, result in zip((compiled, use_all), results, strict=True):
                grads = [randn(12).view(3, 4).t().clone(), randn(5, torch.float16), randn(2, torch.float64)]
                grads[1][0] = special
                state = number(0.0), number(4.0), torch.ones((), dtype=torch.int32)
                result += [*grads, *state, *function(grads, *state)]
    assert_all_same(*results)


OPS = torch.ops.scaler_triton
SCHEMAS = [
    ("unscale_", lambda: ([torch.ones(2), torch.full((3,), math.inf).half()], number(0.5), number(0.0))),
    ("check_nonfinite", lambda: ([torch.full((3,), math.inf)], number(0.0))),
    ("grad_norm", lambda: ([torch.full((3,), math.inf)], number(0.0), None)),
    ("update_scale_", lambda: (number(8.0), torch.ones((), dtype=torch.int32), number(0.0), 2.0, 0.5, 2)),
]


@pytest.mark.parametrize(("name", "arguments"), SCHEMAS, ids=[name for name, _ in SCHEMAS])
def test_a_custom_op_declares_what_it_writes_and_takes_its_backend(name: str, arguments: Any) -> None:
    """By torch's own checker, which runs it under fake tensors, too."""
    op = getattr(OPS, name).default
    torch.library.opcheck(op, arguments(), {"backend": None}, test_utils=("test_schema", "test_faketensor"))
    assert torch.Tag.cudagraph_unsafe in op.tags  # inductor may not capture it in graphs of its own
    with pytest.raises(ValueError, match="backend must be one of"):
        op(*arguments(), backend="neither")

"""Prepared lists: what the functions on lists compute, tensors as they are at each call, addresses sent once."""

import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from compile_cases import fresh_compiler
from helpers import DTYPES, KERNELS, PLACES, Place, assert_all_same, assert_same, randn, sum_of_squares, wide
from tensor_pair import Pair
from torch import Tensor

from scaler_triton import ops
from scaler_triton.core.dispatch import kernels
from scaler_triton.ops_prepared import Prepared


def number(value: float, place: Place) -> Tensor:
    return torch.tensor(value, device=place.device)


def some(place: Place, special: float = 1.0) -> list[Tensor]:
    """Of every dtype, with and without gaps."""
    dtypes = [dtype for dtype in DTYPES if dtype is not torch.float64 or wide(place) is torch.float64]
    made = [randn(numel, dtype, numel) for dtype in dtypes for numel in (5, 0, 600)]
    made += [randn(12).view(3, 4).t(), randn(9)[::2], randn(6, seed=2)]
    made[5][2] = special
    return [each.to(place.device) if each.is_contiguous() else each.to(place.device).t().t() for each in made]


def assert_as_lists(prepared: Prepared, place: Place) -> None:
    """Compare each method, on the tensors as they are now, with the function on a list of copies."""
    copies = [each.detach().clone() for each in prepared.tensors]
    factor, options = number(1 / 3, place), {"backend": place.backend}
    flags = [number(0.0, place) for _ in range(6)]
    prepared.check(flags[0])
    ops.check_nonfinite(copies, flags[1], **options)
    norm, want = prepared.norm(flags[2], inv_scale=factor), ops.grad_norm(copies, flags[3], inv_scale=factor, **options)
    torch.testing.assert_close(norm, want, rtol=1e-6, atol=0, equal_nan=True)  # a copy of one with gaps has none
    assert_all_same([each.detach() for each in prepared.tensors], copies)
    prepared.unscale_(factor, flags[4])
    ops.unscale_(copies, factor, flags[5], **options)
    assert_all_same([each.detach() for each in prepared.tensors], copies)
    assert len({flag.item() for flag in flags}) == 1


@PLACES
@pytest.mark.parametrize("special", [1.0, math.inf, math.nan])
def test_the_methods_do_what_the_functions_on_lists_do(place: Place, special: float) -> None:
    for tensors in (some(place, special), some(place, special)[:1], []):
        prepared = ops.prepare(tensors, backend=place.backend)
        assert len(prepared) == len(tensors)
        for _ in range(3):
            assert_as_lists(prepared, place)


# Clipping


@PLACES
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e9])
def test_clipping_multiplies_once_by_torchs_coefficient(place: Place, max_norm: float) -> None:
    tensors, flag = some(place), number(0.0, place)
    before, prepared = [each.clone() for each in tensors], ops.prepare(tensors, backend=place.backend)
    norm = prepared.clip_(max_norm, flag)
    assert (norm.dtype, norm.shape, norm.device.type, flag.item()) == (torch.float32, (), place.device, 0.0)
    assert norm.item() == pytest.approx(math.sqrt(sum_of_squares([each.cpu() for each in before])), rel=1e-6)
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for mine, was in zip(tensors, before, strict=True):
        in_fp32 = was.to(torch.promote_types(was.dtype, torch.float32))
        assert_same(mine, (in_fp32 * coef).to(was.dtype))


@PLACES
def test_what_is_flagged_is_not_clipped(place: Place) -> None:
    for special, value in ((math.inf, 0.0), (1.0, 1.0)):
        tensors, flag = some(place, special), number(value, place)
        before, prepared = [each.clone() for each in tensors], ops.prepare(tensors, backend=place.backend)
        for found_inf in (flag, flag) if value else (None, flag):
            norm = prepared.clip_(0.3, found_inf)
            assert norm.isfinite() == (special == 1.0)
            assert_all_same(tensors, before)
        assert flag.item() == 1.0


# What may not be mistaken

CHANGES: dict[str, Callable[[list[Tensor]], Any]] = {
    "other memory": lambda grads: setattr(grads[1], "data", torch.full_like(grads[1], 2.0)),
    "another size": lambda grads: setattr(grads[1], "data", torch.full((31,), 2.0, device=grads[1].device)),
    "another dtype": lambda grads: setattr(grads[1], "data", grads[1].data.to(torch.float16)),
    "gaps": lambda grads: setattr(grads[1], "data", grads[1].data.repeat(2)[::2]),
    "another place": lambda grads: setattr(grads[1], "data", grads[1].data[3:]),
    "unsqueeze_": lambda grads: grads[2].unsqueeze_(0),
    "resize_": lambda grads: grads[1].resize_(5000).fill_(2.0),
    "set_": lambda grads: grads[1].set_(torch.full((4,), 2.0, device=grads[1].device)),
    "requires_grad_": lambda grads: grads[1].requires_grad_(),
}


@PLACES
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_the_last_call_is_taken_as_it_is_now(place: Place, change: str) -> None:
    tensors = [torch.linspace(-3, 5, numel).to(place.device) for numel in (5, 6, 9)]
    prepared = ops.prepare(tensors, backend=place.backend)
    assert_as_lists(prepared, place)
    CHANGES[change](tensors)
    for _ in range(2):
        assert_as_lists(prepared, place)
    norm = prepared.clip_(0.5).item()
    assert prepared.norm().item() == pytest.approx(min(norm, 0.5), rel=1e-5)


@PLACES
def test_a_leaf_stays_a_leaf(place: Place) -> None:
    leaf = torch.full((4,), 4.0, device=place.device, requires_grad=True)
    prepared = ops.prepare([leaf], backend=place.backend)
    prepared.unscale_(number(0.5, place), number(0.0, place))
    assert not prepared.clip_(1.0).requires_grad
    assert (leaf.is_leaf, leaf.grad_fn, leaf.tolist()) == (True, None, [pytest.approx(0.5)] * 4)


@PLACES
def test_sparse_values_and_subclasses_are_looked_into_at_each_call(place: Place) -> None:
    values = [torch.full((2,), 6.0, device=place.device) for _ in range(2)]
    sparse, pair = torch.eye(2, device=place.device).to_sparse(), Pair(*values)
    prepared = ops.prepare([sparse, pair], backend=place.backend)
    for want in (0.5, 0.25):
        prepared.unscale_(number(0.5, place), number(0.0, place))
        assert (sparse._values().tolist(), pair.right.tolist()) == ([want] * 2, [6 * want] * 2)


# Errors

FLAG, FACTOR = torch.zeros(()), torch.tensor(0.5)
WRONG: list[tuple[Callable[[Prepared], Any], type[Exception], str]] = [
    (lambda it: it.unscale_(FACTOR, torch.zeros(2)), ValueError, "^found_inf must be one torch.float32 element"),
    (lambda it: it.unscale_(FACTOR, FLAG.double()), ValueError, "^found_inf must be one torch.float32 element"),
    (lambda it: it.unscale_(FACTOR, 0.0), TypeError, "^found_inf must be a Tensor, got float"),
    (lambda it: it.unscale_(0.5, FLAG), TypeError, "^inv_scale must be a Tensor, got float"),
    (lambda it: it.unscale_(torch.ones(2), FLAG), ValueError, "^inv_scale must be one torch.float32 element"),
    (lambda it: it.unscale_(FACTOR, FLAG.to("meta")), ValueError, "^found_inf is on device meta"),
    (lambda it: it.check(torch.zeros(2)), ValueError, "^found_inf must be one torch.float32 element"),
    (lambda it: it.norm(inv_scale=torch.zeros(2)), ValueError, "^inv_scale must be one torch.float32 element"),
    (lambda it: it.clip_(-1.0), ValueError, "^max_norm must be"),
]


@PLACES
@pytest.mark.parametrize(("call", "error", "text"), WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(place: Place, call: Any, error: Any, text: str) -> None:
    tensor = torch.ones(3, device=place.device)
    with pytest.raises(error, match=text):
        call(ops.prepare([tensor], backend=place.backend))
    assert tensor.tolist() == [1.0] * 3


def test_what_cannot_be_prepared_is_named() -> None:
    for wrong, error, text in (
        (1.0, TypeError, r"^grads\[1\] must be a Tensor, got float$"),
        (torch.ones(2).int(), NotImplementedError, r"^grads\[1\] has dtype torch.int32"),
        (torch.ones(2, device="meta"), ValueError, r"^grads\[1\] is on device meta"),
        (torch.ones(1).expand(2), RuntimeError, "more than one element"),
    ):
        with pytest.raises(error, match=text):
            ops.prepare([torch.ones(2), wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="^backend must be one of"):
        ops.prepare([], backend="cuda")


@PLACES
def test_a_tensor_that_has_become_illegal_is_named(place: Place) -> None:
    tensors, flag = [torch.ones(3, device=place.device) for _ in range(2)], number(0.0, place)
    prepared = ops.prepare(tensors, backend=place.backend)
    tensors[1].data = torch.ones(3, device=place.device).int()
    for call in (lambda: prepared.unscale_(number(0.5, place), flag), lambda: prepared.norm(flag)):
        with pytest.raises(NotImplementedError, match=r"^grads\[1\] has dtype torch.int32"):
            call()


def test_tensors_live_as_long_as_the_handle() -> None:
    tensor = torch.ones(3)
    prepared, kept = ops.prepare([tensor]), weakref.ref(tensor)
    del tensor
    assert kept() is prepared.tensors[0]
    del prepared
    assert kept() is None


# The kernels' tables


@KERNELS
def test_addresses_are_sent_once_as_long_as_they_are_the_same(place: Place) -> None:
    tensors, flag = [torch.ones(5, device=place.device) for _ in range(3)], number(0.0, place)
    prepared = ops.prepare(tensors, backend=place.backend)

    def use() -> None:
        prepared.check(flag)
        prepared.norm(flag)
        prepared.unscale_(number(0.5, place), flag)

    use()
    table = kernels().table.GradTable
    with mock.patch.object(table, "set_addresses", side_effect=AssertionError("sent again")):
        use()
    made = [batches[0].layout.tables for batches in prepared._batches.values()]
    tensors[1].data = torch.full((5,), 8.0, device=place.device)
    with mock.patch.object(table, "set_addresses", autospec=True, side_effect=table.set_addresses) as sent:
        use()
        use()
    assert sent.call_count == 3
    assert [batches[0].layout.tables for batches in prepared._batches.values()] == made
    assert [tensor[0].item() for tensor in tensors] == [1 / 16, 2.0, 1 / 16]


@KERNELS
def test_a_capture_and_the_call_after_it_send_addresses(place: Place) -> None:
    here, sent = {"capturing": False}, []
    with mock.patch.object(kernels().launch, "capture_query", return_value=lambda: here["capturing"]):
        prepared = ops.prepare([torch.ones(5, device=place.device)], backend=place.backend)
    table = kernels().table.GradTable
    prepared.check(number(0.0, place))
    with mock.patch.object(table, "set_addresses", side_effect=lambda _: sent.append(here["capturing"])):
        for here["capturing"] in (False, True, True, False, False):
            prepared.check(number(0.0, place))
    assert sent == [True, True, False]


# Compiled callers


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_caller_gets_what_others_get() -> None:
    def use(prepared: Prepared, found_inf: Tensor, factor: Tensor) -> Tensor:
        prepared.unscale_(factor * 2, found_inf)
        return prepared.norm(found_inf) + 1

    results = []
    with fresh_compiler():
        for function in (torch.compile(use, backend="aot_eager"), use):
            tensors, flag = [randn(5), randn(7, seed=1)], torch.zeros(())
            norms = [function(ops.prepare(tensors), flag, torch.tensor(0.25)) for _ in range(3)]
            results.append([*tensors, flag, *norms])
    assert_all_same(*results)
    in_one = torch.compile(use, backend="eager", fullgraph=True)
    with fresh_compiler(), pytest.raises(RuntimeError, match="compiled callers have scaler_triton.ops"):
        in_one(ops.prepare(tensors), flag, torch.tensor(0.25))

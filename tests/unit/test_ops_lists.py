"""Lists that come again: never taken for what they no longer are, not kept alive, and looked at only once."""

import gc
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import DTYPES, KERNELS, PLACES, Place, assert_all_same, assert_same, wide
from tensor_pair import Pair
from torch import Tensor

from scaler_triton import ops
from scaler_triton.core.dispatch import ENV_VARIABLE, kernels


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing at first."""
    monkeypatch.setattr(ops, "_known", OrderedDict())
    return ops._known


def made(place: Place, *numels: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.linspace(-3, 5, numel).to(place.device, dtype) for numel in numels]


def scalar(value: float, place: Place) -> Tensor:
    return torch.tensor(value, device=place.device)


def assert_right(grads: list[Tensor], place: Place) -> None:
    """Compare each op, on a list as it is now, with torch's on copies of its tensors one by one."""
    flag, norm_flag, want_flag = (torch.zeros(()) for _ in range(3))
    flag, norm_flag, factor = flag.to(place.device), norm_flag.to(place.device), scalar(1 / 3, place)
    before = [grad.detach().cpu().clone() for grad in grads]
    whole = torch.cat([grad.double().flatten() for grad in before]) / 3
    ops.check_nonfinite(grads, flag, backend=place.backend)
    norm = ops.grad_norm(grads, norm_flag, inv_scale=factor, backend=place.backend)
    assert_all_same(grads, before)
    for want in before:
        torch._amp_foreach_non_finite_check_and_unscale_([want], want_flag, torch.tensor(1 / 3))
    assert flag.item() == norm_flag.item() == want_flag.item()
    torch.testing.assert_close(norm.cpu(), whole.norm().to(wide(place)), rtol=1e-6, atol=0, equal_nan=True)
    flag.zero_()
    ops.unscale_(grads, factor, flag, backend=place.backend)
    assert flag.item() == want_flag.item()
    assert_all_same(grads, before)


# What is spared


@PLACES
def test_other_tensors_of_the_same_form_are_not_looked_at(place: Place, monkeypatch: Any) -> None:
    for special in (math.nan, 1.0, -math.inf):
        for numels in ([5], [5, 0, 600]):
            assert_right(made(place, *numels), place)
        grads = [tensor for dtype in DTYPES for tensor in made(place, 5, 0, 600, dtype=dtype)]
        grads += [made(place, 12)[0].view(3, 4).t()[:, ::2], made(place, 9)[0][::2], *made(place, 6)]
        grads[5][2] = special
        assert_right(grads, place)
        monkeypatch.setattr(ops, "_run_unknown", mock.Mock(side_effect=AssertionError("looked at again")))


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [1.0, math.inf, math.nan, 1e30, 1e-30])
def test_a_list_that_is_known_has_the_same_norm_to_the_bit(place: Place, dtype: torch.dtype, special: float) -> None:
    grads = made(place, 3, 5000, dtype=dtype)
    grads[1][7] = special
    for shape in ((), (1,)):
        factor = scalar(1 / 3, place).reshape(shape)
        first, *others = [ops.grad_norm(grads, inv_scale=factor, backend=place.backend) for _ in range(3)]
        for other in others:
            assert_same(first, other)


# What may not be mistaken


def replace(grads: list[Tensor]) -> None:
    """By tensors that most likely get the memory of the former ones."""
    device = grads[0].device
    del grads[1:]
    grads += [torch.full((3, 2), 7.0, device=device), torch.full((9,), 8.0, device=device)]


CHANGES: dict[str, Callable[[list[Tensor]], Any]] = {
    "other memory": lambda grads: setattr(grads[1], "data", torch.full_like(grads[1], 2.0)),
    "another size": lambda grads: setattr(grads[1], "data", torch.full((31,), 2.0, device=grads[1].device)),
    "a part of itself": lambda grads: setattr(grads[1], "data", grads[1].data[:3]),
    "another dtype": lambda grads: setattr(grads[1], "data", grads[1].data.to(torch.float16)),
    "other strides": lambda grads: setattr(grads[2], "data", grads[2].data.view(3, 3).t()),
    "gaps": lambda grads: setattr(grads[1], "data", grads[1].data.repeat(2)[::2]),
    "unsqueeze_": lambda grads: grads[2].unsqueeze_(0),
    "resize_": lambda grads: grads[1].resize_(2),
    "set_": lambda grads: grads[1].set_(torch.full((4,), 2.0, device=grads[1].device)),
    "requires_grad_": lambda grads: grads[1].requires_grad_(),
    "freed": replace,
    "order": lambda grads: grads.reverse(),
    "fewer": lambda grads: grads.pop(),
}


@PLACES
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_the_last_call_is_taken_as_it_is_now(place: Place, change: str) -> None:
    grads = made(place, 5, 6, 9)
    for _ in range(2):
        assert_right(grads, place)
    CHANGES[change](grads)
    for _ in range(2):
        assert_right(grads, place)


@PLACES
def test_lists_with_the_same_key_do_not_share_what_is_known(place: Place) -> None:
    for _ in range(3):
        for second in (6, 700, 0):
            assert_right(made(place, 5, second), place)
        assert_right([*made(place, 5), *made(place, 6, dtype=torch.bfloat16)], place)


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: 1.0, TypeError, r"grads\[1\] must be a Tensor, got float"),
    (lambda: torch.ones(5).int(), NotImplementedError, r"grads\[1\] has dtype torch.int32"),
    (lambda: torch.ones(5, device="meta"), ValueError, r"grads\[1\] is on device meta"),
    (lambda: torch.ones(1).expand(5), RuntimeError, "more than one element"),
    (lambda: torch.eye(5).to_sparse_csr(), NotImplementedError, r"grads\[1\] has layout torch.sparse_csr"),
]


@PLACES
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(("wrong", "error", "text"), WRONG)
def test_a_wrong_tensor_in_a_known_list_raises_before_a_write(place: Place, wrong: Any, error: Any, text: str) -> None:
    grads = made(place, 5, 5)
    for _ in range(2):
        assert_right(grads, place)
    before, flag = grads[0].clone(), scalar(0.0, place)
    grads[1] = wrong()
    for _ in range(2):
        with pytest.raises(error, match=text):
            ops.unscale_(grads, scalar(0.5, place), flag, backend=place.backend)
    assert_same(grads[0], before)


@PLACES
def test_wrong_scalars_beside_a_known_list_raise(place: Place, monkeypatch: Any) -> None:
    grads = made(place, 5)
    for _ in range(2):
        ops.unscale_(grads, scalar(0.5, place), scalar(0.0, place))
    for wrong in (scalar(0.0, place).double(), torch.zeros(2)):
        with pytest.raises(ValueError, match="^found_inf must be one torch.float32 element"):
            ops.unscale_(grads, scalar(0.5, place), wrong)
        with pytest.raises(ValueError, match="^inv_scale must be one torch.float32 element"):
            ops.unscale_(grads, wrong, scalar(0.0, place))
    monkeypatch.setenv(ENV_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=f"{ENV_VARIABLE} must be one of"):
        ops.unscale_(grads, scalar(0.5, place), scalar(0.0, place))


@PLACES
def test_modes_do_not_matter(place: Place) -> None:
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast(place.device)]
    for mode in [*modes, *modes]:
        with mode():
            assert_right(made(place, 5, 6), place)
        grads = made(place, 5, 6)
        with mode():
            assert_right(grads, place)


@PLACES
def test_views_of_a_leaf_stay_out_of_its_graph(place: Place) -> None:
    for _ in range(3):
        leaf = torch.ones(4, device=place.device, requires_grad=True)
        with torch.no_grad():
            views = [leaf.view(2, 2)[:1], leaf.detach()[3:]]
        ops.unscale_(views, scalar(0.5, place), scalar(0.0, place), backend=place.backend)
        assert (leaf.tolist(), leaf.grad_fn, views[0].grad_fn is None) == ([0.5, 0.5, 1.0, 0.5], None, True)
        assert not ops.grad_norm([leaf], backend=place.backend).requires_grad


# What is kept


@PLACES
def test_only_so_many_lists_are_known(place: Place, known: Any, monkeypatch: Any) -> None:
    assert ops._MOST == 64
    monkeypatch.setattr(ops, "_MOST", 5)
    for count in [*range(2, 10), 2, 9]:
        grads, flag = made(place, *[3] * count), scalar(0.0, place)
        ops.unscale_(grads, scalar(0.5, place), flag, backend=place.backend)
        assert all(torch.equal(grad, made(place, 3)[0] / 2) for grad in grads)
        assert len(known) <= 5
    assert sorted(length for _, _, length, _ in known) == [2, 6, 7, 8, 9]


@PLACES
def test_no_tensor_is_kept_alive(place: Place, known: Any) -> None:
    grads = [*made(place, 5, 6), *made(place, 7, dtype=torch.float64)]
    flag, factor = scalar(0.0, place), scalar(0.5, place)
    for _ in range(2):
        ops.unscale_(grads, factor, flag, backend=place.backend)
        ops.check_nonfinite(grads, flag, backend=place.backend)
        ops.grad_norm(grads, flag, inv_scale=factor, backend=place.backend)
    assert len(known) == 3
    kept = [weakref.ref(each) for each in (*grads, flag, factor)]
    del grads, flag, factor
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


def test_what_a_guard_does_not_see_into_is_looked_at_each_time(known: Any) -> None:
    leaf, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    sparse = torch.eye(2).to_sparse()
    for grads in ([leaf], [plain, plain], [sparse], [Pair(torch.ones(2), torch.ones(2))]):
        for _ in range(2):
            ops.unscale_(grads, torch.tensor(0.5), torch.tensor(0.0))
    assert leaf.tolist() == [0.25] * 2
    assert plain.tolist() == [0.5**4] * 2
    assert sparse.values().tolist() == [0.25] * 2
    assert not known


def test_without_torchs_guards_nothing_is_known_and_all_works(known: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    for _ in range(2):
        assert_right(made(Place("cpu", "torch"), 5, 6), Place("cpu", "torch"))
    assert not known


# The kernels' tables


@KERNELS
def test_a_call_amid_another_has_its_own_table(place: Place, monkeypatch: Any) -> None:
    """As from another thread, when the first has written its addresses and is about to launch."""
    outer, inner, factor, flag = made(place, 5), made(place, 5), scalar(0.5, place), scalar(0.0, place)
    module, todo = kernels().unscale, [inner]
    launch = module.launch_unscale

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if todo:
            ops.unscale_(todo.pop(), factor, flag, backend=place.backend)
        launch(*args, **kwargs)

    ops.unscale_(made(place, 5), factor, flag, backend=place.backend)
    monkeypatch.setattr(module, "launch_unscale", interrupted)
    ops.unscale_(outer, factor, flag, backend=place.backend)
    for grads in (outer, inner):
        assert_same(grads[0], made(place, 5)[0] / 2)


@KERNELS
def test_after_an_error_the_table_is_made_anew(place: Place, known: Any) -> None:
    factor, flag = scalar(0.5, place), scalar(0.0, place)
    ops.unscale_(made(place, 5), factor, flag, backend=place.backend)
    assert len(known) == 1
    interrupted = mock.patch.object(kernels().unscale, "launch_unscale", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        ops.unscale_(made(place, 5), factor, flag, backend=place.backend)
    assert not known
    assert_right(made(place, 5), place)


@KERNELS
def test_streams_and_graphs_have_their_own_tables_but_a_capture_those_of_the_call_before(place: Place) -> None:
    grads, factor, flag = made(place, 5), scalar(0.5, place), scalar(0.0, place)
    ops.unscale_(made(place, 7), factor, flag, backend=place.backend)  # the kernels are tried
    launched, here = [], {"stream": 1, "capturing": False}

    def launch(table: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(table)
        if here["capturing"]:
            table.captured.append(table)

    with (
        mock.patch.object(ops, "_stream", side_effect=lambda layout: here["stream"]),
        mock.patch.object(kernels().launch, "capture_query", return_value=lambda: here["capturing"]),
        mock.patch.object(kernels().unscale, "launch_unscale", launch),
    ):
        for stream, capturing in ((1, False), (1, False), (2, False), (2, False), (3, True), (2, False), (2, False)):
            here.update(stream=stream, capturing=capturing)
            ops.unscale_(grads, factor, flag, backend=place.backend)
    assert [launched.index(table) for table in launched] == [0, 0, 2, 2, 2, 5, 5]

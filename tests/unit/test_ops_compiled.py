"""The ops in a compiled function, without a graph break: what they write and return is what they do uncompiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_cases import fresh_compiler, nothing_new
from helpers import Place, assert_same, places
from page_blocks import blocks
from torch import Tensor

from scaler_triton import ops

# Torch's compiler meets deprecated parts of torch while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
PLACES = pytest.mark.parametrize("place", places(), ids=str)
EAGER_TOO = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
BACKENDS = pytest.mark.parametrize("compiler", ["aot_eager"])  # what eager does, and functionalized
VALUES = [1.0, math.inf, math.nan, 2.0**-14]


def scalar(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, device=device)


def gradients(device: str, value: float) -> list[Tensor]:
    """Of three dtypes, one transposed and one empty; one element is `value`."""
    dense = torch.linspace(-3, 3, 12, device=device)
    grads = [dense.reshape(3, 4).t(), dense[:5].half(), dense[:2].double(), dense[:0]]
    grads = [grad.clone() for grad in grads]
    grads[1][0] = value
    return grads


def assert_equal_runs(compiler: str, place: Place, function: Callable[..., Any]) -> None:
    """Call `function(gradients, found_inf)` compiled and not, with values good and bad; it compiles once."""
    with fresh_compiler():
        compiled = torch.compile(function, backend=compiler, fullgraph=True)
        compiled(gradients(place.device, 1.0), scalar(0.0, place.device))
        for value in VALUES:
            with nothing_new():
                ours = outcome(compiled, place, value)
            for mine, other in zip(ours, outcome(function, place, value), strict=True):
                assert_same(mine, other)


def outcome(function: Callable[..., Any], place: Place, value: float) -> list[Tensor]:
    grads, found_inf = gradients(place.device, value), scalar(0.0, place.device)
    returned = function(grads, found_inf)
    assert found_inf.item() == (not math.isfinite(value))
    return [*grads, found_inf, *returned]


@PLACES
@EAGER_TOO
def test_unscale(place: Place, compiler: str) -> None:
    def unscale(grads: list[Tensor], found_inf: Tensor) -> tuple[Tensor, ...]:
        inv_scale = torch.full((), 0.25, device=found_inf.device)
        ops.unscale_(grads, inv_scale, found_inf, backend=place.backend)
        return grads[0] + 1, found_inf * 2

    assert_equal_runs(compiler, place, unscale)


@PLACES
@BACKENDS
def test_unscaling_views_of_what_the_graph_computed(place: Place, compiler: str) -> None:
    def unscale(grads: list[Tensor], found_inf: Tensor) -> tuple[Tensor, ...]:
        made = torch.stack([grads[1], grads[1]]) * 2
        ops.unscale_([made[0]], torch.full((), 0.5, device=found_inf.device), found_inf, backend=place.backend)
        return (made * 3,)

    assert_equal_runs(compiler, place, unscale)


@PLACES
@BACKENDS
def test_check_nonfinite(place: Place, compiler: str) -> None:
    def check(grads: list[Tensor], found_inf: Tensor) -> tuple[Tensor, ...]:
        doubled = [grad * 2 for grad in grads]
        ops.check_nonfinite(doubled, found_inf, backend=place.backend)
        return (torch.where(found_inf != 0, 0.0, 1.0),)

    assert_equal_runs(compiler, place, check)


@PLACES
@BACKENDS
def test_grad_norm(place: Place, compiler: str) -> None:
    def norms(grads: list[Tensor], found_inf: Tensor) -> tuple[Tensor, ...]:
        inv_scale = torch.full((), 0.25, device=found_inf.device)
        two = ops.grad_norm(grads, found_inf, inv_scale=inv_scale, backend=place.backend)
        return two, ops.grad_norm(grads, norm_type=math.inf, backend=place.backend), ops.grad_norm([]) + 1

    assert_equal_runs(compiler, place, norms)


@PLACES
@BACKENDS
def test_update_scale(place: Place, compiler: str) -> None:
    def update(scale: Tensor, tracker: Tensor, found_inf: Tensor) -> Tensor:
        ops.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2, backend=place.backend)
        return scale.reciprocal()

    with fresh_compiler():
        compiled = torch.compile(update, backend=compiler, fullgraph=True)
        state = [(scalar(8.0, place.device), torch.zeros((), dtype=torch.int32, device=place.device)) for _ in range(2)]
        compiled(*[each.clone() for each in state[0]], scalar(0.0, place.device))
        for bad in (0.0, 0.0, 1.0, 0.0, 0.0):
            with nothing_new():
                mine = compiled(*state[0], scalar(bad, place.device))
            assert_same(mine, update(*state[1], scalar(bad, place.device)))
            for ours, theirs in zip(*state, strict=True):
                assert torch.equal(ours, theirs)
    assert state[0][0].item() == 16.0


@BACKENDS
def test_gradients_of_a_models_parameters(compiler: str) -> None:
    """Read from `.grad` in the graph, and clipped there: a whole second half of a step without a host wait."""
    net = torch.nn.Linear(3, 2)
    scale, tracker = scalar(4.0), torch.zeros((), dtype=torch.int32)

    def finish() -> Tensor:
        found_inf = torch.zeros(())
        grads = [parameter.grad for parameter in net.parameters()]
        ops.unscale_(grads, scale.reciprocal(), found_inf)
        norm = ops.grad_norm(grads)
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            step = 0.5 * grad * (1.0 / norm.float()).clamp(max=1.0)
            parameter.data.copy_(torch.where(found_inf != 0, parameter.data, parameter.data - step))
        ops.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 100)
        return norm

    with fresh_compiler():
        compiled = torch.compile(finish, backend=compiler, fullgraph=True)
        for value, want in ((8.0, 4.0), (math.inf, 2.0), (4.0, 2.0)):
            before = net.weight.detach().clone()
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, value)
            norm = compiled()
            assert scale.item() == want
            assert torch.equal(before, net.weight) == math.isinf(value)
        assert norm.item() == pytest.approx(math.sqrt(8) * 2, rel=1e-6)  # what `grad_norm` promises


def test_the_page_on_compile() -> None:
    """Its function is one graph, and steps or skips."""
    (source,) = blocks("docs/compile.md")
    names: dict[str, Any] = {}
    exec(source.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'"), names)
    parameter, scale = torch.nn.Parameter(torch.ones(3)), scalar(4.0)
    tracker = torch.zeros((), dtype=torch.int32)
    with fresh_compiler():
        for value, want, left in ((8.0, 0.0, 4.0), (math.inf, 0.0, 2.0), (2.0, -0.5, 2.0)):
            parameter.grad = torch.full((3,), value)
            names["finish"]([parameter], 0.5, scale, tracker)
            assert parameter.tolist() == [want] * 3
            assert scale.item() == left
    assert tracker.item() == 1


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: [torch.zeros(2, dtype=torch.int32)], NotImplementedError, r"^grads\[0\] has dtype torch.int32"),
    (lambda: [torch.zeros(1).expand(2)], RuntimeError, "more than one element of the written-to tensor"),
]


@BACKENDS
@pytest.mark.parametrize(("grads", "error", "text"), ERRORS, ids=["dtype", "overlap"])
def test_what_is_refused_uncompiled_is_refused_when_the_graph_runs(
    compiler: str, grads: Callable[[], list[Tensor]], error: type[Exception], text: str
) -> None:
    with fresh_compiler():
        compiled = torch.compile(lambda g, i, f: ops.unscale_(g, i, f), backend=compiler, fullgraph=True)
        for function in (compiled, ops.unscale_):
            with pytest.raises(error, match=text):
                function(grads(), scalar(0.5), scalar(0.0))


@pytest.fixture
def custom_ops() -> Any:
    """torch's handles of the ops that a graph calls, which the first compilation registers."""
    with fresh_compiler():
        torch.compile(lambda grads, flag: ops.check_nonfinite(grads, flag), backend="eager")(
            [torch.ones(1)], scalar(0.0)
        )
    return torch.ops.scaler_triton


def test_custom_ops_run_on_the_backend_that_they_are_given(custom_ops: Any) -> None:
    tracker = torch.zeros((), dtype=torch.int32)
    for op, args in (
        (custom_ops.unscale_, ([torch.ones(2)], scalar(0.5), scalar(0.0))),
        (custom_ops.check_nonfinite, ([torch.ones(2)], scalar(0.0))),
        (custom_ops.grad_norm, ([torch.ones(2)], scalar(0.0), None, 2.0)),
        (custom_ops.update_scale_, (scalar(8.0), tracker, scalar(0.0), 2.0, 0.5, 2)),
    ):
        with pytest.raises(ValueError, match="backend must be"):
            op(*args, "neither")
        assert torch.Tag.cudagraph_unsafe in op.default.tags  # Inductor may not capture them in graphs of its own


def test_schemas_of_custom_ops_say_what_they_write(custom_ops: Any) -> None:
    """Torch's own checker runs them under its fake tensors, and looks for writes that the schema hides."""
    checks = ("test_schema", "test_faketensor")
    grads, flag = [torch.ones(2), torch.full((3,), math.inf).half()], torch.zeros(())  # all is written that can be
    tracker, clean = torch.ones((), dtype=torch.int32), torch.zeros(())
    for name, args in (
        ("unscale_", (grads, scalar(0.5), flag, None)),
        ("check_nonfinite", (grads, flag, "torch")),
        ("grad_norm", (grads, flag, None, 2.0, None)),
        ("update_scale_", (scalar(8.0), tracker, clean, 2.0, 0.5, 2, None)),
    ):
        torch.library.opcheck(getattr(custom_ops, name).default, args, test_utils=checks)
